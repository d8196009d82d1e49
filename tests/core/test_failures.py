"""Failures and lifetime: what a failed transfer leaves behind, and when pages are let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from hicache_core.binding import Binder
from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.device_pool import DevicePool
from hicache_core.errors import DeviceError, DeviceFault, SlotError, TransferError
from hicache_core.memory.tables import BufferTables
from hicache_core.pool import build_pointer_tables
from hicache_core.spec import platform_named
from hicache_core.testing.oracle import PagePair
from hicache_core.testing.rigs import Rig, Snapshot, differences
from hicache_core.testing.stand_ins import pool_spec, registry_of
from hicache_core.transfer.ticket import Ticket

MakeRig = Callable[..., Rig]
PAIRS: list[PagePair] = [(5, 2), (0, 9), (3, 4), (4, 5)]
SERVED = [
    ("kernel", "layer_first"),
    ("kernel", "page_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
]
BACKUP_STREAM, LOAD_STREAM = 1, 2
"""Numbers of the simulator's streams; stream 0 is the caller's current one."""
MOVES = ["backup", "load"]


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


def _host_pages_are_released(rig: Rig) -> None:
    group = rig.controller.group
    free = group.allocators["full"].free_pages
    group.free({"full": rig.slots(range(6))})
    assert group.allocators["full"].free_pages == free + 6
    assert sorted(rig.allocate(8)) == list(range(8))


def _next_transfer_works(rig: Rig) -> None:
    for move in MOVES:
        before = rig.snapshot()
        _submit(rig, move).wait()
        assert differences(rig.snapshot(), _after(rig, move, before)) == []


def _only_targets_changed(got: Snapshot, before: Snapshot, after: Snapshot) -> bool:
    """Whether each byte is that of before or of after."""
    return all(((got[key] == before[key]) | (got[key] == after[key])).all() for key in got)


def _each_call(make_rig: MakeRig, fault: Callable[[int], Faults], pair: tuple[str, str]) -> Iterable[Rig]:
    """Rigs in which the first, second, third, ... copy call goes wrong; the caller stops when none does."""
    for call in range(1, 60):
        yield _ready(make_rig, pair=pair, seed=call, ring_bytes=300, faults=fault(call))


# (direction, pair, copy calls that one transfer of PAIRS submits at the least)
COPYING = [
    ("backup", ("kernel", "page_first"), 8),
    ("backup", ("direct", "layer_first"), 1),
    ("backup", ("direct", "page_first_direct"), 1),
    ("load", ("direct", "layer_first"), 3),
    ("load", ("direct", "page_first_direct"), 3),
]
copying = pytest.mark.parametrize(("move", "pair", "calls"), COPYING)


@in_groups
@copying
def test_a_failed_copy_is_a_failed_transfer(
    make_rig: MakeRig, move: str, pair: tuple[str, str], calls: int
) -> None:
    """I36: whichever copy fails, the error is kept, pages are released and the next transfer works."""
    failed = 0
    for rig in _each_call(make_rig, lambda call: Faults(fail_copy_at=call), pair):
        before = rig.snapshot()
        ticket = _submit(rig, move)
        assert ticket.error is None
        rig.controller.engine.drain()
        assert ticket.poll()
        if ticket.error is None:
            assert differences(rig.snapshot(), _after(rig, move, before)) == []
            break
        failed += 1
        assert ticket.error.code == "transfer"
        assert isinstance(ticket.error.__cause__, DeviceError)
        for _ in range(2):
            with pytest.raises(TransferError) as again:
                ticket.wait()
            assert again.value is ticket.error
        assert _only_targets_changed(rig.snapshot(), before, _after(rig, move, before))
        _host_pages_are_released(rig)
        _next_transfer_works(rig)
    assert failed >= calls


@in_groups
def test_the_mark_of_a_failed_layer_raises(make_rig: MakeRig) -> None:
    """I36, I39: a reader of that layer learns it; layers that have landed are good."""
    rig = _ready(
        make_rig,
        pool_spec(48, layer_ids=(0, 1)),
        pair=("direct", "layer_first"),
        faults=Faults(fail_copy_at=2),
    )
    ticket = _submit(rig, "load")
    ticket.mark(0).synchronize()
    with pytest.raises(DeviceError):
        ticket.mark(1).synchronize()
    with pytest.raises(TransferError):
        ticket.wait()


def _refusal(rig: Rig, move: str) -> TransferError | None:
    """The error of the submission itself; None where it is accepted, and then waited for."""
    try:
        ticket = _submit(rig, move)
    except TransferError as error:
        return error
    ticket.wait()
    return None


@in_groups
@copying
def test_a_refused_copy_undoes_the_submission(
    make_rig: MakeRig, move: str, pair: tuple[str, str], calls: int
) -> None:
    """I38: whichever call is refused, what was submitted has run by then, and nothing is held."""
    refused = 0
    for rig in _each_call(make_rig, lambda call: Faults(refuse_copy_at=call), pair):
        before = rig.snapshot()
        error = _refusal(rig, move)
        if error is None:
            break
        refused += 1
        assert error.code == "transfer"
        assert isinstance(error.__cause__, DeviceError)
        got = rig.snapshot()
        assert _only_targets_changed(got, before, _after(rig, move, before))
        _host_pages_are_released(rig)
        rig.controller.engine.drain()
        assert differences(rig.snapshot(), got) == []
        _next_transfer_works(rig)
    assert refused >= calls


class _Quitter:
    """A writer that launches something and then raises what no runtime raises."""

    def __init__(self, launch: Callable[[Any], None]) -> None:
        self._launch = launch

    def submit(self, pairs: object, layers: range, stream: object) -> None:
        """Launch, then give up."""
        self._launch(stream)
        raise ZeroDivisionError


def test_whatever_raises_after_a_launch_is_waited_for() -> None:
    """I38: an error of a plugin's own writer releases nothing while its launches still run."""
    spec = pool_spec(48)
    runtime = SimRuntime(faults=Faults(slow_streams={BACKUP_STREAM}))
    ran: list[int] = []
    writer = _Quitter(lambda stream: runtime.launch(lambda: ran.append(1), stream))
    registry = registry_of([spec], hicache_staged_write_back=lambda pool, device: writer)
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=8, probe=False)
    with Rig([spec], config, runtime, registry=registry) as rig:
        rig.allocate(6)
        with pytest.raises(ZeroDivisionError):
            _submit(rig, "backup")
        assert ran == [1]
        _host_pages_are_released(rig)


_FAR = 1 << 40


def _far_pages(spec: Any, buffers: Any, device: int) -> tuple[BufferTables, ...]:
    """Tables that start where they should, and whose pages lie where nothing is."""
    (right,) = build_pointer_tables(spec, buffers, device)
    return (evolve(right, host_kernel=evolve(right.host_kernel, page_stride=_FAR)),)


@pytest.mark.parametrize("move", MOVES)
def test_a_kernel_that_faults_is_a_failed_transfer(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I36: the fault of a wrong table, were it not refused, reaches the caller through the ticket."""
    spec = pool_spec(48)
    registry = registry_of([spec], hicache_build_pointer_table=_far_pages)
    config = ControllerConfig(io_backend="kernel", layout="layer_first", host_pages=8, probe=False)
    monkeypatch.setattr(Binder, "_check_tables", lambda *_: None)
    with Rig([spec], config, SimRuntime(platform_named("cuda-wsl2")), registry=registry) as rig:
        rig.allocate(6)
        before = rig.snapshot()
        ticket = _submit(rig, move)
        with pytest.raises(TransferError) as caught:
            ticket.wait()
        fault = caught.value.__cause__
        assert isinstance(fault, DeviceFault)
        anchor = rig.controller.group.anchor
        assert fault.address == int(anchor.tables[0].host_kernel.bases[0, 0]) + anchor.nbytes
        assert differences(rig.snapshot(), before) == []
        _host_pages_are_released(rig)


def test_poll_never_waits_and_never_raises(make_rig: MakeRig) -> None:
    """I36: a failed transfer polls like a finished one; the error is there to be asked for."""
    for seed in range(25):
        faults = Faults(fail_copy_at=1 + seed % 3)
        rig = _ready(make_rig, pair=("direct", "layer_first"), seed=seed, faults=faults)
        ticket = _submit(rig, "load")
        polls = 1
        while not ticket.poll():
            polls += 1
            assert polls < 1000
        assert isinstance(ticket.error, TransferError)
        assert ticket.poll()


# Lifetime


@pytest.mark.parametrize("move", MOVES)
def test_host_pages_are_held_until_the_acknowledgement(make_rig: MakeRig, move: str) -> None:
    """I35: not the end of the copy but the poll or wait that sees it lets the pages go."""
    rig = _ready(make_rig)
    ticket = _submit(rig, move)
    rig.controller.engine.drain()
    host = _slots(rig)[0]
    with pytest.raises(SlotError):
        rig.controller.group.free({"full": host})
    assert ticket.poll()
    rig.controller.group.free({"full": host})


def test_each_transfer_has_a_hold_of_its_own(make_rig: MakeRig) -> None:
    """I35: acknowledging one ticket several times does not release the pages of another."""
    rig = _ready(make_rig, faults=Faults(slow_streams={LOAD_STREAM}))
    first, load = _submit(rig, "load"), _submit(rig, "load")
    for _ in range(3):
        first.wait()
        assert first.poll()
    with pytest.raises(SlotError):
        rig.controller.group.free({"full": _slots(rig)[0]})
    load.wait()
    rig.controller.group.free({"full": _slots(rig)[0]})


@pytest.mark.parametrize("pair", SERVED, ids="+".join)
@pytest.mark.parametrize("move", MOVES)
def test_close_waits_for_what_was_submitted(make_rig: MakeRig, pair: tuple[str, str], move: str) -> None:
    """I35, I30: memory is unregistered after the last byte has moved; closing twice is harmless."""
    faults = Faults(slow_streams={0, BACKUP_STREAM, LOAD_STREAM})
    rig = _ready(make_rig, pair=pair, faults=faults, max_registration_bytes=1)
    after = _after(rig, move, rig.snapshot())
    buffer = rig.controller.group.anchor.buffers[0].memory.view
    ticket = _submit(rig, move)
    assert not ticket.poll()
    rig.controller.close()
    assert np.array_equal(buffer, after["host", "kv", "b0"])
    assert np.array_equal(rig.device_rows["kv"]["b0"].copied(), after["device", "kv", "b0"])
    assert not _sim(rig).memory.registrations
    assert ticket.poll()
    assert ticket.error is None
    rig.controller.close()


def test_a_ticket_counts_the_bytes_of_all_pools(make_rig: MakeRig) -> None:
    """I20: bytes, of all layers of all buffers of all pools."""
    ticket = _submit(_ready(make_rig, pool_spec(48, 32), pool_spec(64, pool="side", anchor=False)), "backup")
    assert ticket.nbytes == len(PAIRS) * 4 * 3 * (48 + 32 + 64)
    ticket.wait()


def test_two_controllers_share_a_runtime() -> None:
    """Streams, rings and registrations are each controller's own."""
    runtime = SimRuntime()
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=8, ring_bytes=500)
    with Rig([pool_spec(48)], config, runtime) as one, Rig([pool_spec(48)], config, runtime) as two:
        for rig in (one, two):
            rig.allocate(6)
            rig.fill_host()
        before = one.snapshot(), two.snapshot()
        tickets = [_submit(rig, "backup") for rig in (one, two)]
        for ticket in reversed(tickets):
            ticket.wait()
        for rig, old in zip((one, two), before, strict=True):
            assert differences(rig.snapshot(), rig.after_backup(old, PAIRS)) == []
        two.controller.close()
        _next_transfer_works(one)


def test_an_anchor_without_layers_moves_nothing() -> None:
    """I45: a group of names alone gives tickets that are done; there is nothing to mark."""
    spec = pool_spec(layer_ids=())
    registry = registry_of([spec])
    config = ControllerConfig(io_backend="kernel", layout="page_first", host_pages=4)
    controller = Controller(config, [DevicePool(spec=spec)], SimRuntime(), registry)
    empty = np.empty(0, dtype=np.int64)
    for move in (controller.backup, controller.load):
        ticket = move(empty, empty)
        assert ticket.poll()
        assert ticket.nbytes == 0
    controller.close()


def test_a_page_whose_backup_is_pending_is_not_loaded(make_rig: MakeRig) -> None:
    """I35: a load of it would read what the backup has not written yet; once acknowledged, it works."""
    rig = _ready(make_rig, faults=Faults(slow_streams={BACKUP_STREAM}))
    host, device = rig.slots(rig.allocate(1)), rig.slots([1])
    ticket = rig.controller.backup(host, device)
    for again in (rig.controller.load, rig.controller.backup):
        with pytest.raises(SlotError):
            again(host, device)
    ticket.wait()
    rig.controller.load(host, device).wait()


def test_a_closed_controller_moves_nothing(make_rig: MakeRig) -> None:
    """Its tables point at memory that is gone."""
    rig = _ready(make_rig)
    host = rig.slots(rig.allocate(1))
    rig.controller.close()
    for move in (rig.controller.backup, rig.controller.load):
        with pytest.raises(TransferError):
            move(host, rig.slots([1]))
