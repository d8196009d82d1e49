"""Validators and converters that the declarations share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attrs import validators as v

Validator = Callable[[Any, Any, Any], Any]


def whole(minimum: int) -> Validator:
    """A whole number of at least ``minimum``."""
    return v.and_(v.instance_of(int), v.ge(minimum))


def name() -> Validator:
    """A string that is not empty."""
    return v.and_(v.instance_of(str), v.min_len(1))


def int_tuple(values: Iterable[int]) -> tuple[int, ...]:
    """The values as a tuple of ints."""
    return tuple(int(value) for value in values)
