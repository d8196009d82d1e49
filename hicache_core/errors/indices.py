"""Errors of indices, slots and flat pages that a caller gives."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_core.errors.base import HiCacheError


class IndicesError(HiCacheError):
    """Base of the errors about slot indices given to a public call; nothing has moved."""

    code = "index"


class IndexTypeError(IndicesError):
    """Indices are not a one-dimensional int64 array of the right device."""

    code = "index-type"


class IndexRangeError(IndicesError):
    """An index lies outside its index space."""

    code = "index-range"


class PageContractError(IndicesError):
    """Indices do not list whole pages: a run does not start at a page or does not step by one."""

    code = "page-contract"


class PairingError(IndicesError):
    """Host and device indices do not pair: unequal lengths, or a destination twice."""

    code = "pairing"


class UnsupportedTokensError(HiCacheError):
    """A pool's tokens cannot be copied one by one, or not in the way that was asked for.

    Attributes:
        reason: code of the reason, that of the pool's ``token_granular`` where it is the declaration's.
    """

    code = "unsupported-tokens"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str, reason: str) -> None:
        self.reason = reason
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class SlotError(HiCacheError):
    """Slots were asked for or given back in a way that breaks their ownership; nothing changed."""

    code = "slot"

    def __init__(self, *, who: str, got: str, expected: str, remedy: str, slots: Sequence[int] = ()) -> None:
        self.slots = tuple(slots)
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)


class PageTypeError(HiCacheError):
    """Memory given for flat pages is not contiguous uint8 on the CPU, or may not be written to."""

    code = "page-type"


class PageSizeError(HiCacheError):
    """Memory given for flat pages has another size; no page was touched.

    Attributes:
        nbytes: its size.
        expected_bytes: the size of the pages.
    """

    code = "page-size"

    def __init__(
        self, *, who: str, got: str, expected: str, remedy: str, nbytes: int, expected_bytes: int
    ) -> None:
        self.nbytes = nbytes
        self.expected_bytes = expected_bytes
        super().__init__(who=who, got=got, expected=expected, remedy=remedy)
