"""What a geometry gives to a family: numbers, choices, and refusals that name the figure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hicache_core.errors import SpecError
from hicache_core.spec import ELEMENT_BYTES, IndexSpace, PoolGeometry


def _geometry(**params: Any) -> PoolGeometry:
    return PoolGeometry(
        pool="kv",
        family="rows",
        index_space=IndexSpace(name="full", page_slots=16),
        layer_ids=(0, 1),
        params=params,
    )


def test_a_choice_is_what_its_name_stands_for() -> None:
    """The value under the name, not the name."""
    assert _geometry(row_format="wide").choice("row_format", {"narrow": 64, "wide": 128}) == 128


@pytest.mark.parametrize("params", [{}, {"figure": None}, {"figure": "wide"}, {"figure": ["narrow"]}])
def test_a_name_that_is_no_choice_is_refused(params: dict[str, Any]) -> None:
    """Absent, unknown, or no name at all: the error lists the choices."""
    with pytest.raises(SpecError) as caught:
        _geometry(**params).choice("figure", {"narrow": 64})
    error = caught.value
    assert (error.code, error.who) == ("spec", "pool 'kv' (rows)")
    assert error.got == f"geometry figure={params.get('figure')!r}"
    assert "narrow" in error.expected
    assert "figure" in error.remedy


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_a_number_below_one_or_of_another_type_is_refused(value: object) -> None:
    """A flag is no number, and neither is text."""
    with pytest.raises(SpecError) as caught:
        _geometry(figure=value).number("figure")
    assert caught.value.got == f"geometry figure={value!r}"


def test_a_number_that_is_absent_is_its_default() -> None:
    """And a number that is there wins over it."""
    assert _geometry().number("figure", 3) == 3
    assert _geometry(figure=4).number("figure", 3) == 4


@pytest.mark.parametrize("name", ELEMENT_BYTES)
def test_element_bytes_are_those_of_torch(name: str) -> None:
    """Every name is a type of torch, with its size."""
    assert getattr(torch, name).itemsize == ELEMENT_BYTES[name]
