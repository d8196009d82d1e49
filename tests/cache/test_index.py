"""The prefix index: leading runs, order of age, and locks, on blocks whose pages are numbers made up here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hicache_core.cache.index import Match, PrefixIndex, Tier


def pages(number: int) -> np.ndarray:
    """The pages of one block of two pages."""
    return np.array([2 * number, 2 * number + 1], dtype=np.int64)


def filled(tier: Tier, keys: Sequence[str]) -> Tier:
    """The tier with keys resident, inserted from left to right, each with its own pages."""
    for key in keys:
        tier.insert(key, pages(ord(key)))
    return tier


@pytest.fixture
def index() -> PrefixIndex:
    """An empty index."""
    return PrefixIndex()


def test_empty_index_matches_nothing(index: PrefixIndex) -> None:
    """Nothing is resident at first, and a request without blocks matches nothing either."""
    assert index.match("abc") == Match(device_blocks=0, host_blocks=0)
    assert index.match("") == Match(device_blocks=0, host_blocks=0)


def test_match_is_the_leading_run_on_the_device(index: PrefixIndex) -> None:
    """A block after the first hole is no hit, wherever it is."""
    filled(index.device, "abd")
    assert index.match("abcd") == Match(device_blocks=2, host_blocks=0)


def test_host_run_goes_on_where_the_device_run_ends(index: PrefixIndex) -> None:
    """Host hits start at the first block that the device lacks, and end at the first that the host lacks."""
    filled(index.device, "ab")
    filled(index.host, "cdf")
    assert index.match("abcdef") == Match(device_blocks=2, host_blocks=2)


def test_device_blocks_after_the_host_run_are_no_hits(index: PrefixIndex) -> None:
    """The match is two runs, not three: what the device has behind a hole in the host is not used."""
    filled(index.device, "ad")
    filled(index.host, "b")
    assert index.match("abcd") == Match(device_blocks=1, host_blocks=1)


def test_block_on_both_tiers_counts_as_a_device_hit(index: PrefixIndex) -> None:
    """Nothing is loaded that is there already."""
    filled(index.device, "ab")
    filled(index.host, "abc")
    assert index.match("abc") == Match(device_blocks=2, host_blocks=1)


def test_pages_are_those_that_were_given(index: PrefixIndex) -> None:
    """The index hands out the pages of a block and knows how many blocks it has."""
    filled(index.device, "ab")
    assert index.device.pages("b").tolist() == [2 * ord("b"), 2 * ord("b") + 1]
    assert len(index.device) == 2
    assert "a" in index.device
    assert "a" not in index.host


def test_touch_makes_the_leaf_the_oldest_of_a_request(index: PrefixIndex) -> None:
    """The root is the newest, so that giving up the oldest never cuts a prefix in two."""
    filled(index.device, "xabc")
    index.device.touch("abc")
    assert list(index.device) == ["x", "c", "b", "a"]


def test_touch_skips_what_is_not_resident(index: PrefixIndex) -> None:
    """Only blocks of the tier take part; the others are not made resident."""
    filled(index.device, "ab")
    index.device.touch("azb")
    assert list(index.device) == ["b", "a"]


def test_touch_of_the_index_reaches_both_tiers(index: PrefixIndex) -> None:
    """A device hit keeps the block young on the host as well."""
    for tier in (index.device, index.host):
        filled(tier, "ax")
    index.touch("a")
    assert [list(index.device), list(index.host)] == [["x", "a"], ["x", "a"]]


def test_victims_are_the_oldest(index: PrefixIndex) -> None:
    """They are named, oldest first, and stay until they are given up."""
    filled(index.device, "abc")
    assert index.device.victims(2) == ["a", "b"]
    assert list(index.device) == ["a", "b", "c"]


def test_given_up_blocks_return_their_pages(index: PrefixIndex) -> None:
    """Their pages come back in the order asked for and the blocks are gone, on that tier alone."""
    for tier in (index.device, index.host):
        filled(tier, "abc")
    freed = index.device.evict(["b", "a"])
    assert [block.tolist() for block in freed] == [pages(ord("b")).tolist(), pages(ord("a")).tolist()]
    assert [list(index.device), list(index.host)] == [["c"], ["a", "b", "c"]]


def test_there_are_no_more_victims_than_blocks(index: PrefixIndex) -> None:
    """Who asks for too many gets all; who asks for none or fewer gets none."""
    filled(index.device, "ab")
    assert index.device.victims(9) == ["a", "b"]
    assert index.device.victims(0) == []
    assert index.device.victims(-3) == []


def test_locked_blocks_are_no_victims_on_either_tier(index: PrefixIndex) -> None:
    """A request in progress keeps its blocks; younger ones go first."""
    for tier in (index.device, index.host):
        filled(tier, "abc")
    index.lock("ab")
    assert index.device.victims(2) == ["c"]
    assert index.host.victims(2) == ["c"]


def test_block_stays_locked_until_its_last_user_is_done(index: PrefixIndex) -> None:
    """Two requests share a root: the end of one does not free it for eviction."""
    filled(index.device, "ab")
    index.lock("ab")
    index.lock("a")
    index.unlock("ab")
    assert index.device.victims(2) == ["b"]
    index.unlock("a")
    assert index.device.victims(2) == ["a", "b"]


def test_lock_may_name_blocks_that_are_not_resident_yet(index: PrefixIndex) -> None:
    """A request locks what it is about to compute, so that it is kept from the moment it is there."""
    index.lock("a")
    filled(index.device, "a")
    assert index.device.victims(1) == []
    index.unlock("a")
    assert index.device.victims(1) == ["a"]
