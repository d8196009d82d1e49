"""A model file that breaks a rule is refused with the file and the keys that lead to the fault."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_core.errors import ModelFileError
from hicache_core.models import load_model

Document = dict[str, Any]
Change = Callable[[Document], object]


def _entry(pool: str, space: str, **more: Any) -> Document:
    entry = {
        "pool": pool,
        "family": "rows",
        "index_space": space,
        "anchor": False,
        "layer_ids": [0, {"first": 1, "step": 2, "count": 2}],
        "geometry": {"row_bytes": 64},
        "reuse": "all_pages",
        "row_bytes": 64,
        "status": "read",
        "source": "a table",
    }
    return {**entry, **more}


GOOD: Document = {
    "schema": 1,
    "id": "toy",
    "name": "toys/Toy-1B",
    "layer_count": 4,
    "page_slots": None,
    "page_slots_default": 16,
    "notes": "for tests",
    "default_variant": {"cuda": "plain"},
    "config": {"heads": {"value": 2, "status": "read", "source": "a table"}},
    "variants": {
        "plain": {
            "platforms": ["cuda"],
            "index_spaces": {"full": {}, "swa": {"page_slots": 8}},
            "pools": [
                _entry("kv", "full", anchor=True),
                _entry("index", "full", derive_from="kv"),
                _entry("window", "swa", reuse="trailing_pages", window_slots=8),
                _entry(
                    "draft",
                    "swa",
                    derive_from="window",
                    layer_ids=[3, 4],
                    draft_layers=1,
                    reuse="trailing_pages",
                    window_slots=8,
                ),
            ],
        },
        "wide": {
            "platforms": ["rocm"],
            "index_spaces": {"full": {}},
            "pools": [_entry("kv", "full", anchor=True)],
        },
    },
}


def _pools(document: Document) -> list[Document]:
    pools: list[Document] = document["variants"]["plain"]["pools"]
    return pools


def _write(folder: Path, text: str) -> Path:
    path = folder / "toy.json"
    path.write_text(text, encoding="utf-8")
    return path


def _set(*keys: str | int, to: Any) -> Change:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


def _pool(number: int, key: str, to: Any) -> Change:
    return _set("variants", "plain", "pools", number, key, to=to)


def _drop(*keys: str | int) -> Change:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


def test_the_good_file_loads(tmp_path: Path) -> None:
    """Every refusal below is of this file with one change."""
    model = load_model(_write(tmp_path, json.dumps(GOOD)))
    assert (model.id, model.page_slots, model.page_slots_default) == ("toy", None, 16)
    plain = model.variant(None, "cuda")
    assert plain.platforms == ("cuda", "cpu-sim")
    assert [entry.layer_ids for entry in plain.pools] == [(0, 1, 3), (0, 1, 3), (0, 1, 3), (3, 4)]
    assert [g.index_space.page_slots for g in plain.geometries()] == [16, 16, 8, 8]
    assert plain.geometries()[0].params == {"row_bytes": 64}


def test_a_platform_without_a_stated_default_gets_the_first_variant_that_lists_it(tmp_path: Path) -> None:
    """A file need not repeat what its platforms say."""
    assert load_model(_write(tmp_path, json.dumps(GOOD))).variant(None, "rocm").name == "wide"


_V = "variants.plain"
_P = f"{_V}.pools"
REFUSED: dict[str, tuple[Change, str, str]] = {
    "another schema": (_set("schema", to=2), "schema", "2"),
    "a schema that is no number": (_set("schema", to=True), "schema", "True"),
    "no schema": (_drop("schema"), "", "no key 'schema'"),
    "an unknown key": (_set("colour", to="red"), "", "the unknown key 'colour'"),
    "an unknown key of a variant": (_set("variants", "plain", "x", to=1), _V, "the unknown key 'x'"),
    "an unknown key of a pool": (_pool(1, "derived_from", "kv"), f"{_P}[1]", "'derived_from'"),
    "an unknown key of a figure": (_set("config", "heads", "unit", to="B"), "config.heads", "'unit'"),
    "an unknown key of a run": (_pool(0, "layer_ids", [{"start": 1}]), f"{_P}[0].layer_ids[0]", "'start'"),
    "a missing key of a pool": (_drop("variants", "plain", "pools", 0, "family"), f"{_P}[0]", "'family'"),
    "an id that is no text": (_set("id", to=7), "id", "7"),
    "an empty name": (_set("name", to=""), "name", "an empty text"),
    "no layers": (_set("layer_count", to=0), "layer_count", "0"),
    "layers in halves": (_set("layer_count", to=4.0), "layer_count", "4.0"),
    "a flag for a number": (_set("layer_count", to=True), "layer_count", "True"),
    "a text for a flag": (_pool(0, "anchor", "yes"), f"{_P}[0].anchor", "'yes'"),
    "a list for an object": (_set("variants", to=[]), "variants", "[]"),
    "no variant": (_set("variants", to={}), "variants", "{}"),
    "an object for a list": (_set("variants", "plain", "pools", to={}), _P, "{}"),
    "a page of no slots": (_set("page_slots", to=0), "page_slots", "0"),
    "a default beside a fixed page": (_set("page_slots", to=64), "page_slots_default", "a default beside"),
    "an unknown platform": (
        _set("variants", "plain", "platforms", to=["abacus"]),
        f"{_V}.platforms[0]",
        "'abacus'",
    ),
    "a default on an unknown platform": (
        _set("default_variant", "abacus", to="plain"),
        "default_variant.abacus",
        "'abacus'",
    ),
    "an unknown default": (_set("default_variant", "cuda", to="int3"), "default_variant.cuda", "'int3'"),
    "a default that its platform lacks": (
        _set("default_variant", "npu", to="plain"),
        "default_variant.npu",
        "'plain' as the default on npu",
    ),
    "an unknown index space": (_pool(1, "index_space", "half"), f"{_P}[1].index_space", "'half'"),
    "an unknown reuse": (_pool(1, "reuse", "some"), f"{_P}[1].reuse", "'some'"),
    "an unknown status": (_pool(1, "status", "sure"), f"{_P}[1].status", "'sure'"),
    "no source": (_pool(1, "source", ""), f"{_P}[1].source", "an empty text"),
    "row bytes below zero": (_pool(1, "row_bytes", -1), f"{_P}[1].row_bytes", "-1"),
    "geometry that is no object": (_pool(1, "geometry", [1]), f"{_P}[1].geometry", "[1]"),
    "layers out of order": (_pool(0, "layer_ids", [0, 2, 1]), f"{_P}[0].layer_ids[2]", "layer 1 after 2"),
    "a layer twice": (_pool(0, "layer_ids", [0, 0]), f"{_P}[0].layer_ids[1]", "layer 0 after 0"),
    "a run into a layer": (
        _pool(0, "layer_ids", [2, {"first": 0, "step": 1, "count": 2}]),
        f"{_P}[0].layer_ids[1]",
        "layer 0 after 2",
    ),
    "a layer below zero": (_pool(0, "layer_ids", [-1]), f"{_P}[0].layer_ids[0]", "-1"),
    "a layer beyond the last": (_pool(0, "layer_ids", [0, 4]), f"{_P}[0].layer_ids[1]", "layer 4"),
    "a run without end": (
        _pool(0, "layer_ids", [{"first": 0, "step": 1, "count": 10**15}]),
        f"{_P}[0].layer_ids[0]",
        "layer 999999999999999",
    ),
    "a layer beyond the draft": (_pool(3, "layer_ids", [3, 5]), f"{_P}[3].layer_ids[1]", "layer 5"),
    "draft layers that are the target's": (_pool(3, "layer_ids", [2, 3]), f"{_P}[3].layer_ids", "0 layers"),
    "no anchor": (_pool(0, "anchor", False), _P, "the anchors none"),
    "two anchors": (_pool(2, "anchor", True), _P, "kv (space 'full'), window (space 'swa')"),
    "an anchor of another space": (
        lambda d: (_pool(0, "anchor", False)(d), _pool(2, "anchor", True)(d)),
        _P,
        "window (space 'swa')",
    ),
    "an anchor that rides on another": (
        lambda d: (_pool(0, "anchor", False)(d), _pool(1, "anchor", True)(d)),
        _P,
        "index (space 'full')",
    ),
    "a pool name twice": (_pool(1, "pool", "kv"), f"{_P}[1].pool", "'kv' twice"),
    "an unknown source pool": (_pool(1, "derive_from", "k"), f"{_P}[1].derive_from", "'k'"),
    "a pool that rides on itself": (_pool(1, "derive_from", "index"), f"{_P}[1].derive_from", "'index'"),
    "a source of another space": (_pool(1, "derive_from", "window"), f"{_P}[1].derive_from", "'window'"),
    "another rule than the source": (_pool(3, "window_slots", 16), f"{_P}[3].reuse", "window_slots 16"),
    "a source that rides on another": (_pool(3, "derive_from", "index"), f"{_P}[3].derive_from", "'index'"),
    "two owners of a space": (_drop("variants", "plain", "pools", 1, "derive_from"), _P, "kv, index"),
    "a space without a pool": (_set("variants", "plain", "index_spaces", "spare", to={}), _P, "'spare'"),
    "trailing pages without a window": (
        _drop("variants", "plain", "pools", 2, "window_slots"),
        f"{_P}[2]",
        "without window_slots",
    ),
    "a window without trailing pages": (_pool(0, "window_slots", 8), f"{_P}[0]", "with window_slots"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_broken_rule_is_refused_where_it_is_broken(fault: str, tmp_path: Path) -> None:
    """Class, code, file, key path and what was got; an expectation and a remedy besides."""
    change, key_path, got = REFUSED[fault]
    document = copy.deepcopy(GOOD)
    change(document)
    path = _write(tmp_path, json.dumps(document))
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    error = caught.value
    assert error.code == "model-file"
    assert error.who == (f"{path}: {key_path}" if key_path else str(path))
    assert got in error.got
    assert error.expected
    assert error.remedy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        json.dumps(GOOD)[:-1] + ', "id": "toy"}',
        "[" * 100_000,
    ],
    ids=["empty", "cut short", "a key twice", "nested without end"],
)
def test_a_file_that_is_no_document_is_refused(text: str, tmp_path: Path) -> None:
    """JSON that does not parse, or that says one thing twice, names the file."""
    path = _write(tmp_path, text)
    with pytest.raises(ModelFileError) as caught:
        load_model(str(path))
    assert (caught.value.code, caught.value.who) == ("model-file", str(path))


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    """UTF-8 is part of the schema."""
    path = tmp_path / "toy.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert caught.value.who == str(path)


@pytest.mark.parametrize("value", [None, 3, "text", []])
def test_a_document_that_is_no_object_is_refused(value: object, tmp_path: Path) -> None:
    """A whole file that is a number or a list."""
    with pytest.raises(ModelFileError) as caught:
        load_model(_write(tmp_path, json.dumps(value)))
    assert caught.value.expected == "an object"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A path that ends in .json is a file, there or not."""
    path = tmp_path / "absent.json"
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert (caught.value.who, caught.value.code) == (str(path), "model-file")
    assert "FileNotFoundError" in caught.value.got


def test_a_file_of_any_name_is_read(tmp_path: Path) -> None:
    """The suffix matters only where there is no file."""
    path = tmp_path / "toy.model"
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    assert load_model(str(path)).id == "toy"
