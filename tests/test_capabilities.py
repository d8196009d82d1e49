"""What the core's default declares for strided rows, from row bytes and platform facts alone."""

from __future__ import annotations

import pytest

from hicache_core.spec import (
    PLATFORMS,
    BufferSpec,
    Capabilities,
    IndexSpace,
    PointerDomain,
    PoolSpec,
    RowUnit,
    Verdict,
    default_capabilities,
    not_applicable,
    supported,
    unsupported,
)

WITH_KERNELS = ["cpu-sim", "cuda", "cuda-wsl2", "rocm", "rocm-mi355x"]
WITHOUT_KERNELS = ["musa", "npu", "xpu"]
NAMES = [
    "staged_write_back",
    "per_pool_backup_indices",
    "kernel_rows",
    "kernel_pointer_domain",
    "host_index_device",
    "graph_capture",
    "row_alignment",
    "strided_copy",
    "token_granular",
    "served_pairs",
]


def _spec(*row_bytes: int, unit: RowUnit = RowUnit.PAGE) -> PoolSpec:
    return PoolSpec(
        pool="kv",
        family="rows",
        index_space=IndexSpace(name="full", page_slots=1 if unit is RowUnit.SLOT else 4),
        row_unit=unit,
        layer_ids=(0, 1),
        buffers=tuple(BufferSpec(name=f"b{i}", row_bytes=size) for i, size in enumerate(row_bytes)),
        anchor=True,
    )


def _default(platform: str, *row_bytes: int, unit: RowUnit = RowUnit.PAGE) -> Capabilities:
    return default_capabilities(_spec(*row_bytes, unit=unit), PLATFORMS[platform])


def test_every_platform_is_covered_here() -> None:
    """A new profile has to be put in one of the two lists."""
    assert sorted(PLATFORMS) == sorted(WITH_KERNELS + WITHOUT_KERNELS)


@pytest.mark.parametrize("platform", WITH_KERNELS)
@pytest.mark.parametrize(
    ("row_bytes", "staged", "kernel"), [(48, True, True), (40, False, True), (36, False, False)]
)
def test_row_multiples_decide_staging_and_kernels(
    platform: str, row_bytes: int, staged: bool, kernel: bool
) -> None:
    """Rows of 3 x 16, 5 x 8 and 9 x 4 bytes: staging needs 16, a kernel needs 8."""
    capabilities = _default(platform, row_bytes)
    assert bool(capabilities.staged_write_back) is staged
    assert bool(capabilities.kernel_rows) is kernel
    for capability in (capabilities.staged_write_back, capabilities.kernel_rows):
        assert capability or (capability.code == "row-alignment" and f"b0={row_bytes}" in capability.text)
        assert capability or capability.remedy


def test_one_buffer_out_of_step_decides_for_the_pool() -> None:
    """Keys of 64 and values of 40 bytes: the values are named, the keys are not."""
    staged = _default("cuda", 64, 40).staged_write_back
    assert (staged.verdict, staged.code) == (Verdict.UNSUPPORTED, "row-alignment")
    assert "b1=40" in staged.text
    assert "b0" not in staged.text


@pytest.mark.parametrize("platform", WITHOUT_KERNELS)
@pytest.mark.parametrize("row_bytes", [48, 40, 36])
def test_a_platform_without_kernels_moves_no_rows_by_kernel(platform: str, row_bytes: int) -> None:
    """Whatever the rows; the platform is named, and a plugin is the remedy."""
    kernel = _default(platform, row_bytes).kernel_rows
    assert (kernel.verdict, kernel.code) == (Verdict.UNSUPPORTED, "no-kernel")
    assert platform in kernel.text
    assert "plugin" in kernel.remedy


@pytest.mark.parametrize("platform", WITHOUT_KERNELS)
@pytest.mark.parametrize(("row_bytes", "staged"), [(48, True), (40, False)])
def test_staging_follows_the_rows_without_kernels_too(platform: str, row_bytes: int, staged: bool) -> None:
    """Strided copies by the copy engine need no kernel."""
    assert bool(_default(platform, row_bytes).staged_write_back) is staged


@pytest.mark.parametrize("platform", sorted(PLATFORMS))
def test_kernel_tables_hold_raw_addresses_only_where_nothing_is_registered(platform: str) -> None:
    """Device addresses on platforms that register host memory, raw ones on the others."""
    domain = _default(platform, 64).kernel_pointer_domain
    assert (bool(domain), domain.value) == (
        True,
        PointerDomain.RAW if platform in WITHOUT_KERNELS else PointerDomain.DEVICE,
    )


@pytest.mark.parametrize("platform", sorted(PLATFORMS))
def test_the_four_pairs_are_served_and_copies_may_be_strided(platform: str) -> None:
    """The default serves strided rows in every pair of the contract."""
    capabilities = _default(platform, 36)
    assert capabilities.served_pairs.value == {
        ("kernel", "layer_first"),
        ("kernel", "page_first"),
        ("direct", "layer_first"),
        ("direct", "page_first_direct"),
    }
    assert capabilities.strided_copy


@pytest.mark.parametrize("platform", sorted(PLATFORMS))
@pytest.mark.parametrize("row_bytes", [48, 40, 36])
def test_every_pool_takes_part_in_index_routing(platform: str, row_bytes: int) -> None:
    """Whether it is staged or not: routing is what tells the two apart."""
    assert _default(platform, row_bytes).per_pool_backup_indices


@pytest.mark.parametrize(
    ("unit", "granular"), [(RowUnit.TOKEN, True), (RowUnit.PAGE, False), (RowUnit.SLOT, False)]
)
def test_single_tokens_move_only_where_a_row_is_a_token(unit: RowUnit, granular: bool) -> None:
    """One span a token; elsewhere the bytes of a token are not declared."""
    capability = _default("cuda", 64, unit=unit).token_granular
    assert bool(capability) is granular
    assert (capability.value, capability.code) == ((1, "") if granular else (None, "no-spans"))


@pytest.mark.parametrize("platform", sorted(PLATFORMS))
def test_a_pool_without_bytes_has_nothing_to_say(platform: str) -> None:
    """Not applicable, rather than a yes or a no; it stands in no one's way."""
    verdicts = {name: capability.verdict for name, capability in _default(platform)}
    assert verdicts.pop("served_pairs") is Verdict.SUPPORTED
    assert set(verdicts.values()) == {Verdict.NOT_APPLICABLE}


def test_capabilities_are_listed_in_order_of_declaration() -> None:
    """Introspection shows all of them, under their names."""
    assert [name for name, _ in _default("cuda", 64)] == NAMES


def test_amending_leaves_the_original_and_the_rest_alone() -> None:
    """A family replaces what it knows better and inherits the rest."""
    default = _default("cuda", 64)
    no = unsupported("of-mine", "for tests", "none")
    amended = default.amended({"strided_copy": no})
    assert amended.strided_copy is no
    assert default.strided_copy
    assert [n for n, c in amended if c != getattr(default, n)] == ["strided_copy"]


def test_only_a_supported_capability_is_true() -> None:
    """A verdict in a condition means yes, and nothing else does."""
    verdicts = [supported(), supported(0), unsupported("c", "t", "r"), not_applicable("t")]
    assert [bool(capability) for capability in verdicts] == [True, True, False, False]
