"""The bytes of a replay: against an oracle of plain integers, and wrong ones counted to the byte."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_core.replay.content import LayerContent, block_page_keys, named, page_pattern

CPU = torch.device("cpu")
PLACE: dict[str, Any] = {
    "seed": 3,
    "session": "s",
    "model": "m",
    "pool": "kv",
    "buffer": "k",
    "layer": 5,
    "block": 77,
    "page": 1,
}
"""Where a byte belongs, but for its offset."""
OTHER = {
    "seed": 4,
    "session": "t",
    "model": "n",
    "pool": "c4",
    "buffer": "v",
    "layer": 6,
    "block": 78,
    "page": 0,
}

MASK = (1 << 64) - 1
# Powers of two with no remainder, remainders on either side of a word, and less than a word.
PAGE_BYTES = [64, 72, 65, 71, 9, 7, 1]


def mix(value: int) -> int:
    """SplitMix64's finaliser, in Python integers."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def number(*parts: object) -> int:
    """The number of a tuple of names."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def page_key(place: dict[str, Any]) -> int:
    """What seed, session, block and page in block come to."""
    block = mix(place["block"] ^ number("page", place["seed"], place["session"]))
    return mix((block + place["page"]) & MASK)


def expected(place: dict[str, Any], page_bytes: int) -> bytes:
    """The bytes of a page, a word at a time."""
    salt = number("layer", place["model"], place["pool"], place["buffer"], place["layer"])
    key = mix(page_key(place) ^ salt)
    words = (mix(word * 0x9E3779B97F4A7C15 & MASK) ^ key for word in range(-(-page_bytes // 8)))
    return b"".join(word.to_bytes(8, "little") for word in words)[:page_bytes]


def layer_content(place: dict[str, Any], page_bytes: int) -> LayerContent:
    """The content of the layer of a place."""
    names = place["model"], place["pool"], place["buffer"], place["layer"]
    return LayerContent(*names, page_bytes, page_pattern(page_bytes, CPU))


def keys_of(place: dict[str, Any]) -> np.ndarray:
    """The key of the page of a place: uint64[1]."""
    blocks = np.array([place["block"]], dtype=np.int64)
    return block_page_keys(place["seed"], place["session"], blocks, place["page"] + 1)[0, -1:]


def rows_of(pages: int, page_bytes: int) -> torch.Tensor:
    """A layer full of a byte that no content test expects everywhere."""
    return torch.full((pages, page_bytes), 0xA5, dtype=torch.uint8)


def written(place: dict[str, Any], page_bytes: int) -> bytes:
    """The bytes that the product writes at a place."""
    rows = rows_of(1, page_bytes)
    layer_content(place, page_bytes).fill(rows, np.array([0]), keys_of(place))
    return rows.numpy().tobytes()


def test_mixing_is_splitmix64() -> None:
    """The oracle itself: the first outputs of the published generator with seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    outputs = [mix((1234567 + step * golden) & MASK) for step in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_names_are_numbered_apart() -> None:
    """The boundary between two names counts, so no two tuples of names run together."""
    assert int(named("a", "bc", 1)) == number("a", "bc", 1)
    assert len({int(named(*parts)) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"))}) == 4


def test_keys_are_a_function_of_seed_session_block_and_page() -> None:
    """Each page of each block has the key that plain integers give."""
    blocks = np.array([0, 77, (1 << 62) + 3], dtype=np.int64)
    keys = block_page_keys(3, "s", blocks, 4)
    assert keys.dtype == np.uint64
    for (row, block), page in itertools.product(enumerate(blocks.tolist()), range(4)):
        assert int(keys[row, page]) == page_key({**PLACE, "block": block, "page": page})


@pytest.mark.parametrize("page_bytes", PAGE_BYTES)
def test_written_bytes_are_those_of_plain_integers(page_bytes: int) -> None:
    """Little endian words whatever the machine, cut off where a page is no whole number of words."""
    assert written(PLACE, page_bytes) == expected(PLACE, page_bytes)


@pytest.mark.parametrize("argument", OTHER)
def test_content_differs_with_each_argument(argument: str) -> None:
    """No two places share content, so a page that lands in the wrong one is seen."""
    assert argument in PLACE
    there = {**PLACE, argument: OTHER[argument]}
    ours, theirs = (np.frombuffer(written(place, 4096), dtype=np.uint8) for place in (PLACE, there))
    # Of random bytes one in 256 is equal by chance.
    assert np.count_nonzero(ours == theirs) < 64


def test_content_differs_with_the_offset() -> None:
    """A page that lands shifted is seen: its words are all different."""
    words = np.frombuffer(written(PLACE, 8 * 4096), dtype=np.uint64)
    assert np.unique(words).size == words.size


@pytest.mark.parametrize("page_bytes", PAGE_BYTES)
@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [5, 2, 3, 0], [4]])
def test_fill_writes_the_named_pages_and_no_other(page_bytes: int, numbers: list[int]) -> None:
    """Pages in any order, neighbours or not, each with its own key."""
    pages = np.array(numbers, dtype=np.int64)
    keys = block_page_keys(0, "", pages + 100, 1).ravel()
    rows = rows_of(7, page_bytes)
    layer_content(PLACE, page_bytes).fill(rows, pages, keys)
    for number_, row in enumerate(rows.numpy()):
        place = {**PLACE, "seed": 0, "session": "", "block": number_ + 100, "page": 0}
        untouched = b"\xa5" * page_bytes
        assert row.tobytes() == (expected(place, page_bytes) if number_ in numbers else untouched)


@pytest.mark.parametrize("page_bytes", PAGE_BYTES)
def test_numpy_rows_and_torch_rows_are_judged_alike(page_bytes: int) -> None:
    """What was filled as tensors is right as arrays, one row a page or several, near or apart."""
    pages = np.array([3, 0, 4], dtype=np.int64)
    keys = block_page_keys(9, "s", pages, 1).ravel()
    content = layer_content(PLACE, page_bytes)
    rows = rows_of(5, page_bytes)
    content.fill(rows, pages, keys)
    apart = np.full((5, 2, page_bytes), 0x11, dtype=np.uint8)
    apart[:, 0] = rows.numpy()
    views = [rows.numpy()[:, None, :], rows.numpy()[:, :, None], apart[:, :1]]
    assert content.wrong_bytes(rows, pages, keys) == 0
    assert [content.wrong_bytes_of(view, pages, keys) for view in views] == [0, 0, 0]


@pytest.mark.parametrize("page_bytes", PAGE_BYTES)
def test_one_flipped_byte_counts_as_one(page_bytes: int) -> None:
    """Each byte of a page is looked at, and a wrong one is counted once, by either judge."""
    pages = np.array([1, 2], dtype=np.int64)
    keys = block_page_keys(0, "", pages, 1).ravel()
    content = layer_content(PLACE, page_bytes)
    rows = rows_of(4, page_bytes)
    content.fill(rows, pages, keys)
    for offset in range(page_bytes):
        rows[2, offset] ^= 0x01
        assert content.wrong_bytes(rows, pages, keys) == 1
        assert content.wrong_bytes_of(rows.numpy()[:, None], pages, keys) == 1
        rows[2, offset] ^= 0x01


@pytest.mark.parametrize("page_bytes", PAGE_BYTES)
@pytest.mark.parametrize("last", [0, 5, 7, 8])
def test_neighbouring_wrong_bytes_count_one_by_one(page_bytes: int, last: int) -> None:
    """Pages are compared in words, wrong ones are counted in bytes."""
    page, keys = np.array([1]), block_page_keys(0, "", np.array([1]), 1).ravel()
    content, rows = layer_content(PLACE, page_bytes), rows_of(2, page_bytes)
    content.fill(rows, page, keys)
    rows[1, : last + 1] ^= 0xFF
    wrong = min(last + 1, page_bytes)
    assert content.wrong_bytes(rows, page, keys) == wrong
    assert content.wrong_bytes_of(rows.numpy()[:, None], page, keys) == wrong


@given(st.data())
def test_wrong_bytes_are_counted_exactly(data: st.DataObject) -> None:
    """So many different bytes flipped, so many counted; bytes of other pages do not count."""
    page_bytes = data.draw(st.sampled_from(PAGE_BYTES))
    pages = np.array([4, 1, 2], dtype=np.int64)
    keys = block_page_keys(1, "", pages, 1).ravel()
    content = layer_content(PLACE, page_bytes)
    rows = rows_of(6, page_bytes)
    content.fill(rows, pages, keys)
    place = st.tuples(st.integers(0, 5), st.integers(0, page_bytes - 1))
    flipped = data.draw(st.sets(place, max_size=20))
    for row, offset in flipped:
        rows[row, offset] ^= data.draw(st.integers(1, 255))
    seen = sum(row in (1, 2, 4) for row, _ in flipped)
    assert content.wrong_bytes(rows, pages, keys) == seen
    assert content.wrong_bytes_of(rows.numpy()[:, None], pages, keys) == seen


@pytest.mark.parametrize("page_bytes", [3 << 20, (3 << 20) + 1])
def test_pages_beyond_one_chunk_are_all_compared(page_bytes: int) -> None:
    """Comparison goes in chunks; a wrong byte in the last page of the last one is still found."""
    pages = np.arange(3)
    keys = block_page_keys(0, "", pages, 1).ravel()
    content = layer_content(PLACE, page_bytes)
    rows = rows_of(3, page_bytes)
    content.fill(rows, pages, keys)
    assert content.wrong_bytes(rows, pages, keys) == 0
    rows[2, page_bytes - 1] ^= 0xFF
    rows[0, 0] ^= 0xFF
    assert content.wrong_bytes(rows, pages, keys) == 2
    assert content.wrong_bytes_of(rows.numpy()[:, None], pages, keys) == 2


def test_no_pages_have_no_wrong_bytes() -> None:
    """A sweep over a tier that was never written compares nothing."""
    none, no_keys = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
    content, rows = layer_content(PLACE, 64), rows_of(2, 64)
    assert content.wrong_bytes(rows, none, no_keys) == 0
    assert content.wrong_bytes_of(rows.numpy()[:, None], none, no_keys) == 0
