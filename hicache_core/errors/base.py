"""The base of all errors: who speaks, what was got, what was expected and what to do."""

from __future__ import annotations

from typing import ClassVar


class HiCacheError(Exception):
    """Base of all errors raised by hicache.

    Args:
        who: the part that speaks: a pool, a plugin with its distribution, a command.
        got: what was found.
        expected: what would have been right.
        remedy: what the reader can do about it.
    """

    code: ClassVar[str] = "hicache"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str) -> None:
        self.who = who
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{who}: got {got}; expected {expected}. {remedy}")
