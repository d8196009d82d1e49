"""Order: who waits for whom, and what the mark of a layer means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import UnknownNameError
from hicache_core.testing.oracle import PagePair
from hicache_core.testing.rigs import Rig, Snapshot, differences
from hicache_core.testing.stand_ins import pool_spec
from hicache_core.transfer.engine import load_groups
from hicache_core.transfer.ticket import Ticket

MakeRig = Callable[..., Rig]
SEEDS = range(25)
PAIRS: list[PagePair] = [(5, 2), (0, 9), (3, 4), (4, 5)]
SERVED = [
    ("kernel", "layer_first"),
    ("kernel", "page_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
]
BACKUP_STREAM, LOAD_STREAM, THIRD_STREAM = 1, 2, 3
"""Numbers of the simulator's streams; stream 0 is the caller's current one."""
MOVES = ["backup", "load"]

backends = pytest.mark.parametrize("pair", SERVED, ids="+".join)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads in as many groups of layers as there can be, however small the pages."""
    monkeypatch.setattr("hicache_core.transfer.engine._BYTES_WORTH_A_CALL", 1)


in_groups = pytest.mark.usefixtures("grouped")


def _slots(rig: Rig, pairs: Iterable[PagePair] = PAIRS) -> tuple[np.ndarray, np.ndarray]:
    listed = list(pairs)
    return rig.slots(h for h, _ in listed), rig.slots(d for _, d in listed)


def _sim(rig: Rig) -> SimRuntime:
    assert isinstance(rig.runtime, SimRuntime)
    return rig.runtime


def _ready(make_rig: MakeRig, *specs: Any, **options: Any) -> Rig:
    rig = make_rig(*specs, **options)
    rig.allocate(6)
    rig.fill_host()
    return rig


def _submit(rig: Rig, move: str, **options: Any) -> Ticket:
    ticket = getattr(rig.controller, move)(*_slots(rig), **options)
    assert isinstance(ticket, Ticket)
    return ticket


def _after(rig: Rig, move: str, before: Snapshot, pairs: list[PagePair] = PAIRS) -> Snapshot:
    return {"backup": rig.after_backup, "load": rig.after_load}[move](before, pairs)


# Who waits for whom


@backends
@pytest.mark.parametrize("current", [False, True])
def test_backup_starts_after_its_writer(make_rig: MakeRig, pair: tuple[str, str], current: bool) -> None:
    """I34: bytes that another stream still has to write are the ones that arrive, for every seed."""
    for seed in SEEDS:
        rig = _ready(make_rig, pair=pair, seed=seed, faults=Faults(slow_streams={0, THIRD_STREAM}))
        runtime = _sim(rig)
        before = rig.snapshot()
        writer = runtime.current_stream(0) if current else runtime.new_stream(0)
        runtime.launch(rig.poison_device, writer)
        ticket = _submit(rig, "backup", after=None if current else runtime.record(writer))
        ticket.wait()
        written = rig.snapshot()
        assert differences(written, rig.after_backup({**written, **_host(before)}, PAIRS)) == []
        host = written["host", "kv", "b0"]
        assert not np.array_equal(host, before["host", "kv", "b0"])


def _host(snapshot: Snapshot) -> Snapshot:
    return {key: value for key, value in snapshot.items() if key[0] == "host"}


def test_a_backup_that_does_not_wait_takes_old_bytes(make_rig: MakeRig) -> None:
    """The test above can fail: without the writer's event the bytes of before are backed up."""
    rig = _ready(make_rig, faults=Faults(slow_streams={THIRD_STREAM}))
    runtime = _sim(rig)
    before = rig.snapshot()
    writer = runtime.new_stream(0)
    runtime.launch(rig.poison_device, writer)
    _submit(rig, "backup", after=runtime.record(runtime.new_stream(0))).wait()
    assert differences(rig.snapshot(), rig.after_backup(before, PAIRS)) == []
    runtime.synchronize(writer)


def _copying(read: list[Snapshot], rig: Rig) -> Callable[[], None]:
    """A reader of everything, to be launched."""
    return lambda: read.append(rig.snapshot())


@backends
@pytest.mark.parametrize("current", [False, True])
def test_load_waits_for_readers_of_what_it_overwrites(
    make_rig: MakeRig, pair: tuple[str, str], current: bool
) -> None:
    """I34: a reader that was queued before the load reads the bytes of before, for every seed."""
    for seed in SEEDS:
        rig = _ready(make_rig, pair=pair, seed=seed, faults=Faults(slow_streams={0, THIRD_STREAM}))
        runtime = _sim(rig)
        before = rig.snapshot()
        read: list[Snapshot] = []
        reader = runtime.current_stream(0) if current else runtime.new_stream(0)
        runtime.launch(_copying(read, rig), reader)
        _submit(rig, "load", after=None if current else runtime.record(reader)).wait()
        assert len(read) == 1
        assert differences(read[0], before) == []
        assert differences(rig.snapshot(), rig.after_load(before, PAIRS)) == []


def test_a_load_that_does_not_wait_is_seen_by_the_reader(make_rig: MakeRig) -> None:
    """The test above can fail: without the reader's event it reads the new bytes."""
    rig = _ready(make_rig, faults=Faults(slow_streams={THIRD_STREAM}))
    runtime = _sim(rig)
    before = rig.snapshot()
    read: list[Snapshot] = []
    reader = runtime.new_stream(0)
    runtime.launch(_copying(read, rig), reader)
    _submit(rig, "load", after=runtime.record(runtime.new_stream(0))).wait()
    runtime.synchronize(reader)
    assert differences(read[0], rig.after_load(before, PAIRS)) == []


# Marks


@pytest.mark.parametrize("layers", [0, 1, 2, 3, 7, 61, 200])
@pytest.mark.parametrize("copy_bytes", [0, 1, 400_000, 1 << 20, 1 << 40])
def test_each_layer_is_in_one_group(layers: int, copy_bytes: int) -> None:
    """I37: every layer has one mark, in order; the first group is at most an eighth, the last the largest."""
    groups = load_groups(range(layers), copy_bytes)
    assert [layer for group in groups for layer in group] == list(range(layers))
    assert all(len(group) for group in groups)
    if len(groups) > 1:
        assert len(groups[0]) <= max(layers // 8, 1)
        assert len(groups[-1]) == max(len(group) for group in groups)


SPARSE = [
    pool_spec(48, 32, layer_ids=(1, 4, 5)),
    pool_spec(64, layer_ids=(0, 4, 8), pool="side", anchor=False),
]
MODEL_LAYERS = 11


def _wrong_layers(rig: Rig, expected: Snapshot, model_layer: int) -> list[str]:
    """Buffers of which a row of ``model_layer`` is not what is expected."""
    wrong = []
    for spec in SPARSE:
        if model_layer in spec.layer_ids:
            own = spec.layer_ids.index(model_layer)
            for buffer in spec.buffers:
                got = rig.device_rows[spec.pool][buffer.name].copied()[own]
                if not np.array_equal(got, expected["device", spec.pool, buffer.name][own]):
                    wrong.append(f"{spec.pool}.{buffer.name}")
    return wrong


@in_groups
@backends
def test_a_mark_tells_that_its_layer_has_landed(make_rig: MakeRig, pair: tuple[str, str]) -> None:
    """I37, I21: for every seed and every model layer, in all pools; layers that no pool maps fire too."""
    for seed in SEEDS:
        rig = _ready(make_rig, *SPARSE, pair=pair, seed=seed, layer_count=MODEL_LAYERS)
        expected = rig.after_load(rig.snapshot(), PAIRS)
        ticket = _submit(rig, "load")
        for layer in (seed % MODEL_LAYERS, *range(MODEL_LAYERS)):
            ticket.mark(layer).synchronize()
            assert ticket.mark(layer).query()
            assert _wrong_layers(rig, expected, layer) == []
        ticket.wait()
        assert differences(rig.snapshot(), expected) == []


@in_groups
@backends
def test_a_load_without_waiting_shows_old_bytes(make_rig: MakeRig, pair: tuple[str, str]) -> None:
    """A reader that skips the mark is caught by some seed; one that lets its stream wait is not, by any."""
    caught, last = 0, 8
    for seed in range(100):
        rig = _ready(make_rig, *SPARSE, pair=pair, seed=seed)
        expected = rig.after_load(rig.snapshot(), PAIRS)
        ticket = _submit(rig, "load")
        caught += bool(_wrong_layers(rig, expected, last))
        reader = _sim(rig).new_stream(0)
        ticket.wait_layer(_sim(rig), reader, last)
        read: list[list[str]] = []
        _sim(rig).launch(_reading(read, rig, expected, last), reader)
        _sim(rig).synchronize(reader)
        assert read == [[]]
        rig.controller.close()
    assert caught > 0


def _reading(read: list[list[str]], rig: Rig, expected: Snapshot, layer: int) -> Callable[[], None]:
    """A reader of one layer, to be launched."""
    return lambda: read.append(_wrong_layers(rig, expected, layer))


@in_groups
def test_the_first_layers_land_before_the_last(make_rig: MakeRig) -> None:
    """I37: a reader of layer 0 does not wait for the whole load."""
    rig = _ready(make_rig, pool_spec(48, layer_ids=range(8)), faults=Faults(slow_streams={LOAD_STREAM}))
    ticket = _submit(rig, "load")
    ticket.mark(0).synchronize()
    assert not ticket.mark(7).query()
    assert not ticket.poll()
    ticket.wait()


@pytest.mark.parametrize("layer", [-1, MODEL_LAYERS, 1 << 40])
def test_a_layer_that_the_model_lacks_has_no_mark(make_rig: MakeRig, layer: int) -> None:
    """A negative layer does not count from the end."""
    rig = _ready(make_rig, *SPARSE, layer_count=MODEL_LAYERS)
    ticket = _submit(rig, "load")
    with pytest.raises(UnknownNameError):
        ticket.mark(layer)
    ticket.wait()


def test_a_backup_has_no_marks(make_rig: MakeRig) -> None:
    """All layers leave at once."""
    ticket = _submit(_ready(make_rig), "backup")
    with pytest.raises(UnknownNameError):
        ticket.mark(0)
    ticket.wait()
