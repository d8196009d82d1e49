"""How a host size is split: figures worked out by hand, one total, whole pages, and what does not fit.

Bytes of a page, by hand from published shapes:

- qwen3-30b-a3b: 48 layers x (k and v of 4 heads x 128 x 2 bytes = 1,024 each) = 98,304 a token, pages of one.
- qwen3.5-397b-a17b, bf16: 15 layers x 2 x 1,024 = 30,720 a token; a checkpoint is 45 layers x (4,194,304 +
  73,728) = 192,061,440.
- deepseek-v4-pro, cuda_v4, pages of 256: "full" has c4 30 x 37,440, its indexer 30 x 8,448 and c128 31 x
  1,728, in all 1,430,208; "swa" has the window 61 x 149,760 and two rings 30 x 65,536 and 30 x 16,384, in all
  11,592,960.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_core.assembly import model_group
from hicache_core.errors import CapacityError, HostSizeError, UnknownNameError
from hicache_core.plugins import load_plugins
from hicache_core.sizing import Basis, SizeRequest, Sizing, check_host_memory, split_host_size
from hicache_core.spec import BufferSpec, IndexSpace, PoolSpec, Reuse, RowUnit, platform_named

GIB = 1_073_741_824
QWEN35 = ("qwen3.5-397b-a17b", "bf16")


def split(model: str, variant: str, host_bytes: int, **changes: Any) -> Sizing:
    """The sizing of a shipped model."""
    group = model_group(model, variant, platform_named("cuda"), load_plugins())
    return split_host_size(group.specs, SizeRequest(host_bytes=host_bytes, **changes))


def pool(name: str, space: IndexSpace, row_bytes: int, *, anchor: bool = False) -> PoolSpec:
    """A pool of one layer whose pages are one row; of none where ``row_bytes`` is 0."""
    return PoolSpec(
        pool=name,
        family="stand_in",
        index_space=space,
        row_unit=RowUnit.PAGE,
        layer_ids=[0],
        buffers=[BufferSpec(name="rows", row_bytes=row_bytes)] if row_bytes else [],
        anchor=anchor,
    )


def full(page_slots: int = 1) -> IndexSpace:
    """The space of the anchor."""
    return IndexSpace(name="full", page_slots=page_slots)


LEAF = IndexSpace(name="state", page_slots=1, reuse=Reuse.LEAF)


def test_one_pool_gets_whole_pages() -> None:
    """64 GiB / 98,304 = 699,050.67: so many tokens, and two thirds of a page are left."""
    found = split("qwen3-30b-a3b", "bf16", 64 * GIB)
    space = found.spaces["full"]
    assert (space.pages, space.slots, space.page_bytes, space.basis) == (699_050, 699_050, 98_304, Basis.ALL)
    assert (found.nbytes, found.left_bytes) == (68_719_411_200, 65_536)


def test_windows_and_pages_share_as_a_block_keeps_them() -> None:
    """A block of 512 tokens keeps two pages and, of a window of 128, one: 14,453,376 bytes; 64 GiB hold
    4,754.56 of them, which is 9,509 pages of the one and 4,754 of the other."""
    found = split("deepseek-v4-pro", "cuda_v4", 64 * GIB)
    assert [(n, s.block_pages, s.page_bytes, s.pages) for n, s in found.spaces.items()] == [
        ("full", 2, 1_430_208, 9_509),
        ("swa", 1, 11_592_960, 4_754),
    ]
    assert {s.basis for s in found.spaces.values()} == {Basis.BLOCKS}
    assert found.spaces["full"].slots == 2_434_304
    assert {p.spec.pool: (p.pages, p.nbytes) for p in found.pools} == {
        "kv": (9_509, 0),
        "swa": (4_754, 43_429_501_440),
        "c4": (9_509, 10_680_508_800),
        "c4_indexer": (9_509, 2_409_960_960),
        "c4_state": (4_754, 9_346_744_320),
        "c4_indexer_state": (4_754, 2_336_686_080),
        "c128": (9_509, 509_378_112),
    }
    assert (found.nbytes, found.left_bytes) == (68_712_779_712, 6_697_024)


def test_checkpoints_and_tokens_share_as_a_block_keeps_them() -> None:
    """512 tokens and one checkpoint are 207,790,080 bytes; 64 GiB hold 330.716 of them."""
    found = split(*QWEN35, 64 * GIB)
    assert {name: space.pages for name, space in found.spaces.items()} == {"full": 169_326, "state": 330}
    assert found.nbytes == 169_326 * 30_720 + 330 * 192_061_440 == 68_581_969_920


def test_smaller_blocks_mean_more_checkpoints() -> None:
    """With a block of 64 tokens: 64 x 30,720 + 192,061,440 = 194,027,520, of which 64 GiB hold 354.17."""
    found = split(*QWEN35, 64 * GIB, block_tokens=64)
    assert {name: space.pages for name, space in found.spaces.items()} == {"full": 22_667, "state": 354}


def test_i9_shares_are_of_one_total() -> None:
    """75:25 of 64 GB: 48 GB / 30,720 = 1,562,500 tokens, 16 GB / 192,061,440 = 83.3 checkpoints."""
    shares = {"full": Fraction(3, 4), "state": Fraction(1, 4)}
    found = split(*QWEN35, 64 * 10**9, shares=shares)
    assert {name: space.pages for name, space in found.spaces.items()} == {"full": 1_562_500, "state": 83}
    assert {space.basis for space in found.spaces.values()} == {Basis.SHARE}
    assert found.nbytes == 63_941_099_520


def test_pages_that_are_given_come_off_the_total_first() -> None:
    """Two checkpoints of 1 GB leave 615,877,120 bytes: 20,048 tokens."""
    found = split(*QWEN35, 10**9, pages={"state": 2})
    assert {name: (space.pages, space.basis) for name, space in found.spaces.items()} == {
        "full": (20_048, Basis.ALL),
        "state": (2, Basis.PAGES),
    }


def test_small_size_gives_a_page_of_each_space() -> None:
    """200 MB are less than a block; one checkpoint is there, and the rest is 258 tokens."""
    found = split(*QWEN35, 200_000_000)
    assert {name: space.pages for name, space in found.spaces.items()} == {"full": 258, "state": 1}


@pytest.mark.parametrize(
    ("choices", "least"),
    [
        ({}, 192_092_160),
        ({"pages": {"state": 10}}, 1_920_645_120),
        ({"pages": {"state": 1, "full": 1000}}, 222_781_440),
        # A checkpoint in a tenth; a tenth of the tenth would do for the token.
        ({"shares": {"state": Fraction(1, 10)}}, 1_920_614_400),
        # A token in 1/100,000 of the size: more than a checkpoint in the rest.
        ({"shares": {"full": Fraction(1, 100_000)}}, 3_072_000_000),
    ],
)
def test_least_size_is_exact(choices: dict[str, Any], least: int) -> None:
    """What is named as enough is enough, and a byte less is refused, short of one byte."""
    found = split(*QWEN35, least, **choices)
    assert min(space.pages for space in found.spaces.values()) >= 1
    with pytest.raises(HostSizeError) as refused:
        split(*QWEN35, least - 1, **choices)
    error = refused.value
    assert (error.reason, error.nbytes, error.short_bytes, error.fits_bytes) == ("split", least - 1, 1, least)


@pytest.mark.parametrize(
    "choices",
    [
        {"shares": {"full": Fraction(3, 4), "state": Fraction(1, 2)}},
        {"shares": {"full": Fraction(1)}},
        {"shares": {"full": Fraction(0)}},
        {"shares": {"full": Fraction(-1, 2)}},
        {"pages": {"state": 0}},
        {"pages": {"state": 1}, "shares": {"state": Fraction(1, 2)}},
    ],
)
def test_shares_that_contradict_each_other_are_refused(choices: dict[str, Any]) -> None:
    """More than all of it, nothing for a space that is there, or two answers for one space."""
    with pytest.raises(CapacityError) as refused:
        split(*QWEN35, 64 * GIB, **choices)
    assert not isinstance(refused.value, HostSizeError)


@pytest.mark.parametrize("choices", [{"pages": {"swa": 1}}, {"shares": {"swa": Fraction(1, 2)}}])
def test_space_that_the_group_lacks_is_refused(choices: dict[str, Any]) -> None:
    """By name, with those that there are."""
    with pytest.raises(UnknownNameError) as refused:
        split(*QWEN35, GIB, **choices)
    assert "'swa'" in refused.value.got
    assert "full, state" in refused.value.expected


def test_group_without_bytes_is_refused() -> None:
    """There is nothing to divide by."""
    with pytest.raises(CapacityError):
        split_host_size([pool("kv", full(), 0, anchor=True)], SizeRequest(host_bytes=GIB))


def test_anchor_without_bytes_has_pages_beside_those_with_bytes() -> None:
    """Blocks of 8 tokens are 2 pages of the anchor; 100 bytes hold 5 states of 20, so 10 pages."""
    specs = [pool("kv", full(4), 0, anchor=True), pool("s", LEAF, 20)]
    found = split_host_size(specs, SizeRequest(host_bytes=100, block_tokens=8))
    assert {name: space.pages for name, space in found.spaces.items()} == {"full": 10, "state": 5}
    assert found.left_bytes == 0


sizes = st.integers(1, 10_000)


@given(sizes, sizes, sizes, st.integers(1, 600), st.integers(0, 10**7))
def test_i9_pools_never_take_more_than_the_total(a: int, b: int, c: int, block: int, extra: int) -> None:
    """From the least size up, every space has a page, the sum is within the total, and proportions hold."""
    specs = [pool("a", full(16), a, anchor=True), pool("b", full(16), b), pool("c", LEAF, c)]
    total = a + b + c + extra
    found = split_host_size(specs, SizeRequest(host_bytes=total, block_tokens=block))
    pages, states = found.spaces["full"].pages, found.spaces["state"].pages
    assert pages >= 1
    assert states >= 1
    assert pages * (a + b) + states * c == found.nbytes == total - found.left_bytes <= total
    kept = -(-block // 16)
    assert found.spaces["full"].block_pages == kept
    if pages > 1 and states > 1:
        assert states <= pages / kept + 1
        assert pages <= (states + 1) * kept


def test_host_memory_holds_all_ranks_and_the_reserve() -> None:
    """8 x 64 GiB and 100 GiB of 700 GiB leave 88 GiB; just enough leaves nothing."""
    assert check_host_memory(64 * GIB, ranks=8, memory_bytes=700 * GIB, reserve_bytes=100 * GIB) == 88 * GIB
    assert check_host_memory(64 * GIB, ranks=8, memory_bytes=512 * GIB) == 0


@pytest.mark.parametrize(
    ("ranks", "memory", "reserve", "short", "fits"),
    [
        (8, 512 * GIB, 32 * GIB, 32 * GIB, 60 * GIB),
        (8, 512 * GIB - 1, 0, 1, 64 * GIB - 1),
        (1, 10 * GIB, 20 * GIB, 74 * GIB, 0),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    ranks: int, memory: int, reserve: int, short: int, fits: int
) -> None:
    """By how much all ranks fall short of the host, and what one rank could have."""
    with pytest.raises(HostSizeError) as refused:
        check_host_memory(64 * GIB, ranks=ranks, memory_bytes=memory, reserve_bytes=reserve)
    error = refused.value
    assert (error.reason, error.short_bytes, error.fits_bytes) == ("host-memory", short, fits)


def test_refusal_shows_the_unit_that_was_given_and_bytes() -> None:
    """GB for GB: 64 GB twice are 28 GB more than 100."""
    with pytest.raises(HostSizeError) as refused:
        check_host_memory(64 * 10**9, ranks=2, memory_bytes=10**11, shown_like="64GB")
    assert "28.000 GB (28,000,000,000 bytes)" in refused.value.expected
    assert "GiB" not in str(refused.value)
