"""What a family declares about a pool: its buffers, the unit of its rows and the space that indexes them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from attrs import field, frozen
from attrs import validators as v

from hicache_core.errors import SpecError
from hicache_core.spec.checks import int_tuple, name, whole

_Choice = TypeVar("_Choice")


class RowUnit(enum.Enum):
    """What one row of a pool holds in one layer of one buffer."""

    PAGE = "page"
    """All slots of a page, in one run of bytes."""
    TOKEN = "token"
    """One token slot."""
    SLOT = "slot"
    """One checkpoint; its index space has pages of one slot."""


class Reuse(enum.Enum):
    """Which pages of a space must be there before a prefix can be reused."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    """Those of the last ``window_slots`` slots."""
    LEAF = "leaf"
    """One checkpoint, taken at the end of the prefix."""


@frozen(kw_only=True)
class IndexSpace:
    """A space of slots; page p owns slots ``p * page_slots`` to ``(p + 1) * page_slots - 1``.

    Args:
        name: name of the space, unique in a model.
        page_slots: slots of one page, at least 1.
        reuse: which of its pages a prefix needs.
        window_slots: slots that trailing pages must cover; None unless ``reuse`` is TRAILING_PAGES.
    """

    name: str = field(validator=name())
    page_slots: int = field(validator=whole(1))
    reuse: Reuse = field(default=Reuse.ALL_PAGES, validator=v.instance_of(Reuse))
    window_slots: int | None = field(default=None, validator=whole(1, or_none=True))

    def __attrs_post_init__(self) -> None:
        if (self.reuse is Reuse.TRAILING_PAGES) != (self.window_slots is not None):
            raise SpecError(
                who=f"index space '{self.name}'",
                got=f"reuse {self.reuse.value} and window_slots={self.window_slots}",
                expected="window_slots with trailing pages, and only there",
                remedy="Give both or neither.",
            )


@frozen(kw_only=True)
class PoolGeometry:
    """What a model says about one pool; a family turns it into a :class:`PoolSpec`.

    Args:
        pool: name of the pool in its model.
        family: the family that declares it.
        index_space: the space whose slots name its rows.
        layer_ids: model layer of each of the pool's own layers, ascending; may be empty.
        params: the family's own figures, as its geometry schema lists them.
        anchor: whether this pool's slots name the pages of the group.
    """

    pool: str = field(validator=name())
    family: str = field(validator=name())
    index_space: IndexSpace = field(validator=v.instance_of(IndexSpace))
    layer_ids: tuple[int, ...] = field(converter=int_tuple)
    params: Mapping[str, Any] = field(factory=dict)
    anchor: bool = field(default=False, validator=v.instance_of(bool))

    def number(self, figure: str, default: int | None = None) -> int:
        """The whole number ``figure`` of the geometry; SpecError where it is absent or not positive."""
        value = self.params.get(figure, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(figure, "a whole number of at least 1")
        return value

    def choice(self, figure: str, choices: Mapping[str, _Choice]) -> _Choice:
        """What ``choices`` has under the name that ``figure`` gives; SpecError where it has no such name."""
        value = self.params.get(figure)
        if not isinstance(value, str) or value not in choices:
            raise self.refusal(figure, f"one of {', '.join(choices)}")
        return choices[value]

    def refusal(self, figure: str, expected: str, *, where: str = "") -> SpecError:
        """The error, for the caller to raise, that says what ``figure`` is and what was expected of it.

        Args:
            figure: name of the figure.
            expected: what it should be.
            where: what makes it wrong, where that is not the figure alone: `` for pages of 64 slots``.
        """
        return SpecError(
            who=f"pool '{self.pool}' ({self.family})",
            got=f"geometry {figure}={self.params.get(figure)!r}{where}",
            expected=expected,
            remedy=f"Correct {figure} in the model file.",
        )

    def declared(self, row_unit: RowUnit, buffers: Iterable[BufferSpec]) -> PoolSpec:
        """The declaration of this pool: what a model says of it, and the rows that its family gives it.

        Args:
            row_unit: what one row holds.
            buffers: the buffers, in the order in which a flat page holds them.
        """
        return PoolSpec(
            pool=self.pool,
            family=self.family,
            index_space=self.index_space,
            row_unit=row_unit,
            layer_ids=self.layer_ids,
            buffers=buffers,
            anchor=self.anchor,
        )


@frozen(kw_only=True)
class Span:
    """Where one token lies in a row: token t has bytes ``offset + t * stride`` up to ``nbytes`` further on.

    Args:
        offset: byte of the row where token 0 starts.
        stride: bytes from one token to the next, at least ``nbytes``.
        nbytes: bytes of one token.
    """

    offset: int = field(validator=whole(0))
    stride: int = field(validator=whole(1))
    nbytes: int = field(validator=whole(1))

    def end(self, tokens: int) -> int:
        """The byte after the last of ``tokens`` tokens."""
        return self.offset + (tokens - 1) * self.stride + self.nbytes


def _span_tuple(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(spans)


@frozen(kw_only=True)
class BufferSpec:
    """A named series of rows, one series per layer.

    Args:
        name: name of the buffer, unique in its pool (``k``, ``v``, ``kv``).
        row_bytes: bytes of one row of one layer, the same on host and device.
        per_layer: whether there is a row in each of the pool's layers; where not, there is one series for
            all, which counts once a slot and moves with the first layer.
        spans: where one token lies in a row, for copies of single tokens; none where that is not known.
        row_tokens: tokens of one row that ``spans`` can name.
    """

    name: str = field(validator=name())
    row_bytes: int = field(validator=whole(1))
    per_layer: bool = field(default=True, validator=v.instance_of(bool))
    spans: tuple[Span, ...] = field(default=(), converter=_span_tuple)
    row_tokens: int = field(default=1, validator=whole(1))

    def __attrs_post_init__(self) -> None:
        for span in self.spans:
            if span.stride < span.nbytes or span.end(self.row_tokens) > self.row_bytes:
                raise SpecError(
                    who=f"buffer '{self.name}'",
                    got=f"{span} for {self.row_tokens} tokens",
                    expected=f"tokens apart, inside a row of {self.row_bytes} bytes",
                    remedy="Correct the spans of the declaration.",
                )


def _buffer_tuple(buffers: Iterable[BufferSpec]) -> tuple[BufferSpec, ...]:
    return tuple(buffers)


@frozen(kw_only=True)
class PoolSpec:
    """The declaration of a pool: buffers that share one index space.

    Args:
        pool: name of the pool in its group.
        family: the family that declared it.
        index_space: the space whose slots name its rows.
        row_unit: what one row holds.
        layer_ids: model layer of each of the pool's own layers, ascending.
        buffers: the buffers, in the order in which a flat page holds them; none for a logical anchor.
        anchor: whether this pool's slots name the pages of the group.
    """

    pool: str = field(validator=name())
    family: str = field(validator=name())
    index_space: IndexSpace = field(validator=v.instance_of(IndexSpace))
    row_unit: RowUnit = field(validator=v.instance_of(RowUnit))
    layer_ids: tuple[int, ...] = field(converter=int_tuple)
    buffers: tuple[BufferSpec, ...] = field(converter=_buffer_tuple)
    anchor: bool = field(default=False, validator=v.instance_of(bool))

    def __attrs_post_init__(self) -> None:
        if list(self.layer_ids) != sorted(set(self.layer_ids)) or any(i < 0 for i in self.layer_ids):
            self._refuse(f"layer_ids {self.layer_ids}", "distinct model layers in ascending order from 0")
        names = [buffer.name for buffer in self.buffers]
        if len(set(names)) != len(names):
            self._refuse(f"buffers {names}", "a name once")
        if self.row_unit is RowUnit.SLOT and self.index_space.page_slots != 1:
            self._refuse(f"slot rows in pages of {self.index_space.page_slots}", "pages of one slot")

    def _refuse(self, got: str, expected: str) -> None:
        raise SpecError(
            who=f"pool '{self.pool}' ({self.family})",
            got=got,
            expected=expected,
            remedy="Correct the declaration.",
        )

    @property
    def layer_count(self) -> int:
        """Layers that the pool itself has."""
        return len(self.layer_ids)

    @property
    def page_rows(self) -> int:
        """Rows of one page in one layer: one, or one per slot where rows are tokens."""
        return self.index_space.page_slots if self.row_unit is RowUnit.TOKEN else 1

    def layers_of(self, buffer: BufferSpec) -> int:
        """Series of rows that one of the buffers has: one per layer, or one for all."""
        return self.layer_count if buffer.per_layer else min(self.layer_count, 1)

    def token_spans(self, buffer: BufferSpec) -> tuple[Span, ...]:
        """Where one token lies in a row of the buffer; none where that is not known."""
        if self.row_unit is RowUnit.TOKEN and not buffer.spans:
            return (Span(offset=0, stride=buffer.row_bytes, nbytes=buffer.row_bytes),)
        return buffer.spans

    def row_tokens(self, buffer: BufferSpec) -> int:
        """Tokens of one row that :meth:`token_spans` names."""
        return buffer.row_tokens if buffer.spans else 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers of all buffers."""
        return sum(b.row_bytes * self.layers_of(b) for b in self.buffers) * self.page_rows
