"""How one host size is split over the pools of a group, before anything is allocated. No torch here.

The pools of an index space share its pages. Several spaces share the size: by pages that are given, by shares
that are given, and the rest in the proportion in which one block of tokens keeps pages of each of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from fractions import Fraction

from attrs import field, frozen

from hicache_core.errors import CapacityError, HostSizeError, UnknownNameError
from hicache_core.spec import IndexSpace, PoolSpec, retention
from hicache_core.spec.checks import whole
from hicache_core.spec.units import format_bytes_like

DEFAULT_BLOCK_TOKENS = 512
"""Tokens of the block whose pages give the proportion, where nothing else is asked for."""


class Basis(enum.Enum):
    """What the pages of an index space follow from."""

    ALL = "all"
    """It is the only one that is left: the rest of the size is its own."""
    PAGES = "pages"
    """Its pages were given."""
    SHARE = "share"
    """Its share of the size was given."""
    BLOCKS = "blocks"
    """The pages that one block keeps of it, against those of the other spaces; at least one page."""


@frozen(kw_only=True)
class PoolSizing:
    """What one pool takes of a rank's size.

    Args:
        spec: its declaration.
        pages: its host pages, those of its index space.
    """

    spec: PoolSpec
    pages: int

    @property
    def nbytes(self) -> int:
        """Bytes of its host rows."""
        return self.pages * self.spec.page_bytes


@frozen(kw_only=True)
class SpaceSizing:
    """What the pools of one index space take of a rank's size.

    Args:
        space: the space.
        basis: what its pages follow from.
        block_pages: pages that one block keeps of it.
        page_bytes: bytes of one page, of all its pools.
        pages: host pages.
    """

    space: IndexSpace
    basis: Basis
    block_pages: int
    page_bytes: int
    pages: int

    @property
    def slots(self) -> int:
        """Host slots."""
        return self.pages * self.space.page_slots

    @property
    def nbytes(self) -> int:
        """Bytes of the host rows of all its pools."""
        return self.pages * self.page_bytes


@frozen(kw_only=True)
class Sizing:
    """One rank's host size, split over the pools of its group.

    Args:
        host_bytes: the size that was asked for.
        spaces: the index spaces by name, the anchor's first.
        pools: the pools, in the order of the group.
    """

    host_bytes: int
    spaces: Mapping[str, SpaceSizing]
    pools: tuple[PoolSizing, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the pools take: what would be allocated."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def left_bytes(self) -> int:
        """Bytes of the size that whole pages leave over; never negative."""
        return self.host_bytes - self.nbytes


@frozen(kw_only=True)
class SizeRequest:
    """A host size, and how it is shared.

    Args:
        host_bytes: bytes of one rank.
        pages: host pages of the index spaces for which they are given.
        shares: parts of ``host_bytes`` for the index spaces for which they are given, above 0 and at most 1
            in all; what a share leaves over of its last page goes to no other space.
        block_tokens: tokens of the block whose pages give the proportion of the other spaces.
        shown_like: a size in whose unit errors show sizes.
    """

    host_bytes: int = field(validator=whole(0))
    pages: Mapping[str, int] = field(factory=dict)
    shares: Mapping[str, Fraction] = field(factory=dict)
    block_tokens: int = field(default=DEFAULT_BLOCK_TOKENS, validator=whole(1))
    shown_like: str = ""


def spaces_of(specs: Iterable[PoolSpec]) -> dict[str, IndexSpace]:
    """The index spaces of a group by name, the anchor's first."""
    ordered = sorted(specs, key=lambda spec: not spec.anchor)
    return {spec.index_space.name: spec.index_space for spec in ordered}


def split_host_size(specs: Iterable[PoolSpec], request: SizeRequest) -> Sizing:
    """Split one host size over the pools of a group; what the pools take is never above it.

    Args:
        specs: the pools of the group, all of one rank; the anchor's space leads.
        request: the size, and how it is shared.

    Raises:
        UnknownNameError: pages or a share for an index space that the group does not have.
        CapacityError: the pools have no bytes, or pages and shares contradict each other.
        HostSizeError: the size is below one page of each space, or below the pages that were given.
    """
    pools = tuple(specs)
    spaces = spaces_of(pools)
    page_bytes = {
        name: sum(spec.page_bytes for spec in pools if spec.index_space.name == name) for name in spaces
    }
    _check_request(request, page_bytes)
    kept = _block_pages(spaces, request.block_tokens)
    _check_least(request, page_bytes)
    rest = [name for name in spaces if name not in request.pages and name not in request.shares]
    basis = {
        **dict.fromkeys(rest, Basis.ALL if len(rest) == 1 else Basis.BLOCKS),
        **dict.fromkeys(request.shares, Basis.SHARE),
        **dict.fromkeys(request.pages, Basis.PAGES),
    }
    pages = {
        **request.pages,
        **{name: int(request.host_bytes * part) // page_bytes[name] for name, part in request.shares.items()},
        **_in_proportion(
            _rest_bytes(request, page_bytes), {name: (kept[name], page_bytes[name]) for name in rest}
        ),
    }
    return Sizing(
        host_bytes=request.host_bytes,
        spaces={
            name: SpaceSizing(
                space=space,
                basis=basis[name],
                block_pages=kept[name],
                page_bytes=page_bytes[name],
                pages=pages[name],
            )
            for name, space in spaces.items()
        },
        pools=tuple(PoolSizing(spec=spec, pages=pages[spec.index_space.name]) for spec in pools),
    )


def _check_request(request: SizeRequest, page_bytes: Mapping[str, int]) -> None:
    for name in (*request.pages, *request.shares):
        if name not in page_bytes:
            raise UnknownNameError(
                who="host size",
                got=f"index space '{name}'",
                expected=f"one of {', '.join(page_bytes)}",
                remedy="Give pages or a share to one of these.",
            )
    rest = [name for name in page_bytes if name not in request.pages and name not in request.shares]
    if not any(page_bytes.values()) or (rest and not any(page_bytes[name] for name in rest)):
        raise CapacityError(
            who="host size",
            got=f"index spaces without bytes: {', '.join(n for n, size in page_bytes.items() if not size)}",
            expected="bytes from which the number of their pages follows",
            remedy="Give their pages; see `hicache plugins` for families that are missing.",
        )
    _check_shares(request, page_bytes)


def _check_shares(request: SizeRequest, page_bytes: Mapping[str, int]) -> None:
    both = [name for name in request.pages if name in request.shares]
    odd = [name for name, count in request.pages.items() if count < 1]
    odd += [name for name, part in request.shares.items() if not 0 < part <= 1 or not page_bytes[name]]
    total = sum(request.shares.values(), Fraction())
    others = [name for name in page_bytes if name not in request.shares]
    if both or odd or total > 1 or (total == 1 and others):
        shares = ", ".join(f"{name} {float(part * 100):g}%" for name, part in request.shares.items())
        counts = ", ".join(f"{name} {count} pages" for name, count in request.pages.items())
        raise CapacityError(
            who="host size",
            got=", ".join(filter(None, [counts, shares])),
            expected="pages or a share of a space, pages from 1 up, shares above 0% and at most 100% in all, "
            f"with something left for {', '.join(others) or 'no other'}; shares of spaces with bytes only",
            remedy="Correct the pages or the shares.",
        )


def _block_pages(spaces: Mapping[str, IndexSpace], block_tokens: int) -> dict[str, int]:
    """Pages of each space that one block of tokens keeps; a block fills whole pages of the first space."""
    first = next(iter(spaces.values()))
    block_slots = -(-block_tokens // first.page_slots) * first.page_slots
    return {name: retention(space, block_slots).block_pages for name, space in spaces.items()}


def _rest_part(request: SizeRequest) -> Fraction:
    return 1 - sum(request.shares.values(), Fraction())


def _given_bytes(request: SizeRequest, page_bytes: Mapping[str, int]) -> int:
    return sum(count * page_bytes[name] for name, count in request.pages.items())


def _rest_bytes(request: SizeRequest, page_bytes: Mapping[str, int]) -> int:
    return int(request.host_bytes * _rest_part(request)) - _given_bytes(request, page_bytes)


def _check_least(request: SizeRequest, page_bytes: Mapping[str, int]) -> None:
    """Every space gets a page at least, and what was given as pages is there."""
    shared = [_ceil(page_bytes[name] / part) for name, part in request.shares.items()]
    rest = _given_bytes(request, page_bytes) + sum(
        size for name, size in page_bytes.items() if name not in request.pages and name not in request.shares
    )
    least = max([*shared, _ceil(rest / _rest_part(request)) if rest else 0])
    if request.host_bytes < least:
        short = least - request.host_bytes
        figures = {"short": short, "least": least}
        shown = {key: format_bytes_like(n, request.shown_like) for key, n in figures.items()}
        raise HostSizeError(
            who="host size",
            got=format_bytes_like(request.host_bytes, request.shown_like),
            expected=f"at least {shown['least']}: {_least_of(request, page_bytes)}; "
            f"{shown['short']} are missing",
            remedy=f"Give each rank at least {least} bytes, or share them otherwise.",
            reason="split",
            nbytes=request.host_bytes,
            short_bytes=short,
            fits_bytes=least,
        )


def _least_of(request: SizeRequest, page_bytes: Mapping[str, int]) -> str:
    counts = {name: request.pages.get(name, 1) for name in page_bytes}
    return ", ".join(
        f"{count} page{'s' if count > 1 else ''} of '{name}' ({count * page_bytes[name]:,} bytes)"
        for name, count in counts.items()
    )


def _ceil(number: Fraction | int) -> int:
    return -(-number // 1)


def _in_proportion(nbytes: int, weights: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Pages of spaces, so many times those of a block as fit, and one at least of each.

    Args:
        nbytes: what is shared; at least one page of each.
        weights: pages that a block keeps of each space, and the bytes of one page.
    """
    open_spaces, pages = dict(weights), dict.fromkeys(weights, 1)
    while open_spaces:
        block_bytes = sum(kept * size for kept, size in open_spaces.values())
        if not block_bytes:
            # What is left has no bytes, and every space with bytes has its one page.
            return pages
        quotas = {name: nbytes * kept // block_bytes for name, (kept, _) in open_spaces.items()}
        small = [name for name, quota in quotas.items() if quota < 1]
        if not small:
            return {**pages, **quotas}
        for name in small:
            nbytes -= open_spaces.pop(name)[1]
    return pages


def check_host_memory(
    host_bytes: int, *, ranks: int, memory_bytes: int, reserve_bytes: int = 0, shown_like: str = ""
) -> int:
    """The bytes of the host that the sizes of all its ranks and the reserve leave.

    Args:
        host_bytes: the size of one rank.
        ranks: ranks on the host, at least 1.
        memory_bytes: memory of the host.
        reserve_bytes: what is kept for everything else.
        shown_like: a size in whose unit the error shows sizes.

    Raises:
        HostSizeError: the ranks together ask for more than the memory less the reserve.
    """
    usable, asked = memory_bytes - reserve_bytes, host_bytes * ranks
    if asked <= usable:
        return usable - asked

    def shown(nbytes: int) -> str:
        return format_bytes_like(nbytes, shown_like)

    fits, fitting_ranks = max(usable, 0) // ranks, max(usable, 0) // max(host_bytes, 1)
    raise HostSizeError(
        who="host memory",
        got=f"{ranks} x {shown(host_bytes)} = {shown(asked)}",
        expected=f"at most {shown(usable)}: {shown(memory_bytes)} less a reserve of {shown(reserve_bytes)}; "
        f"{shown(asked - usable)} are missing",
        remedy=f"Give each rank at most {shown(fits)}, or run {fitting_ranks} ranks of this size.",
        reason="host-memory",
        nbytes=host_bytes,
        short_bytes=asked - usable,
        fits_bytes=fits,
    )
