"""Links between index spaces: which page of another space belongs to each page of the anchor's."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hicache_core.errors import PairingError, SlotError
from hicache_core.memory.slots import Int64Array, PageAllocator, page_numbers
from hicache_core.spec import retention

_NONE = -1


class PageLinks:
    """The pages of another index space by the anchor's pages.

    A window page belongs to the anchor's page of the same tokens, a checkpoint to the page at whose end it
    was taken. A page of either space has at most one partner; a page of the anchor may have none, where its
    window or its checkpoint was given up alone.

    Args:
        anchor: owns the anchor's pages.
        other: owns the pages of the other space.
    """

    def __init__(self, anchor: PageAllocator, other: PageAllocator) -> None:
        self._anchor = anchor
        self._other = other
        self._needed = retention(other.space, anchor.space.page_slots).needed_blocks
        self._of_anchor = np.full(anchor.pages, _NONE, dtype=np.int64)
        self._of_other = np.full(other.pages, _NONE, dtype=np.int64)

    def link(self, anchor_pages: Int64Array, pages: Int64Array) -> None:
        """Join page i of the anchor's with page i of the other space.

        Args:
            anchor_pages, pages: int64[n] each, pages that are handed out and have no partner.

        Raises:
            PairingError: unequal lengths, a page twice, or a page that has a partner; nothing changed.
            IndicesError: pages that are no int64[n], or that the space does not have; nothing changed.
            SlotError: a page that nobody owns; nothing changed.
        """
        if len(anchor_pages) != len(pages):
            self._refuse(f"{len(anchor_pages)} pages for {len(pages)}", "one for each")
        sides = ((self._anchor, anchor_pages, self._of_anchor), (self._other, pages, self._of_other))
        for allocator, mine, partners in sides:
            self._check(mine, allocator)
            if not allocator.owns(mine):
                raise SlotError(
                    who=f"links to index space '{self._other.space.name}'",
                    got=f"pages {mine[:8].tolist()} of '{allocator.space.name}', not all handed out",
                    expected="pages that are handed out",
                    remedy="Allocate both pages before they are linked.",
                    slots=(),
                )
            if np.unique(mine).size != mine.size or (partners[mine] != _NONE).any():
                self._refuse(f"pages {mine[:8].tolist()} of '{allocator.space.name}'", "each once, unlinked")
        self._of_anchor[anchor_pages] = pages
        self._of_other[pages] = anchor_pages

    def unlink(self, pages: Int64Array) -> None:
        """Part pages of the other space (int64[n]) from their partners, where they have one."""
        self._check(pages, self._other)
        partners = self._of_other[pages]
        self._of_anchor[partners[partners != _NONE]] = _NONE
        self._of_other[pages] = _NONE

    def pages(self, anchor_pages: Int64Array) -> Int64Array:
        """The partner of each of the anchor's pages: int64[n], -1 where there is none."""
        self._check(anchor_pages, self._anchor)
        return self._of_anchor[anchor_pages]

    def slots(self, anchor_slots: Int64Array) -> Int64Array:
        """The slot of the other space for each of the anchor's: int64[n], -1 where its page has no partner.

        Slots correspond where both spaces have pages of one size; of a checkpoint there is one slot a page.
        """
        size, other_size = self._anchor.space.page_slots, self._other.space.page_slots
        partners = self.pages(anchor_slots // size)
        found: Int64Array = partners * other_size + anchor_slots % size % other_size
        return np.where(partners == _NONE, _NONE, found)

    def restorable(self, anchor_pages: Int64Array) -> npt.NDArray[np.bool_]:
        """For each page of a prefix, whether the prefix that ends with it has what it needs: bool[n].

        Args:
            anchor_pages: int64[n], the anchor's pages of a prefix, root first.
        """
        at = np.arange(len(anchor_pages), dtype=np.int64)
        partners = self.pages(anchor_pages)
        missing = np.where((partners == _NONE) | ~self._other.complete(partners), at, -1)
        unbroken = at - np.maximum.accumulate(missing) if at.size else at
        return unbroken >= np.minimum(self._needed, at + 1)

    def _check(self, pages: Int64Array, allocator: PageAllocator) -> None:
        who = f"links to index space '{self._other.space.name}'"
        page_numbers(pages, allocator.space, allocator.pages, who)

    def _refuse(self, got: Any, expected: str) -> NoReturn:
        raise PairingError(
            who=f"links to index space '{self._other.space.name}'",
            got=str(got),
            expected=expected,
            remedy="Link each page once; unlink it before it gets another partner.",
        )
