"""Faults that the simulator injects."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from hicache_core.spec.checks import whole


def _stream_numbers(numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(numbers)


@frozen(kw_only=True)
class Faults:
    """What goes wrong, and when. Calls are counted from 1; 0 means never.

    Args:
        refuse_registration_at: the registration call that is refused.
        refuse_registration_above: registrations of more bytes than this are refused; None for no limit.
        fail_copy_at: the submitted copy call whose bytes fail to move when it runs.
        refuse_copy_at: the copy call that is refused at submission.
        slow_streams: streams (numbered as they are made) that run only when somebody waits for them.
    """

    refuse_registration_at: int = field(default=0, validator=whole(0))
    refuse_registration_above: int | None = None
    fail_copy_at: int = field(default=0, validator=whole(0))
    refuse_copy_at: int = field(default=0, validator=whole(0))
    slow_streams: frozenset[int] = field(default=frozenset(), converter=_stream_numbers)
