"""Policies: when a block is backed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hicache_core.cache.index import Key, Tier
from hicache_core.errors import UnknownNameError


class Policy(Protocol):
    """Decides which blocks of a completed request go to the host."""

    def to_back_up(self, keys: Sequence[Key], host: Tier) -> list[int]:
        """Positions in ``keys``, ascending, of the blocks to back up now."""


class WriteThrough:
    """Every block is backed up as soon as it is complete."""

    def to_back_up(self, keys: Sequence[Key], host: Tier) -> list[int]:
        """See :class:`Policy`."""
        return [position for position, key in enumerate(keys) if key not in host]


POLICIES: Mapping[str, type[Policy]] = {"write_through": WriteThrough}


def policy_named(name: str) -> Policy:
    """The policy of that name; raises UnknownNameError listing the names that exist."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise UnknownNameError(
            who="policy",
            got=repr(name),
            expected=f"one of {', '.join(POLICIES)}",
            remedy="Give one of these with --policy.",
        ) from None
