"""Strict reading of files: every value knows its file and the keys that lead to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from attrs import evolve, frozen

from hicache_core.errors import HiCacheError, ModelFileError

_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def shown(value: object) -> str:
    """The value as a message quotes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@frozen(kw_only=True)
class Node:
    """A value of a model file, or of another that people write.

    Args:
        file: the file, as messages name it.
        path: the keys that lead to the value (``variants.bf16.pools[0]``); empty for the whole file.
        value: what the file holds there.
        error: the class of what is raised where the value is refused.
    """

    file: str
    path: str
    value: Any
    error: type[HiCacheError] = ModelFileError

    def refuse(self, *, got: str, expected: str, remedy: str) -> NoReturn:
        """Raise the file's error, naming the file and the key path."""
        who = f"{self.file}: {self.path}" if self.path else self.file
        raise self.error(who=who, got=got, expected=expected, remedy=remedy)

    def child(self, key: str, value: object) -> Node:
        """The value under ``key``."""
        return evolve(self, path=f"{self.path}.{key}" if self.path else key, value=value)

    def _typed(self, kind: type) -> Any:
        if type(self.value) is not kind:
            expected = _KINDS.get(kind, f"a {kind.__name__}")
            self.refuse(got=shown(self.value), expected=expected, remedy="Correct the value.")
        return self.value

    def mapping(self) -> dict[str, Node]:
        """The entries of an object whose keys are free; at least one."""
        entries = {key: self.child(key, value) for key, value in self._typed(dict).items()}
        if not entries or "" in entries:
            self.refuse(got=shown(self.value), expected="entries with names", remedy="Give at least one.")
        return entries

    def record(self, *, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Node]:
        """The entries of an object with fixed keys; keys that are missing or unknown are refused."""
        value = self._typed(dict)
        missing = [key for key in required if key not in value]
        unknown = [key for key in value if key not in required and key not in optional]
        if missing or unknown:
            faults = [f"no key '{key}'" for key in missing] + [f"the unknown key '{key}'" for key in unknown]
            self.refuse(
                got=" and ".join(faults),
                expected=f"the keys {', '.join(required)}"
                + (f" and perhaps {', '.join(optional)}" if optional else ""),
                remedy="Add what is missing; correct or remove what is unknown.",
            )
        return {key: self.child(key, child) for key, child in value.items()}

    def items(self) -> list[Node]:
        """The members of a list."""
        return [
            evolve(self, path=f"{self.path}[{number}]", value=value)
            for number, value in enumerate(self._typed(list))
        ]

    def free(self) -> dict[str, Any]:
        """An object whose content is for others to check."""
        value: dict[str, Any] = self._typed(dict)
        return value

    def text(self) -> str:
        """A text that is not empty."""
        value: str = self._typed(str)
        if not value:
            self.refuse(got="an empty text", expected="a text", remedy="Fill it in, or remove the key.")
        return value

    def flag(self) -> bool:
        """True or false."""
        value: bool = self._typed(bool)
        return value

    def number(self, least: int) -> int:
        """A whole number of at least ``least``."""
        if type(self.value) is not int or self.value < least:
            self.refuse(
                got=shown(self.value),
                expected=f"a whole number of at least {least}",
                remedy="Correct the figure.",
            )
        return self.value

    def choice(self, options: Sequence[str]) -> str:
        """One of ``options``."""
        if not isinstance(self.value, str) or self.value not in options:
            self.refuse(
                got=shown(self.value), expected=f"one of {', '.join(options)}", remedy="Take one of these."
            )
        return self.value
