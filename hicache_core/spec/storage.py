"""What names a stored page: the format of its flat bytes, and the key that tells it from all others."""

from __future__ import annotations

import hashlib
import json

from attrs import astuple, field, frozen
from attrs import validators as v

from hicache_core.errors import SpecError
from hicache_core.spec.checks import name, whole
from hicache_core.spec.layout import Layout
from hicache_core.spec.pool import PoolSpec

FORMAT_VERSION = 1


def page_format(spec: PoolSpec, layout: Layout) -> str:
    """All that the meaning of a pool's flat pages follows from, but the dtype, as a string.

    Two pools with equal strings have exchangeable flat pages.

    Args:
        spec: the pool's declaration.
        layout: its host layout.
    """
    facts = {
        "version": FORMAT_VERSION,
        "layout": layout.name,
        "family": spec.family,
        "row_unit": spec.row_unit.value,
        "page_slots": spec.index_space.page_slots,
        "layer_ids": spec.layer_ids,
        "buffers": [[b.name, spec.layers_of(b), spec.page_rows, b.row_bytes] for b in spec.buffers],
    }
    return json.dumps(facts, separators=(",", ":"))


@frozen(kw_only=True)
class StorageKey:
    """What tells one stored page from all others.

    Args:
        model, variant: the model and its row format, which says the dtype.
        pool: name of the pool in its group.
        page_format: what the bytes of the page follow from; see :func:`page_format`.
        rank, rank_count: which of the ranks that split the pages of the model.
        namespace: who shares the pages; may be empty.
        block_hash: hash of the tokens of the page and of all before it.
    """

    model: str = field(validator=name())
    variant: str = field(validator=name())
    pool: str = field(validator=name())
    page_format: str = field(validator=name())
    rank: int = field(validator=whole(0))
    rank_count: int = field(validator=whole(1))
    namespace: str = field(validator=v.instance_of(str))
    block_hash: str = field(validator=name())

    def __attrs_post_init__(self) -> None:
        if self.rank >= self.rank_count:
            raise SpecError(
                who="StorageKey",
                got=f"rank {self.rank} of {self.rank_count}",
                expected="ranks counted from 0",
                remedy="Correct rank or rank_count.",
            )

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, the same in every process and release for equal keys."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()
