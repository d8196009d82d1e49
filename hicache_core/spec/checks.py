"""Validators and converters that the declarations share; what they refuse is a SpecError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from hicache_core.errors import SpecError

Validator = Callable[[Any, Any, Any], Any]


def refuse(instance: object, attribute: Any, value: object, expected: str) -> NoReturn:
    """Raise the SpecError of a field that is not what was expected."""
    raise SpecError(
        who=f"{type(instance).__name__}.{attribute.name}",
        got=repr(value),
        expected=expected,
        remedy=f"Correct {attribute.name}.",
    )


def whole(minimum: int, *, or_none: bool = False) -> Validator:
    """A whole number of at least ``minimum``, or None where that is allowed."""

    def check(instance: object, attribute: Any, value: object) -> None:
        if or_none and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            refuse(instance, attribute, value, f"a whole number of at least {minimum}")

    return check


def name() -> Validator:
    """A string that is not empty, and can be printed as it is."""

    def check(instance: object, attribute: Any, value: object) -> None:
        if not isinstance(value, str) or not value or not value.isprintable():
            refuse(instance, attribute, value, "a string that is not empty, of characters that print")

    return check


def int_tuple(values: Iterable[int]) -> tuple[int, ...]:
    """The values as a tuple of ints."""
    return tuple(int(value) for value in values)
