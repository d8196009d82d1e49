"""Bytes of a replay: a function of where they belong, so that every loaded byte is checked without a copy.

Word w (8 bytes, little endian) of a page in one layer of one buffer is ``pattern[w] ^ key``, where the key
mixes (seed, session, block, page in block) with (model, pool, buffer, layer) and the pattern depends on w.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

Uint64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

_CHUNK_BYTES = 4 << 20
_WORD = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mixed(values: Uint64Array) -> Uint64Array:
    """The SplitMix64 finaliser of each value (Steele, Lea and Flood, OOPSLA 2014)."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def named(*parts: object) -> np.uint64:
    """A number for a tuple of names and numbers."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def block_page_keys(
    seed: int, session: str, blocks: Int64Array, block_pages: int, space: str = ""
) -> Uint64Array:
    """The key of each page of some blocks: uint64[len(blocks), block_pages].

    Args:
        seed: seed of the replay.
        session: the namespace of the block ids.
        blocks: int64[n], block ids.
        block_pages: pages of one block.
        space: name of the index space, where a block has pages in several.
    """
    salt = named("page", seed, session, *filter(None, [space]))
    of_block = mixed(blocks.astype(np.uint64) ^ salt)
    in_block: Uint64Array = np.arange(block_pages, dtype=np.uint64)
    return mixed(np.add(of_block[:, None], in_block, dtype=np.uint64))


class LayerContent:
    """The bytes of one layer of one buffer.

    Args:
        model, pool, buffer: names.
        layer: model layer.
        page_bytes: bytes of a page in this layer.
        pattern: int64[words], see :func:`page_pattern`, on the device where it is used.
    """

    def __init__(
        self, model: str, pool: str, buffer: str, layer: int, page_bytes: int, pattern: torch.Tensor
    ) -> None:
        self._salt = named("layer", model, pool, buffer, layer)
        self._page_bytes = page_bytes
        self._pattern = pattern

    def _row_keys(self, keys: Uint64Array) -> torch.Tensor:
        """int64[n, 1]: what the words of each page are mixed with."""
        own = torch.from_numpy(mixed(keys ^ self._salt).view(np.int64))
        return own.to(self._pattern.device)[:, None]

    def _expected(self, keys: Uint64Array) -> torch.Tensor:
        words = torch.bitwise_xor(self._pattern, self._row_keys(keys))
        return words if self._page_bytes % _WORD == 0 else words.view(torch.uint8)[:, : self._page_bytes]

    def by_page(self, layer: torch.Tensor) -> torch.Tensor:
        """The layer with one row a page: uint8[pages, page_bytes]."""
        return layer.view(-1, self._page_bytes)

    def _pages(self, layer: torch.Tensor) -> torch.Tensor:
        """The layer as one row a page, in words where pages are whole words."""
        pages = self.by_page(layer)
        return pages.view(torch.int64) if self._page_bytes % _WORD == 0 else pages

    def _chunks(self, pages: Int64Array, keys: Uint64Array) -> Iterator[tuple[Int64Array, Uint64Array]]:
        step = max(_CHUNK_BYTES // self._page_bytes, 1)
        for first in range(0, len(pages), step):
            yield pages[first : first + step], keys[first : first + step]

    def fill(self, layer: torch.Tensor, pages: Int64Array, keys: Uint64Array) -> None:
        """Write pages of a layer.

        Args:
            layer: uint8[rows, row_bytes], contiguous.
            pages: int64[n], at least one, distinct.
            keys: uint64[n], the key of each page.
        """
        view = self._pages(layer)
        if view.dtype != torch.int64:
            view[torch.from_numpy(pages).to(view.device)] = self._expected(keys)
            return
        row_keys = self._row_keys(keys)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(pages) != 1) + 1, [len(pages)])).tolist()
        for first, stop in itertools.pairwise(starts):
            page = int(pages[first])
            run = view[page : page + stop - first]
            torch.bitwise_xor(self._pattern, row_keys[first:stop], out=run)

    def wrong_bytes(self, layer: torch.Tensor, pages: Int64Array, keys: Uint64Array) -> int:
        """How many bytes of some pages are not what they should be; arguments as in :meth:`fill`."""
        view = self._pages(layer)
        return sum(
            self._wrong(view.index_select(0, torch.from_numpy(some).to(view.device)), theirs)
            for some, theirs in self._chunks(pages, keys)
        )

    def wrong_bytes_of(self, rows: npt.NDArray[np.uint8], pages: Int64Array, keys: Uint64Array) -> int:
        """As :meth:`wrong_bytes`, of host rows uint8[pages, page_rows, row_bytes] that may lie apart."""
        wrong = 0
        for some, theirs in self._chunks(pages, keys):
            found = torch.from_numpy(np.ascontiguousarray(rows[some]).reshape(len(some), -1))
            wrong += self._wrong(self._pages(found.to(self._pattern.device)), theirs)
        return wrong

    def _wrong(self, found: torch.Tensor, keys: Uint64Array) -> int:
        """Wrong bytes of some pages; ``found`` is overwritten."""
        found ^= self._expected(keys)
        wrong = int(torch.count_nonzero(found))
        return int(torch.count_nonzero(found.view(torch.uint8))) if wrong else 0


def page_pattern(page_bytes: int, device: torch.device) -> torch.Tensor:
    """The part of the content that depends on the offset alone: int64[ceil(page_bytes / 8)]."""
    words = np.arange(-(-page_bytes // _WORD), dtype=np.uint64)
    return torch.from_numpy(mixed(words * _GOLDEN).view(np.int64)).to(device)
