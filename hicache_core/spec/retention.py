"""What the reuse of a prefix needs of an index space, in blocks of token slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attrs import frozen

from hicache_core.spec.pool import IndexSpace, Reuse


@frozen(kw_only=True)
class Retention:
    """What a prefix of blocks needs of an index space, which is what a request keeps of it.

    Args:
        block_pages: pages of one block.
        needed_blocks: a prefix needs the pages of so many of its last blocks.
    """

    block_pages: int
    needed_blocks: int

    def needed(self, blocks: int) -> range:
        """Positions of the blocks whose pages a prefix of ``blocks`` blocks needs."""
        return range(max(blocks - self.needed_blocks, 0), blocks)


class _Rule(Protocol):
    def __call__(self, space: IndexSpace, block_slots: int) -> Retention: ...


def _all_pages(space: IndexSpace, block_slots: int) -> Retention:
    return Retention(block_pages=-(-block_slots // space.page_slots), needed_blocks=1 << 62)


def _trailing_pages(space: IndexSpace, block_slots: int) -> Retention:
    window = space.window_slots or 0
    pages = -(-min(window, block_slots) // space.page_slots)
    return Retention(block_pages=pages, needed_blocks=-(-window // block_slots))


def _leaf(space: IndexSpace, block_slots: int) -> Retention:
    return Retention(block_pages=1, needed_blocks=1)


_RULES: Mapping[Reuse, _Rule] = {
    Reuse.ALL_PAGES: _all_pages,
    Reuse.TRAILING_PAGES: _trailing_pages,
    Reuse.LEAF: _leaf,
}


def retention(space: IndexSpace, block_slots: int) -> Retention:
    """What a prefix of blocks of ``block_slots`` token slots needs of an index space.

    A window needs only the pages that its end covers; a checkpoint stands for the prefix that ends there.
    """
    return _RULES[space.reuse](space, block_slots)
