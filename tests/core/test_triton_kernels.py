"""The Triton kernels, under Triton's interpreter: every byte of both sides against rows copied one by one."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

pytest.importorskip("triton", reason="triton is not installed")

from hicache_core.device.base import GatherUnits, Kernels, MoveRows, MoveTokens
from hicache_core.device.kernels import launch as launching
from hicache_core.errors import AddressError, HiCacheError, IndexTypeError, PairingError
from hicache_core.memory.addresses import KernelRange, Provenance
from hicache_core.spec.pool import Span
from tests.core.interpreted import HostStream, Interpreter
from tests.core.kernel_rows import GUARD_BYTES, POISON, Rows

STREAM = HostStream()
DEVICE_PAGES, HOST_PAGES = (70,), (30, 1, 41)
Pairs = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def interpreted() -> Interpreter:
    """The interpreted source, loaded once."""
    return Interpreter()


@pytest.fixture
def interpreter(interpreted: Interpreter) -> Interpreter:
    """A launcher that has started nothing."""
    return Interpreter(source=interpreted.source)


def numbers(values: Sequence[int]) -> torch.Tensor:
    """Page or token numbers as a kernel takes them."""
    return torch.tensor(values, dtype=torch.int64)


def host_rows(shape: tuple[int, int, int], **how: Any) -> Rows:
    """Host rows in three registrations, of which the second holds one page."""
    return Rows(shape, HOST_PAGES, provenance=Provenance.ALIAS, **how)


def drawn(count: int, seed: int = 0) -> Pairs:
    """Host pages and device pages in no order, the ends of registrations among them."""
    draw = random.Random(seed)
    wanted = [29, 30, 31, 71, 0][: count // 2]
    host = wanted + draw.sample(sorted(set(range(72)) - set(wanted)), count - len(wanted))
    draw.shuffle(host)
    return host, draw.sample(range(70), count)


class Move:
    """A move of pages between two sides, and what it must leave."""

    def __init__(self, target: Rows, source: Rows, pairs: Pairs, layers: range) -> None:
        self.target, self.source = target, source
        self.expected, self.before = target.copy(), source.copy()
        for (to, frm), layer in itertools.product(zip(*pairs, strict=True), layers):
            for row in range(target.page_rows):
                target.row(to, layer, row, self.expected)[...] = source.row(frm, layer, row)
        self.launch = MoveRows(
            target=target.table,
            source=source.table,
            target_pages=numbers(pairs[0]),
            source_pages=numbers(pairs[1]),
            layers=layers,
        )

    def is_done(self) -> bool:
        """Whether every byte of both sides is what it must be, gaps and guards included."""
        return self.target.holds(self.expected) and self.source.holds(self.before)


def a_move(**changes: Any) -> Move:
    """A small backup."""
    shape = (2, 2, 32)
    sides = {"target": host_rows(shape), "source": Rows(shape, DEVICE_PAGES, seed=1)} | changes
    return Move(sides["target"], sides["source"], drawn(3), range(2))


@pytest.mark.parametrize("to_host", [True, False], ids=["backup", "load"])
@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("row_bytes", [8, 16, 24, 2048, 8448, 65536])
def test_listed_pages_arrive_and_nothing_else_changes(
    interpreter: Interpreter, row_bytes: int, count: int, to_host: bool
) -> None:
    """Host pages of three distant registrations against device rows with gaps, in one of three layers."""
    shape = (3, 1, row_bytes)
    host = host_rows(shape, layers_inside=to_host, seed=None if to_host else 1)
    device = Rows(shape, DEVICE_PAGES, page_gap=48, seed=2 if to_host else None)
    pairs = drawn(count)
    sides = (host, device, pairs) if to_host else (device, host, pairs[::-1])
    move = Move(*sides, range(1, 2))
    assert not move.is_done()
    interpreter.kernels().move_rows(move.launch, STREAM)
    assert move.is_done()


@pytest.mark.parametrize("layers", [range(4), range(2, 4), range(0, 4, 3), range(3, -1, -2)], ids=str)
@pytest.mark.parametrize("row_gap", [0, 24])
def test_pages_of_several_rows_move_in_the_layers_asked_for(
    interpreter: Interpreter, layers: range, row_gap: int
) -> None:
    """Rows lie together on one side and apart on the other, where all layers of a row come first."""
    shape = (4, 5, 48)
    host = host_rows(shape, layers_inside=True, seed=3)
    move = Move(Rows(shape, DEVICE_PAGES, row_gap=row_gap), host, drawn(3)[::-1], layers)
    interpreter.kernels().move_rows(move.launch, STREAM)
    assert move.is_done()


def test_a_page_of_256_rows_of_8_bytes_moves(interpreter: Interpreter) -> None:
    """A program moves many rows, and the last one is not full."""
    shape = (2, 256, 8)
    move = Move(Rows(shape, DEVICE_PAGES, row_gap=8), host_rows(shape, seed=4), drawn(3)[::-1], range(2))
    interpreter.kernels().move_rows(move.launch, STREAM)
    assert move.is_done()


@pytest.mark.parametrize(
    ("row_bytes", "how", "vector"),
    [
        (64, {}, 16),
        (24, {}, 8),
        (64, {"shift": 8}, 8),
        (64, {"page_gap": 8}, 8),
        (64, {"row_gap": 4}, 4),
        (64, {"shift": 2}, 2),
        (63, {}, 1),
    ],
)
def test_a_vector_is_as_wide_as_every_address_allows(
    interpreter: Interpreter, row_bytes: int, how: dict[str, Any], vector: int
) -> None:
    """The width follows bases, strides and bytes of both sides, and the bytes are right at each."""
    shape = (2, 2, row_bytes)
    move = Move(host_rows(shape), Rows(shape, DEVICE_PAGES, seed=5, **how), drawn(3), range(2))
    interpreter.kernels().move_rows(move.launch, STREAM)
    assert move.is_done()
    assert {started.tile[0] for started in interpreter.started} == {vector}


def test_a_launch_too_large_for_one_grid_is_cut(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several launches move what one would, whatever the limit falls on."""
    monkeypatch.setattr(launching, "_MOST_PROGRAMS", 7)
    kernels, move = interpreter.kernels(), a_move()
    kernels.move_rows(move.launch, STREAM)
    assert move.is_done()
    assert [started.programs for started in interpreter.started] == [6]
    shape = (3, 1, 4096)
    large = Move(host_rows(shape), Rows(shape, DEVICE_PAGES, seed=6), drawn(3), range(3))
    kernels.move_rows(large.launch, STREAM)
    assert large.is_done()
    assert len(interpreter.started) == 4
    assert kernels.host_stores == 2


def gathered(source: Rows, pages: list[int], first: int, units: int) -> np.ndarray:
    """Units in host order, laid out one by one."""
    rows = [
        source.row(page, layer, row)
        for page, row, layer in itertools.product(pages, range(source.page_rows), range(source.layers))
    ]
    return np.concatenate(rows[first : first + units])


def ring_of(nbytes: int) -> tuple[np.ndarray, KernelRange]:
    """A poisoned run of device memory with guards on either side."""
    ring = np.full(nbytes + 3 * GUARD_BYTES, POISON, dtype=np.uint8)
    start = -ring.ctypes.data % GUARD_BYTES + GUARD_BYTES
    seen = KernelRange(
        start=ring.ctypes.data + start, nbytes=nbytes, device=0, provenance=Provenance.DEVICE_MEMORY
    )
    return ring[start - GUARD_BYTES : start + nbytes + GUARD_BYTES], seen


@pytest.mark.parametrize(
    ("shape", "count", "first", "units"),
    [
        ((3, 1, 2048), 64, 0, 192),
        ((5, 4, 24), 3, 0, 60),
        ((5, 4, 16), 3, 17, 30),
        ((3, 256, 8), 3, 700, 900),
        ((61, 1, 8448), 1, 7, 20),
        ((2, 1, 65536), 3, 1, 4),
    ],
)
def test_units_lie_in_host_order_in_the_ring(
    interpreter: Interpreter, shape: tuple[int, int, int], count: int, first: int, units: int
) -> None:
    """Any run of units, starting and ending inside a row or page; what lies beside them is left alone."""
    source = Rows(shape, DEVICE_PAGES, row_gap=16, seed=7)
    pages = drawn(count)[1]
    ring, target = ring_of(units * shape[2])
    before = source.copy()
    kernels = interpreter.kernels()
    kernels.gather_units(
        GatherUnits(source=source.table, pages=numbers(pages), first_unit=first, units=units, target=target),
        STREAM,
    )
    assert np.array_equal(ring[GUARD_BYTES:-GUARD_BYTES], gathered(source, pages, first, units))
    assert (ring[:GUARD_BYTES] == POISON).all()
    assert (ring[-GUARD_BYTES:] == POISON).all()
    assert source.holds(before)
    assert kernels.host_stores == 0


def test_a_gather_too_large_for_one_grid_is_cut(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches follow one another in the ring."""
    monkeypatch.setattr(launching, "_MOST_PROGRAMS", 1)
    source, pages = Rows((5, 4, 16), DEVICE_PAGES, seed=8), [3, 1, 69]
    ring, target = ring_of(60 * 16)
    launch = GatherUnits(source=source.table, pages=numbers(pages), first_unit=0, units=60, target=target)
    monkeypatch.setattr(launching, "SMALL_TILE", 32)
    interpreter.kernels().gather_units(launch, STREAM)
    assert np.array_equal(ring[GUARD_BYTES:-GUARD_BYTES], gathered(source, pages, 0, 60))
    assert len(interpreter.started) == 2


COMPRESSED = (Span(offset=0, stride=576, nbytes=576), Span(offset=36_864, stride=8, nbytes=8))
SCALED = (Span(offset=0, stride=128, nbytes=128), Span(offset=8192, stride=4, nbytes=4))
ODD = (Span(offset=3, stride=11, nbytes=7),)


@pytest.mark.parametrize("to_host", [True, False], ids=["backup", "load"])
@pytest.mark.parametrize(
    ("shape", "spans", "row_tokens"),
    [
        ((3, 1, 37_440), COMPRESSED, 64),
        ((3, 1, 8448), SCALED, 64),
        ((3, 16, 384), (Span(offset=0, stride=384, nbytes=384),), 1),
        ((3, 2, 80), ODD, 7),
    ],
    ids=["compressed", "scaled", "rows", "odd"],
)
def test_listed_tokens_move_and_padding_is_skipped(
    interpreter: Interpreter,
    shape: tuple[int, int, int],
    spans: tuple[Span, ...],
    row_tokens: int,
    to_host: bool,
) -> None:
    """Tokens on both sides of every registration's end, with pairs of which either number is negative."""
    page_tokens = shape[1] * row_tokens
    cut = HOST_PAGES[0] * page_tokens
    draw = random.Random(9)
    host = [cut - 1, cut, cut + page_tokens - 1, cut + page_tokens, *draw.sample(range(cut - 1), 9)]
    device = draw.sample(range(70 * page_tokens), len(host))
    host, device = [*host, -1, 5, -7, -(1 << 40)], [*device, 3, -1, -2, 4]
    target = host_rows(shape) if to_host else Rows(shape, DEVICE_PAGES, row_gap=16)
    source = Rows(shape, DEVICE_PAGES, row_gap=16, seed=10) if to_host else host_rows(shape, seed=10)
    to, frm = (host, device) if to_host else (device, host)
    expected, before = target.copy(), source.copy()
    for (one, other), layer, span in itertools.product(zip(to, frm, strict=True), (1, 2), spans):
        if one >= 0 and other >= 0:
            _span(target, one, layer, span, row_tokens, expected)[...] = _span(
                source, other, layer, span, row_tokens, before
            )
    assert not target.holds(expected)
    kernels = interpreter.kernels()
    launch = token_launch(target, source, (to, frm), spans, row_tokens)
    kernels.move_tokens(launch, STREAM)
    assert target.holds(expected)
    assert source.holds(before)
    assert len(interpreter.started) == len(spans)
    assert kernels.host_stores == to_host


def _span(
    side: Rows, token: int, layer: int, span: Span, row_tokens: int, parts: list[np.ndarray]
) -> np.ndarray:
    """The bytes of a token."""
    row, within = divmod(token, row_tokens)
    found = side.row(row // side.page_rows, layer, row % side.page_rows, parts)
    return found[span.offset + within * span.stride :][: span.nbytes]


def token_launch(
    target: Rows, source: Rows, tokens: Pairs, spans: tuple[Span, ...], row_tokens: int
) -> MoveTokens:
    """A launch for the second and third layer."""
    return MoveTokens(
        target=target.table,
        source=source.table,
        target_tokens=numbers(tokens[0]),
        source_tokens=numbers(tokens[1]),
        layers=range(1, 3),
        spans=spans,
        row_tokens=row_tokens,
    )


def test_tokens_too_many_for_one_grid_are_cut(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch takes up the numbers where the last one stopped."""
    monkeypatch.setattr(launching, "_MOST_PROGRAMS", 4)
    monkeypatch.setattr(launching, "SMALL_TILE", 32)
    shape, span = (3, 16, 64), Span(offset=0, stride=64, nbytes=64)
    target, source = Rows(shape, DEVICE_PAGES), host_rows(shape, seed=11)
    tokens = random.Random(12).sample(range(1100), 40), random.Random(13).sample(range(1100), 40)
    expected = target.copy()
    for to, frm, layer in ((*pair, layer) for pair in zip(*tokens, strict=True) for layer in (1, 2)):
        _span(target, to, layer, span, 1, expected)[...] = _span(source, frm, layer, span, 1, source.parts)
    interpreter.kernels().move_tokens(token_launch(target, source, tokens, (span,), 1), STREAM)
    assert target.holds(expected)
    assert len(interpreter.started) == 5


def test_a_table_is_uploaded_once_and_dropped_with_its_owner(interpreter: Interpreter) -> None:
    """Bases and first pages of either side; the launches after the first upload nothing."""
    kernels, move = interpreter.kernels(), a_move()
    for _ in range(3):
        kernels.move_rows(move.launch, STREAM)
    tables = move.target.table, move.source.table
    uploaded = [values.tolist() for values in interpreter.uploaded]
    assert uploaded == [
        each for table in tables for each in (table.bases.ravel().tolist(), table.first_pages.tolist())
    ]
    assert len(kernels._tables) == 2
    del move, tables
    gc.collect()
    assert len(kernels._tables) == 0


def test_numbers_and_tables_are_retained_for_each_stream(interpreter: Interpreter) -> None:
    """Numbers at every launch, a table once a stream."""
    kernels, move = interpreter.kernels(), a_move()
    other = HostStream(name="other")
    for stream, tables in ((STREAM, 4), (STREAM, 0), (other, 4), (other, 0)):
        interpreter.retained.clear()
        kernels.move_rows(move.launch, stream)
        own = [tensor for tensor in interpreter.retained if tensor is move.launch.target_pages]
        own += [tensor for tensor in interpreter.retained if tensor is move.launch.source_pages]
        assert len(own) == 2
        assert len(interpreter.retained) == 2 + tables


@pytest.mark.parametrize("empty", ["pages", "layers"])
def test_a_launch_of_nothing_starts_nothing(interpreter: Interpreter, empty: str) -> None:
    """No upload, no program, and nothing that counts as a store to the host."""
    move, kernels = a_move(), interpreter.kernels()
    none = numbers([])
    changes: dict[str, dict[str, Any]] = {
        "pages": {"target_pages": none, "source_pages": none},
        "layers": {"layers": range(0)},
    }
    kernels.move_rows(evolve(move.launch, **changes[empty]), STREAM)
    assert (interpreter.started, interpreter.uploaded, kernels.host_stores) == ([], [], 0)


def test_stores_to_the_host_are_counted(interpreter: Interpreter) -> None:
    """A backup is one, a load is none, and raw host memory is host memory."""
    kernels: Kernels = interpreter.kernels()
    shape = (2, 2, 32)
    device, host = Rows(shape, DEVICE_PAGES, seed=1), host_rows(shape, seed=2)
    raw = Rows(shape, DEVICE_PAGES, provenance=Provenance.RAW)
    counts = []
    for target, source in ((host, device), (device, host), (raw, device), (device, raw)):
        kernels.move_rows(Move(target, source, ([1], [2]), range(2)).launch, STREAM)
        counts.append(kernels.host_stores)
    assert counts == [1, 1, 2, 2]


SHAPE = (2, 2, 32)
REFUSED: dict[str, tuple[type[HiCacheError], Callable[[MoveRows], MoveRows]]] = {
    "target of another device": (
        AddressError,
        lambda launch: evolve(launch, target=host_rows(SHAPE, device=1).table),
    ),
    "source of another device": (
        AddressError,
        lambda launch: evolve(launch, source=Rows(SHAPE, DEVICE_PAGES, device=1).table),
    ),
    "other rows": (AddressError, lambda launch: evolve(launch, target=host_rows((2, 2, 64)).table)),
    "other pages": (AddressError, lambda launch: evolve(launch, target=host_rows((2, 4, 32)).table)),
    "a layer too many": (AddressError, lambda launch: evolve(launch, layers=range(3))),
    "a layer below": (AddressError, lambda launch: evolve(launch, layers=range(1, -2, -1))),
    "int32": (IndexTypeError, lambda launch: evolve(launch, source_pages=launch.source_pages.int())),
    "gaps": (IndexTypeError, lambda launch: evolve(launch, source_pages=torch.arange(6)[::2])),
    "two axes": (IndexTypeError, lambda launch: evolve(launch, target_pages=torch.zeros(3, 1).long())),
    "elsewhere": (IndexTypeError, lambda launch: evolve(launch, source_pages=torch.arange(3, device="meta"))),
    "lengths": (PairingError, lambda launch: evolve(launch, source_pages=numbers([1, 2]))),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_launch_that_is_not_right_is_refused_before_it_starts(interpreter: Interpreter, what: str) -> None:
    """The tables of a launch are of its device and of the same rows, its numbers what the kernel reads."""
    move, kernels = a_move(), interpreter.kernels()
    error, change = REFUSED[what]
    with pytest.raises(error):
        kernels.move_rows(change(move.launch), STREAM)
    assert (interpreter.started, kernels.host_stores) == ([], 0)


def test_a_gather_outside_of_pages_or_ring_is_refused(interpreter: Interpreter) -> None:
    """More units than the pages have, more bytes than the ring has, or a ring of another device."""
    kernels, source = interpreter.kernels(), Rows(SHAPE, DEVICE_PAGES, seed=1)
    ring = ring_of(12 * 32)[1]
    right = GatherUnits(source=source.table, pages=numbers([1, 2, 3]), first_unit=0, units=12, target=ring)
    for wrong in (
        evolve(right, first_unit=1),
        evolve(right, first_unit=-1),
        evolve(right, target=evolve(ring, nbytes=ring.nbytes - 1)),
        evolve(right, target=evolve(ring, device=1)),
    ):
        with pytest.raises(AddressError):
            kernels.gather_units(wrong, STREAM)
    assert interpreter.started == []
    kernels.gather_units(right, STREAM)
    assert len(interpreter.started) == 1


def test_a_span_that_leaves_its_row_is_refused(interpreter: Interpreter) -> None:
    """Tokens of a row end where it does."""
    target, source = host_rows((3, 2, 32)), Rows((3, 2, 32), DEVICE_PAGES)
    launch = token_launch(target, source, ([1], [2]), (Span(offset=0, stride=16, nbytes=16),), 3)
    with pytest.raises(AddressError):
        interpreter.kernels().move_tokens(launch, STREAM)
    assert interpreter.started == []
