"""The replay finds what is wrong: a byte anywhere in either tier, a load that went astray, a failed copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_core.controller import Controller
from hicache_core.replay.runner import Replay
from hicache_core.transfer.ticket import Ticket
from tests.replay.replays import (
    ASTRAY,
    BLOCK_BYTES,
    PAGE_BYTES,
    WALK,
    WALK_BLOCKS,
    Corrupt,
    device_rows,
    host_bytes,
    mismatches,
    replayed,
    replaying,
    runtime_of,
    stream,
    twin_of,
    with_faults,
)

PAGE_ROWS = 4
DEVICE_PAGES = 1 + 2 * WALK_BLOCKS[0] + 1
HOST_PAGES = 1 + 2 * WALK_BLOCKS[1] + 1


def flip_device(page: int, buffer: str = "k", offset: int = 0) -> Corrupt:
    """Flips one bit of a device page."""

    def corrupt(replay: Replay) -> None:
        device_rows(replay)[buffer][0][page * PAGE_ROWS, offset] ^= 1

    return corrupt


def flip_host(page: int, buffer: str = "k", offset: int = 0) -> Corrupt:
    """Flips one bit of a host page of the layout page_first."""

    def corrupt(replay: Replay) -> None:
        host_bytes(replay)[buffer][page * PAGE_BYTES // 2 + offset] ^= 1

    return corrupt


@pytest.mark.parametrize("page", [0, DEVICE_PAGES - 1])
@pytest.mark.parametrize("buffer", ["k", "v"])
def test_device_guard_byte_is_found(page: int, buffer: str) -> None:
    """Slot page 0 and the page behind the last are never written; one wrong byte there is one mismatch."""
    assert mismatches(WALK, flip_device(page, buffer), after=3)[0] == 1


@pytest.mark.parametrize("page", [0, HOST_PAGES - 1])
@pytest.mark.parametrize("buffer", ["k", "v"])
def test_host_guard_byte_is_found(page: int, buffer: str) -> None:
    """The first and the last host page are never handed out; one wrong byte there is one mismatch."""
    assert mismatches(WALK, flip_host(page, buffer), after=3)[0] == 1


def test_byte_of_a_page_that_nothing_was_written_to_is_found() -> None:
    """Unused pages of both tiers still hold the poison at the end."""
    assert mismatches("ab", flip_device(DEVICE_PAGES - 3), after=1)[0] == 1
    assert mismatches("ab", flip_host(HOST_PAGES - 3), after=1)[0] == 1


@pytest.mark.parametrize("offset", [0, 1000, 2047])
def test_byte_that_is_never_loaded_is_found_by_the_sweep(offset: int) -> None:
    """One block: its first page is device page 1 and host page 1, and no later request loads it."""
    assert mismatches("a", flip_device(1, "v", offset), after=1) == (1, 0)
    assert mismatches("a", flip_host(1, "v", offset), after=1) == (1, 0)


def test_wrong_byte_of_the_host_is_found_when_it_is_loaded() -> None:
    """Found by the load, then once more on each tier by the sweep: the device now holds it as well."""
    requests = ["a", "bcd", "a"]
    choices = {"device_blocks": 3, "host_blocks": 9}
    assert mismatches(requests, flip_host(1), after=1, **choices) == (3, BLOCK_BYTES)
    assert mismatches(requests, lambda _: None, after=1, **choices) == (0, BLOCK_BYTES)


def test_wrong_byte_of_the_device_is_backed_up_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that breaks between the forward pass and the backup is wrong on the host, and is found there."""
    right = Replay._back_up
    replays: list[Replay] = []

    def broken(replay: Replay, *arguments: Any) -> None:
        if not replays:
            flip_device(1)(replay)
        replays.append(replay)
        right(replay, *arguments)

    monkeypatch.setattr(Replay, "_back_up", broken)
    report = replayed(stream("a", "bcd", "a"), device_blocks=3, host_blocks=9)
    # One in the load; host and device in the sweep.
    assert report.mismatches == 3


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_every_layer_is_looked_at(layer: int) -> None:
    """A byte is found whatever layer it lies in, on either tier."""
    page_layers = 3

    def host(replay: Replay) -> None:
        # page_first: [page][token][layer]
        row = (1 * PAGE_ROWS + 2) * page_layers + layer
        host_bytes(replay)["k"][row * 2048 + 7] ^= 0x80

    def device(replay: Replay) -> None:
        device_rows(replay)["k"][layer][1 * PAGE_ROWS + 2, 7] ^= 0x80

    assert mismatches(["a", "bcd", "a"], host, 1, layers=3, device_blocks=3, host_blocks=9)[0] == 3
    assert mismatches(["a"], device, 1, layers=3)[0] == 1


@pytest.mark.parametrize("wrong", ASTRAY)
@pytest.mark.parametrize("direction", ["load", "backup"])
def test_transfer_that_moves_the_wrong_pages_is_found(
    monkeypatch: pytest.MonkeyPatch, direction: str, wrong: Callable[..., tuple[Any, Any]]
) -> None:
    """A transfer that claims to be done and moved nothing, too little, or to the wrong place."""
    right = getattr(Controller, direction)

    def instead(self: Controller, host_pages: np.ndarray, device_pages: np.ndarray, **options: Any) -> Ticket:
        if len(host_pages) > 1:
            host_pages, device_pages = wrong(host_pages, device_pages)
        ticket: Ticket = right(self, host_pages, device_pages, **options)
        return ticket

    monkeypatch.setattr(Controller, direction, instead)
    report = replayed(stream("ab", "cde", "ab"), device_blocks=3, host_blocks=9)
    assert report.hits_host_blocks == 2
    # Of the bytes of a page that is not the right one, 1 in 256 is right by chance.
    assert report.mismatches > 0.9 * PAGE_BYTES


def test_write_beside_the_pages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that also touches the page before its own, here page 0, is seen by the sweep."""
    right = Controller.load

    def instead(self: Controller, host_pages: np.ndarray, device_pages: np.ndarray, **options: Any) -> Ticket:
        if len(host_pages):
            right(self, host_pages[:1], np.zeros(1, dtype=np.int64), **options).wait()
        return right(self, host_pages, device_pages, **options)

    monkeypatch.setattr(Controller, "load", instead)
    report = replayed(stream("ab", "cde", "ab"), device_blocks=3, host_blocks=9)
    assert 0.9 * PAGE_BYTES < report.mismatches <= PAGE_BYTES


DIRECT = {"io_backend": "direct", "layout": "page_first_direct"}
# With keys and values apart, "ab" and "cde" take a copy each to back both up, then "ab" is loaded.
STEPS = [("backup", 1), ("backup", 2), ("backup", 3), ("backup", 4), ("load", 5), ("load", 6)]


@pytest.mark.parametrize("fault", ["fail_copy_at", "refuse_copy_at"])
@pytest.mark.parametrize(("direction", "call"), STEPS)
def test_failed_transfer_is_counted_and_is_no_hit(
    monkeypatch: pytest.MonkeyPatch, direction: str, call: int, fault: str
) -> None:
    """The replay goes on: a backup that failed is dropped blocks, a load that failed is no hit."""
    with_faults(monkeypatch, **{fault: call})
    report = replayed(stream("ab", "cde", "ab"), device_blocks=3, host_blocks=9, **DIRECT)
    assert (report.requests, report.failed_transfers) == (3, 1)
    lost = {1: 2, 2: 2, 3: 3, 4: 3}.get(call, 0)
    assert report.dropped_blocks == lost
    assert report.hits_host_blocks == (2 if lost == 3 else 0)
    assert report.bytes_host_to_device == report.verified_bytes == report.hits_host_blocks * BLOCK_BYTES
    again = 2 if lost == 2 else 0
    assert report.bytes_device_to_host == (5 - lost + again) * BLOCK_BYTES


@pytest.mark.parametrize("fault", ["fail_copy_at", "refuse_copy_at"])
@pytest.mark.parametrize(("direction", "call"), STEPS)
def test_failed_transfer_is_not_taken_for_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch, direction: str, call: int, fault: str
) -> None:
    """Pages that a failed transfer may have half written, and nobody reads, are not judged at the end."""
    with_faults(monkeypatch, **{fault: call})
    report = replayed(stream("ab", "cde", "ab"), device_blocks=3, host_blocks=9, **DIRECT)
    assert report.failed_transfers == 1
    assert report.mismatches == 0


def test_steps_of_the_faults_are_as_listed() -> None:
    """Without a fault, the stream above backs up 5 blocks and loads 2."""
    requests = stream("ab", "cde", "ab")
    twin = twin_of(requests, 3, 9)
    report = replayed(requests, device_blocks=3, host_blocks=9, **DIRECT)
    assert (report.failed_transfers, report.mismatches, report.dropped_blocks) == (0, 0, 0)
    assert (twin.backed_up, twin.host_hits, report.hits_host_blocks) == (5, 2, 2)


def test_failure_leaves_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay in which a transfer failed is closed like any other."""
    made = with_faults(monkeypatch, fail_copy_at=3)
    with replaying(**DIRECT) as replay:
        assert replay.run(stream(*WALK)).failed_transfers == 1
        assert runtime_of(replay) is made[0]
        assert made[0].memory.registrations
    assert made[0].memory.registrations == {}


def test_wrong_byte_beside_a_failed_transfer_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resident page is judged whatever else failed."""
    with_faults(monkeypatch, fail_copy_at=3)
    with replaying(device_blocks=3, host_blocks=9, **DIRECT) as replay:
        requests = list(stream("ab", "cde"))
        seen: list[int] = []

        def corrupt() -> None:
            seen.append(1)
            if len(seen) == len(requests):
                page = int(replay._cache.index.host.resident_pages()[0])
                buffer = replay.controller.group.pools[0].buffers[0]
                buffer.memory.view[page * buffer.strides.page] ^= 0xFF

        report = replay.run(requests, corrupt)
    assert (report.failed_transfers, report.mismatches) == (1, 1)
