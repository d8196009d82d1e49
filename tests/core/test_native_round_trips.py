"""Controllers over the runtimes of CUDA and HIP, with the stand-in in C below: every byte of both sides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_core.controller import ControllerConfig
from hicache_core.errors import TransferError
from hicache_core.memory.options import MemoryOptions
from hicache_core.spec import PoolSpec
from hicache_core.testing.oracle import POISON
from hicache_core.testing.rigs import DeviceOptions, Rig, differences
from hicache_core.testing.stand_ins import pool_spec
from tests.core.host_pages import ROWS, cut_pages
from tests.stand_ins.machine import CASES, OLDER, Case, NativeMachine, native_machine

MakeNative = Callable[..., NativeMachine]
PAIRS = (("direct", "layer_first"), ("direct", "page_first_direct"), ("kernel", "page_first"))
UNSERVED = {
    ("slots", "layer_first"),  # states lie page by page
    ("one layer", "page_first"),  # 24 and 17 bytes are no multiple of what staging moves
    ("odd bytes", "page_first"),
}
SERVED = [(rows, pair) for rows in ROWS for pair in PAIRS if (rows, pair[1]) not in UNSERVED]
OPTIONS = {
    "slab": DeviceOptions(pages=12, slab=True),
    "gaps": DeviceOptions(pages=12, gap_bytes=16),
}


def rig_of(
    machine: NativeMachine,
    spec: PoolSpec,
    pair: tuple[str, str],
    *,
    options: DeviceOptions = OPTIONS["slab"],
    device: int = 0,
    probe: bool = True,
) -> Rig:
    """A rig whose host buffers need about three registrations each."""
    config = ControllerConfig(
        io_backend=pair[0],
        layout=pair[1],
        host_pages=max(cut_pages(spec, pair[1]), 8),
        memory=MemoryOptions(max_registration_bytes=1),
        ring_bytes=4096,
        probe=probe,
    )
    return Rig([spec], config, machine.runtime, options=options, device=device)


@pytest.mark.parametrize("case", [*CASES.values(), *OLDER.values()], ids=[*CASES, *OLDER])
@pytest.mark.parametrize(("rows", "pair"), SERVED, ids=[f"{rows}, {pair[1]}" for rows, pair in SERVED])
def test_every_byte_goes_there_and_back(make_native: MakeNative, rows: str, pair: tuple[str, str]) -> None:
    """Backup and load over several registrations, rows with gaps and without, seed by seed."""
    spec = ROWS[rows]
    for seed, options in ((0, "slab"), (1, "gaps"), (2, "slab")):
        machine = make_native(SEED=seed)
        with rig_of(machine, spec, pair, options=OPTIONS[options]) as rig:
            assert machine.stand_in.count("live_registrations") > len(spec.buffers)
            rig.there_and_back()
        assert machine.stand_in.count("live_registrations") == machine.stand_in.count("live_mappings") == 0
        assert machine.stand_in.count("queued") == 0


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_the_second_device_is_served_as_the_first(make_native: MakeNative, pair: tuple[str, str]) -> None:
    """Its own aliases, its own streams; the current device is 0 before and after."""
    machine = make_native(SEED=3)
    with rig_of(machine, ROWS["k and v"], pair, device=1) as rig:
        rig.there_and_back()
    assert machine.stand_in.current_device() == 0


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_pages_at_every_end_of_a_registration_arrive(make_native: MakeNative, pair: tuple[str, str]) -> None:
    """All host pages at once, in an order of their own: each cut lies inside what is moved."""
    machine = make_native(SEED=4)
    spec = ROWS["k and v"]
    with rig_of(machine, spec, pair, options=DeviceOptions(pages=64, slab=True)) as rig:
        count = min(64, cut_pages(spec, pair[1]))
        host = rig.allocate(count)[::-1]
        pairs = list(zip(host, range(count), strict=True))
        rig.poison_host()
        expected = rig.after_backup(rig.snapshot(), pairs)
        rig.controller.backup(*rig.sides(pairs)).wait()
        assert not differences(rig.snapshot(), expected)


def test_marks_fire_layer_by_layer(make_native: MakeNative) -> None:
    """I37: the first layer's mark does not wait for the last one's bytes."""
    machine = make_native()
    with rig_of(machine, pool_spec(65536, layer_ids=range(8)), PAIRS[0]) as rig:
        host = rig.allocate(4)
        ticket = rig.controller.load(rig.slots(host), rig.slots(range(4)))
        ticket.mark(0).synchronize()
        assert machine.stand_in.count("queued") > 0
        ticket.wait()
        assert ticket.mark(7).query()


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_a_copy_that_is_refused_fails_its_transfer_alone(
    make_native: MakeNative, pair: tuple[str, str]
) -> None:
    """I38: a TransferError, host pages free again; the next transfer moves every byte."""
    machine = make_native(COPY_FAILS_AT=2, ERROR=1)
    with rig_of(machine, pool_spec(1024, 512), pair, options=OPTIONS["gaps"], probe=False) as rig:
        host = rig.allocate(4)
        rig.poison_host()
        with pytest.raises(TransferError):
            rig.controller.backup(rig.slots(host), rig.slots(range(4)))
        rig.controller.group.free({rig.anchor_space: rig.slots(host)})
        assert machine.stand_in.count("queued") == 0
        rig.poison_host()
        assert (rig.host_bytes("kv", "b0") == POISON).all()
        rig.there_and_back()


CHILD = """
import ctypes, pathlib, sys
from hicache_core.memory.host import HostMemory
from tests.stand_ins.machine import CASES, native_machine
machine = native_machine(CASES[sys.argv[1]], pathlib.Path(sys.argv[2]))
memory = HostMemory(1 << 16, 64, machine.runtime, who="child")
alias = machine.runtime.alias(memory.range, 0).start
print(ctypes.string_at(alias, 1), flush=True)
memory.destroy()
print("undone", flush=True)
ctypes.string_at(alias, 1)
print("read", flush=True)
"""


def test_an_alias_dies_with_its_registration(tmp_path: Path) -> None:
    """A process that reads there afterwards is ended by the system."""
    (tmp_path / "own").mkdir()
    command = [sys.executable, "-c", CHILD, "hip, distinct", str(tmp_path / "own")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["b'\\x00'", "undone", ""]
    assert done.returncode == -11, done.stderr


def test_a_transfer_that_fails_on_its_way_is_reported_by_its_ticket(tmp_path: Path, case: Case) -> None:
    """I36: accepted, then failed when it ran: whoever waits is told, and the pages are not a backup."""
    machine = native_machine(case, tmp_path, COPY_FAILS_AT=1, COPY_FAILS_LATE=1, ERROR=700)
    rig = rig_of(machine, pool_spec(1024), PAIRS[1], probe=False)
    host = rig.allocate(4)
    ticket = rig.controller.backup(rig.slots(host), rig.slots(range(4)))
    with pytest.raises(TransferError):
        ticket.wait()
