"""What cannot be unregistered or registered: kept, listed, refused to kernels."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from attrs import evolve

from hicache_core.controller import ControllerConfig
from hicache_core.device.base import MoveRows, MoveTokens
from hicache_core.device.sim import SimRuntime
from hicache_core.device.sim.faults import Faults
from hicache_core.errors import AddressError, RegisteredTwiceError, RegistrationError, UnregisterError
from hicache_core.memory.addresses import HostRange, Provenance
from hicache_core.memory.host import HostMemory
from hicache_core.memory.ledger import Ledger
from hicache_core.memory.options import MemoryOptions
from hicache_core.memory.registration import Registrations
from hicache_core.memory.tables import host_kernel_table, host_table, seen_from
from hicache_core.spec import RowGrid, layout_named
from hicache_core.testing.rigs import Rig
from hicache_core.testing.stand_ins import pool_spec
from tests.core.host_mappings import flags_at, our_bytes

CUT = mmap.PAGESIZE
GROUP = [pool_spec(48, 32), pool_spec(64, pool="second", anchor=False)]


class Sticky(SimRuntime):
    """A simulator that refuses to unregister at some calls, counted from 1, and keeps what it undid."""

    def __init__(self, *refused: int, faults: Faults | None = None) -> None:
        super().__init__(faults=faults)
        self.refused = set(refused)
        self.calls = 0
        self.undone: list[HostRange] = []

    def unregister(self, host: HostRange) -> None:
        """Refuse, or undo."""
        self.calls += 1
        if self.calls in self.refused:
            raise RegistrationError(
                who="sim", got="code 4", expected="0", remedy="-", rc=4, offset_bytes=0, nbytes=host.nbytes
            )
        super().unregister(host)
        self.undone.append(host)


def _memory(runtime: SimRuntime, ledger: Ledger, **options: object) -> HostMemory:
    chosen = MemoryOptions(**{"max_registration_bytes": CUT, **options})  # type: ignore[arg-type]
    return HostMemory(6 * CUT, 64, runtime, who="test", options=chosen, ledger=ledger)


@pytest.mark.parametrize("refused", [(1,), (2, 5), (6,), (1, 2, 3, 4, 5, 6)])
def test_all_parts_are_tried_and_the_error_names_those_that_are_left(refused: tuple[int, ...]) -> None:
    """I30: the rest is unregistered once; all stays mapped and booked until the last part is undone."""
    runtime, ledger = Sticky(*refused), Ledger()
    memory = _memory(runtime, ledger)
    start = memory.range.start
    memory.view[:] = 3
    with pytest.raises(UnregisterError) as caught:
        memory.destroy()
    error = caught.value
    assert (error.code, error.who) == ("unregister", "test")
    left = [(6 - call) * CUT for call in refused]
    assert [(stuck.offset, stuck.rc, stuck.who) for stuck in error.stuck] == [(o, 4, "test") for o in left]
    assert all((s.start, s.nbytes) == (start + s.offset, CUT) for s in error.stuck)
    assert runtime.calls == 6
    assert len(runtime.undone) == 6 - len(refused)
    assert "dc" in flags_at(start)
    assert (memory.view == 3).all()
    assert ledger.total() == 6 * CUT
    memory.destroy()
    assert len(runtime.undone) == len(set(runtime.undone)) == 6
    assert "dc" not in flags_at(start)
    assert (ledger.snapshot(), memory.stuck) == ((), ())


def test_memory_that_is_stuck_for_good_stays_mapped_when_everybody_lets_go() -> None:
    """I30: the driver may still write there; the ledger says whose it is."""
    runtime, ledger = Sticky(*range(1, 100)), Ledger()
    memory = _memory(runtime, ledger)
    start = memory.range.start
    with pytest.raises(UnregisterError):
        memory.destroy()
    del memory
    gc.collect()
    assert "dc" in flags_at(start)
    assert [entry.who for entry in ledger.snapshot()] == ["test"]
    assert len(runtime.memory.registrations) == 6


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None], ids=["interrupt", "refusal"])
def test_a_roll_back_that_is_refused_keeps_the_mapping_and_says_so(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """I27, I30: four parts were registered, the fifth fails, and the second of the four cannot be undone.

    A part whose registration was interrupted is tried as well: it might be registered.
    """
    runtime, ledger = Sticky(3 if error is None else 4, faults=Faults(refuse_registration_at=5)), Ledger()
    register, mapped = runtime.register, our_bytes()

    def interrupted(host: HostRange) -> None:
        if runtime.registration_calls == 4 and error is not None:
            raise error
        register(host)

    monkeypatch.setattr(runtime, "register", interrupted)
    with pytest.raises(type(error) if error is not None else RegistrationError) as caught:
        _memory(runtime, ledger)
    (note,) = caught.value.__notes__
    assert f"offset {CUT}" in note
    if isinstance(caught.value, RegistrationError):
        assert (caught.value.rc, caught.value.offset_bytes) == (2, 4 * CUT)
        assert [stuck.offset for stuck in caught.value.stuck] == [CUT]
    assert len(runtime.undone) == 3
    assert our_bytes() == mapped + 6 * CUT
    assert ledger.total() == 6 * CUT


def test_a_roll_back_that_works_lists_nothing_as_stuck() -> None:
    """I27: the error of an ordinary refusal says that nothing is left."""
    with pytest.raises(RegistrationError) as caught:
        _memory(Sticky(faults=Faults(refuse_registration_at=5)), Ledger())
    assert caught.value.stuck == ()
    assert not hasattr(caught.value, "__notes__")


def test_closing_goes_on_past_a_pool_that_is_stuck() -> None:
    """I30: every buffer of every pool is tried, one error names what is left, and closing again ends it."""
    runtime = Sticky(1, 3)
    config = ControllerConfig(io_backend="direct", layout="page_first_direct", host_pages=8)
    controller = Rig(GROUP, config, runtime).controller
    with pytest.raises(UnregisterError) as caught:
        controller.close()
    assert [stuck.who for stuck in caught.value.stuck] == ["pool 'second', b0", "pool 'kv', b0"]
    assert len(runtime.undone) == 1
    controller.close()
    assert not runtime.memory.registrations
    assert len(runtime.undone) == 3
    assert controller.ledger.snapshot() == ()


@pytest.mark.parametrize("parts", [((0, 2), (0, 2)), ((0, 2), (1, 1)), ((2, 2), (1, 2))], ids=str)
def test_a_range_is_not_registered_twice_by_us(parts: Iterable[tuple[int, int]]) -> None:
    """I29: the same range, a part, an overlap: refused before the runtime is asked, the first as it was."""
    runtime = Sticky()
    data = np.zeros(8 * CUT, dtype=np.uint8)
    whole = HostRange(start=-(-data.ctypes.data // CUT) * CUT, nbytes=4 * CUT)
    registrations = Registrations(runtime, whole, who="test")
    first, again = (whole.part(at * CUT, count * CUT) for at, count in parts)
    registrations.add(first)
    with pytest.raises(RegisteredTwiceError) as caught:
        registrations.add(again)
    assert (caught.value.start, caught.value.nbytes) == (again.start, again.nbytes)
    assert runtime.registration_calls == 1
    assert registrations.ranges == (first,)
    assert registrations.undo() == ()
    assert runtime.undone == [first]
    assert registrations.undo() == ()
    assert runtime.calls == 1


@pytest.mark.parametrize("floor", [1, CUT, 3 * CUT, 4 * CUT])
def test_halving_ends_at_the_floor(floor: int) -> None:
    """I28: nothing smaller is tried than what the options allow, or one cut."""
    tried: list[int] = []

    class Recorder(SimRuntime):
        """Keeps the size of each try."""

        def register(self, host: HostRange) -> None:
            """Keep it."""
            tried.append(host.nbytes)
            super().register(host)

    runtime = Recorder(faults=Faults(refuse_registration_above=CUT // 2))
    with pytest.raises(RegistrationError) as caught:
        _memory(runtime, Ledger(), max_registration_bytes=64 << 30, min_registration_bytes=floor)
    expected = {1: [6, 3, 1], CUT: [6, 3, 1], 3 * CUT: [6, 3], 4 * CUT: [6, 4]}[floor]
    assert [nbytes // CUT for nbytes in tried] == expected
    assert caught.value.nbytes == expected[-1] * CUT


# Memory that is not registered

REFUSE = Faults(refuse_registration_above=1)


def _pageable(runtime: SimRuntime | None = None) -> HostMemory:
    return _memory(runtime or SimRuntime(faults=REFUSE), Ledger(), accept_pageable=True)


def test_memory_that_cannot_be_pinned_is_accepted_only_where_that_was_asked_for() -> None:
    """The fact and its reason are data; it is present, mapped and booked like any other."""
    memory = _pageable()
    assert not memory.registered
    assert "code 2" in memory.pageable
    assert [(s.offset, s.host, s.registered) for s in memory.segments] == [(0, memory.range, False)]
    memory.view[:] = 1
    memory.destroy()
    memory.destroy()
    assert memory.segments == ()
    with pytest.raises(RegistrationError):
        _memory(SimRuntime(faults=REFUSE), Ledger())


def test_memory_that_can_be_pinned_is_pinned() -> None:
    """Accepting pageable memory changes nothing where it need not be accepted."""
    memory = _pageable(SimRuntime())
    assert memory.registered
    assert memory.pageable == ""
    assert all(segment.registered for segment in memory.segments)
    memory.destroy()


def test_pageable_memory_that_cannot_be_rolled_back_is_not_accepted() -> None:
    """I30: half of it would be registered, and no table could say which."""
    runtime = Sticky(*range(1, 100), faults=Faults(refuse_registration_at=5))
    with pytest.raises(RegistrationError) as caught:
        _memory(runtime, Ledger(), accept_pageable=True)
    assert len(caught.value.stuck) == 4


Launch = Callable[..., MoveRows | MoveTokens]
LAUNCHES: dict[str, Launch] = {
    "rows": lambda target, source, pages: MoveRows(
        target=target, source=source, target_pages=pages, source_pages=pages
    ),
    "tokens": lambda target, source, pages: MoveTokens(
        target=target,
        source=source,
        target_tokens=pages,
        source_tokens=pages,
        layers=range(1),
        spans=(),
        row_tokens=1,
    ),
}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_kernels_over_pageable_memory_are_refused(launch: Launch) -> None:
    """Its table carries the CPU addresses with a provenance of their own, and no launch takes it."""
    grid = RowGrid(pages=6, layers=1, page_rows=1, row_bytes=CUT)
    strides = layout_named("page_first").strides(grid)
    runtime = SimRuntime(faults=REFUSE)
    memory, pinned = _pageable(runtime), _pageable(SimRuntime())
    seen = [seen_from(segment, runtime, 0) for segment in memory.segments]
    table = host_kernel_table(memory.segments, seen, grid, strides, 0)
    assert table.provenance is Provenance.PAGEABLE
    assert table.bases.tolist() == host_table(memory.segments, grid, strides).bases.tolist()
    good = [seen_from(pinned.segments[0], pinned._registrations._runtime, 0)]  # type: ignore[arg-type]
    assert good[0].provenance is Provenance.ALIAS
    fine = evolve(table, provenance=Provenance.ALIAS)
    pages = torch.zeros(1, dtype=torch.int64)
    assert launch(fine, fine, pages).target is fine
    for sides in ((table, fine), (fine, table)):
        with pytest.raises(AddressError):
            launch(*sides, pages)
    memory.destroy()
    pinned.destroy()


@pytest.mark.parametrize("pair", [("kernel", "layer_first"), ("direct", "page_first_direct")])
def test_a_pool_over_pageable_memory_says_so_and_has_no_kernel(pair: tuple[str, str]) -> None:
    """A plan with a kernel is refused at construction and leaves nothing; copies are planned, and the fact
    is there for whoever asks."""
    mapped = our_bytes()
    runtime = SimRuntime(faults=REFUSE)
    config = ControllerConfig(
        io_backend=pair[0],
        layout=pair[1],
        host_pages=8,
        memory=MemoryOptions(accept_pageable=True),
        # Copies of the simulator reach registered memory alone.
        probe=False,
    )
    if pair[0] == "kernel":
        with pytest.raises(AddressError) as caught:
            Rig(GROUP, config, runtime)
        assert caught.value.who == "pool 'kv'"
    else:
        rig = Rig(GROUP, config, runtime)
        reasons = {pool.spec.pool: pool.pageable for pool in rig.controller.group.pools}
        assert set(reasons) == {"kv", "second"}
        assert all("code 2" in reason for reason in reasons.values())
        page = rig.controller.group.anchor.storage.get_page(0)
        assert page.size == GROUP[0].page_bytes
        rig.controller.close()
    assert our_bytes() == mapped
