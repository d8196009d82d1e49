"""What a capability may amount to: a value of another type would be read as no value, or as a yes."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_core.errors import PluginError, SpecError
from hicache_core.spec import (
    PLATFORMS,
    SERVED_PAIRS,
    Capabilities,
    Capability,
    GraphCapture,
    IndexPlace,
    Platform,
    PointerDomain,
    PoolGeometry,
    PoolSpec,
    RowUnit,
    Verdict,
    default_capabilities,
    not_applicable,
    supported,
    unsupported,
)
from hicache_core.testing.stand_ins import pool_spec, registry_of

CUDA = PLATFORMS["cuda"]
SPEC = pool_spec(64)
DEFAULT = default_capabilities(SPEC, CUDA)
NO = unsupported("of-mine", "for tests", "none")

PLAIN = ["staged_write_back", "per_pool_backup_indices", "kernel_rows", "strided_copy"]
NONSENSE: list[tuple[str, Any]] = [
    *((name, value) for name in PLAIN for value in (True, False, 0, "yes")),
    ("kernel_pointer_domain", None),
    ("kernel_pointer_domain", "device"),
    ("kernel_pointer_domain", IndexPlace.DEVICE),
    ("host_index_device", None),
    ("host_index_device", "cpu"),
    ("host_index_device", IndexPlace.CPU),
    ("host_index_device", {("backup", "kernel", IndexPlace.CPU)}),
    ("host_index_device", frozenset({("backup", "kernel", "cpu")})),
    ("host_index_device", frozenset({("both", "kernel", IndexPlace.CPU)})),
    ("host_index_device", frozenset({("backup", "dma", IndexPlace.CPU)})),
    ("host_index_device", frozenset({("kernel", IndexPlace.CPU)})),
    ("graph_capture", None),
    ("graph_capture", "new-indices"),
    ("row_alignment", None),
    ("row_alignment", 0),
    ("row_alignment", -16),
    ("row_alignment", 48),
    ("row_alignment", True),
    ("row_alignment", 16.0),
    ("token_granular", None),
    ("token_granular", 0),
    ("token_granular", True),
    ("served_pairs", None),
    ("served_pairs", "kernel"),
    ("served_pairs", sorted(SERVED_PAIRS)),
    ("served_pairs", set(SERVED_PAIRS)),
    ("served_pairs", frozenset({"kernel"})),
    ("served_pairs", frozenset({("kernel", "page_first_direct")})),
    ("served_pairs", frozenset({("dma", "page_first")})),
]
SENSE: list[tuple[str, Any]] = [
    *((name, None) for name in PLAIN),
    *(("kernel_pointer_domain", domain) for domain in PointerDomain),
    ("host_index_device", frozenset()),
    ("host_index_device", frozenset({("load", "direct", IndexPlace.CPU)})),
    *(("graph_capture", kind) for kind in GraphCapture),
    ("row_alignment", 1),
    ("row_alignment", 64),
    ("token_granular", 2),
    ("served_pairs", frozenset()),
    ("served_pairs", frozenset({("kernel", "page_first")})),
]


def test_every_capability_is_covered_here() -> None:
    """One that is added needs a value that it refuses and one that it takes."""
    names = {name for name, _ in DEFAULT}
    assert {name for name, _ in NONSENSE} == {name for name, _ in SENSE} == names


@pytest.mark.parametrize(("name", "value"), NONSENSE)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    """The capability is named, with what it was given."""
    with pytest.raises(SpecError) as caught:
        DEFAULT.amended({name: supported(value)})
    assert caught.value.who == f"Capabilities.{name}"
    assert caught.value.got == repr(value)


@pytest.mark.parametrize(("name", "value"), SENSE)
def test_a_value_that_the_solver_reads_is_taken(name: str, value: Any) -> None:
    """Fewer pairs and places than the core's are good, none included."""
    assert getattr(DEFAULT.amended({name: supported(value)}), name).value == value


@pytest.mark.parametrize("name", [name for name, _ in DEFAULT])
def test_a_no_needs_no_value(name: str) -> None:
    """Neither does what is not applicable."""
    for capability in (NO, not_applicable("for tests")):
        assert getattr(DEFAULT.amended({name: capability}), name) is capability


@pytest.mark.parametrize("name", [name for name, _ in DEFAULT])
@pytest.mark.parametrize("value", [True, None, PointerDomain.DEVICE])
def test_what_is_no_verdict_is_no_capability(name: str, value: Any) -> None:
    """A bare flag says nothing of why."""
    with pytest.raises(SpecError) as caught:
        DEFAULT.amended({name: value})
    assert caught.value.who == f"Capabilities.{name}"


@pytest.mark.parametrize("verdict", [Verdict.UNSUPPORTED, Verdict.NOT_APPLICABLE])
@pytest.mark.parametrize("value", [PointerDomain.DEVICE, SERVED_PAIRS, 0])
def test_a_no_with_a_value_is_refused(verdict: Verdict, value: object) -> None:
    """Who reads the value alone would take it for a yes."""
    with pytest.raises(SpecError) as caught:
        Capability(verdict=verdict, value=value, code="of-mine")
    assert verdict.value in caught.value.who


def test_a_no_without_a_code_is_refused() -> None:
    """Reasons are told by their code; what is not applicable has a text alone."""
    with pytest.raises(SpecError):
        unsupported("", "for tests", "none")
    assert not not_applicable("for tests").code


def _list_of_pairs(spec: PoolSpec, platform: Platform) -> Capabilities:
    return default_capabilities(spec, platform).amended({"served_pairs": supported(sorted(SERVED_PAIRS))})


def _domain_by_name(spec: PoolSpec, platform: Platform) -> Capabilities:
    return default_capabilities(spec, platform).amended({"kernel_pointer_domain": supported("device")})


def _unknown_name(spec: PoolSpec, platform: Platform) -> Capabilities:
    return default_capabilities(spec, platform).amended({"staged": supported()})


def _by_name(spec: PoolSpec, platform: Platform) -> dict[str, Capability]:
    return dict(default_capabilities(spec, platform))


@pytest.mark.parametrize("hook", [_list_of_pairs, _domain_by_name, _unknown_name, _by_name])
def test_a_plugin_that_declares_nonsense_is_named(hook: Any) -> None:
    """The registry refuses it where it asks, so that no solver ever reads it."""
    registry = registry_of([SPEC], hicache_declare_capabilities=hook)
    spec = registry.spec(
        PoolGeometry(
            pool="kv", family="rows", index_space=SPEC.index_space, layer_ids=SPEC.layer_ids, anchor=True
        )
    )
    with pytest.raises(PluginError) as caught:
        registry.capabilities(spec, CUDA)
    assert caught.value.who == "rig"


@pytest.mark.parametrize(
    ("lie", "row_bytes", "unit"),
    [
        ({"row_alignment": supported(4096)}, 96, RowUnit.TOKEN),
        ({"row_alignment": supported(64)}, 96, RowUnit.TOKEN),
        ({"token_granular": supported(1)}, 96, RowUnit.PAGE),
    ],
    ids=["far too much", "too much", "tokens in pages without spans"],
)
def test_what_the_declaration_rules_out_is_refused_with_its_plugin(
    lie: dict[str, Capability], row_bytes: int, unit: RowUnit
) -> None:
    """Arithmetic needs no device: the registry itself sees it."""
    spec, facts = pool_spec(row_bytes, unit=unit), PLATFORMS["cuda"]
    honest = default_capabilities(spec, facts)
    registry = registry_of([spec], hicache_declare_capabilities=lambda spec, platform: honest.amended(lie))
    with pytest.raises(PluginError) as caught:
        registry.capabilities(spec, facts)
    assert caught.value.who == "rig"
    assert "capabilities of pool 'kv'" in caught.value.got


@pytest.mark.parametrize("alignment", [1, 16, 32])
def test_a_lower_alignment_than_the_rows_have_is_true(alignment: int) -> None:
    """Rows of 96 bytes are aligned to 32, and to every less."""
    spec, facts = pool_spec(96), PLATFORMS["cuda"]
    declared = default_capabilities(spec, facts).amended({"row_alignment": supported(alignment)})
    registry = registry_of([spec], hicache_declare_capabilities=lambda spec, platform: declared)
    assert registry.capabilities(spec, facts) is declared
