"""Queries in one line: pools by row bytes and amended capabilities, on the facts of any platform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from hicache_core.compat import Member, Query, violations
from hicache_core.spec import (
    PLATFORMS,
    Capability,
    IndexSpace,
    Platform,
    PoolSpec,
    default_capabilities,
    unsupported,
)
from hicache_core.testing.stand_ins import pool_spec

FULL = IndexSpace(name="full", page_slots=4)
NO = unsupported("for-tests", "this pool does not", "Let it.")


@frozen(kw_only=True)
class Asked:
    """A pool that is asked about, on whatever platform.

    Args:
        spec: its declaration.
        can: the capabilities that are not the core's default, by name.
        host_pages: its host pages.
        device_row_bytes: bytes of its device rows by buffer.
    """

    spec: PoolSpec
    can: Mapping[str, Capability] = field(factory=dict)
    host_pages: int | None = None
    device_row_bytes: Mapping[str, int] = field(factory=dict)

    def on(self, platform: Platform) -> Member:
        """The pool as a member of a query."""
        return Member(
            spec=self.spec,
            capabilities=default_capabilities(self.spec, platform).amended(self.can),
            host_pages=self.host_pages,
            device_row_bytes=self.device_row_bytes,
        )


def pool(*row_bytes: int, name: str = "kv", space: IndexSpace = FULL, **can: Capability) -> Asked:
    """A pool of token rows; the one called ``kv`` is the anchor."""
    return Asked(spec=pool_spec(*row_bytes, pool=name, anchor=name == "kv", space=space), can=can)


def query(platform: str | Platform, io_backend: str, layout: str, *pools: Asked, **more: Any) -> Query:
    """What is asked of the solver; ``more`` are further fields of the query."""
    facts = PLATFORMS[platform] if isinstance(platform, str) else platform
    return Query(
        platform=facts,
        io_backend=io_backend,
        layout=layout,
        pools=[one.on(facts) for one in pools],
        **more,
    )


def ids(asked: Query) -> list[tuple[str, str]]:
    """Rule and pool of each violation, sorted."""
    return sorted((violation.id, violation.pool) for violation in violations(asked))
