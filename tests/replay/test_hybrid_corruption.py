"""The replay finds wrong bytes in windows, rings, states and indexer rows; a fault in one fails them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_core.controller import Controller
from hicache_core.replay.runner import Replay
from hicache_core.transfer.ticket import Ticket
from tests.replay.hybrids import HYBRIDS
from tests.replay.replays import (
    ASTRAY,
    Corrupt,
    device_rows,
    host_bytes,
    mismatches,
    replayed,
    stream,
    with_faults,
)

# Three blocks fit on the device: the third request loads "a", page or slot 1 of every pool, from the host.
THERE_AND_BACK = ("a", "bcd", "a")
TIERS = {"device_blocks": 3, "host_blocks": 9}
# Model, pool and buffer; device rows and bytes of a page in one layer.
PARTS = [
    pytest.param("deepseek-v4-flash", "swa", "kv", 1, 149_760, id="window"),
    pytest.param("deepseek-v4-flash", "c4_state", "state", 1, 65_536, id="ring"),
    pytest.param("deepseek-v4-flash", "c4_indexer_state", "state", 1, 16_384, id="indexer-ring"),
    pytest.param("gpt-oss-120b", "swa", "v", 16, 16 * 1_024, id="window-of-tokens"),
    pytest.param("jamba-v0.1", "mamba", "temporal", 1, 524_288, id="state"),
    pytest.param("jamba-v0.1", "mamba", "conv_0", 1, 49_152, id="convolution"),
    pytest.param("deepseek-v3.2", "indexer", "index_k", 1, 8_448, id="indexer"),
]
each_part = pytest.mark.parametrize(("model", "pool", "buffer", "page_rows", "page_bytes"), PARTS)


def choices(model: str) -> dict[str, Any]:
    """One layer of a model, so that a host page has the bytes of one layer."""
    return {**HYBRIDS[model].bounded(3 * HYBRIDS[model].block_pages), **TIERS, "layers": 1}


def flip_device(pool: str, buffer: str, row: int) -> Corrupt:
    """Flips the last bit of a device row."""

    def corrupt(replay: Replay) -> None:
        device_rows(replay, pool)[buffer][0][row, -1] ^= 1

    return corrupt


def flip_host(pool: str, buffer: str, byte: int) -> Corrupt:
    """Flips a bit of the host."""

    def corrupt(replay: Replay) -> None:
        host_bytes(replay, pool)[buffer][byte] ^= 1

    return corrupt


@each_part
def test_wrong_byte_of_the_host_is_found_when_it_is_loaded(
    model: str, pool: str, buffer: str, page_rows: int, page_bytes: int
) -> None:
    """By the load, then once more on each tier by the sweep, at either end of the page."""
    for byte in (page_bytes, 2 * page_bytes - 1):
        corrupt = flip_host(pool, buffer, byte)
        found, verified = mismatches(THERE_AND_BACK, corrupt, after=1, **choices(model))
        assert found == 3
        assert verified == sum(HYBRIDS[model].block_bytes.values()) // HYBRIDS[model].choices["layers"]


@each_part
def test_byte_that_is_never_loaded_is_found_by_the_sweep(
    model: str, pool: str, buffer: str, page_rows: int, page_bytes: int
) -> None:
    """On the device as on the host."""
    for corrupt in (flip_device(pool, buffer, page_rows), flip_host(pool, buffer, page_bytes + 7)):
        assert mismatches("a", corrupt, after=1, **choices(model)) == (1, 0)


@each_part
def test_guard_byte_is_found(model: str, pool: str, buffer: str, page_rows: int, page_bytes: int) -> None:
    """Page 0 is never handed out, of no space and on no tier; nor is the last."""
    for corrupt in (
        flip_device(pool, buffer, 0),
        flip_device(pool, buffer, -1),
        flip_host(pool, buffer, 0),
        flip_host(pool, buffer, -1),
    ):
        assert mismatches(THERE_AND_BACK, corrupt, after=2, **choices(model))[0] == 1


@pytest.mark.parametrize("wrong", ASTRAY)
@pytest.mark.parametrize("direction", ["load", "backup"])
def test_window_that_is_left_behind_or_goes_astray_is_found(
    monkeypatch: pytest.MonkeyPatch, direction: str, wrong: Callable[..., tuple[Any, Any]]
) -> None:
    """The anchor's pages are right, those of the window are not, or not all."""
    right = getattr(Controller, direction)

    def instead(self: Controller, host: Any, device: Any, *, others: Any, **options: Any) -> Ticket:
        others = {name: wrong(*sides) for name, sides in others.items()}
        ticket: Ticket = right(self, host, device, others=others, **options)
        return ticket

    monkeypatch.setattr(Controller, direction, instead)
    report = replayed(stream("ab", "cde", "ab"), **choices("gpt-oss-120b"))
    assert (report.hits_host_blocks, report.failed_transfers) == (2, 0)
    # Of the bytes of a page that is not the right one, 1 in 256 is right by chance.
    assert report.mismatches > 0.9 * 16 * 2 * 1_024


# Six pools with bytes, each one copy: "ab" and "cde" are backed up, then "ab" is loaded.
STEPS = [*((call, "backup", 2) for call in range(1, 7)), *((call, "backup", 3) for call in range(7, 13))]
LOADS = [(call, "load", 0) for call in range(13, 19)]


@pytest.mark.parametrize("fault", ["fail_copy_at", "refuse_copy_at"])
@pytest.mark.parametrize(("call", "direction", "lost"), [*STEPS, *LOADS])
def test_failed_copy_of_any_pool_fails_the_transfer_of_all(
    monkeypatch: pytest.MonkeyPatch, call: int, direction: str, lost: int, fault: str
) -> None:
    """A backup that failed is dropped blocks of every space, a load that failed no hit; no byte is wrong."""
    with_faults(monkeypatch, **{fault: call})
    hybrid = HYBRIDS["deepseek-v4-flash"]
    direct = {"io_backend": "direct", "layout": "page_first_direct"}
    report = replayed(stream("ab", "cde", "ab"), **choices("deepseek-v4-flash"), **direct)
    assert (report.requests, report.failed_transfers, report.mismatches) == (3, 1, 0)
    assert +report.dropped == ({"full": lost, "swa": 1} if lost else {})
    # Of the window, only what the end of a request keeps is moved.
    hits = 2 if lost == 3 else 0
    block = {name: nbytes // hybrid.choices["layers"] for name, nbytes in hybrid.block_bytes.items()}
    loaded = 2 * block["full"] + block["swa"] if hits else 0
    assert report.hits_host_blocks == hits
    assert report.bytes_host_to_device == report.verified_bytes == loaded
    again = 2 if lost == 2 else 0
    backups = 2 - bool(lost) + bool(again)
    assert report.bytes_device_to_host == (5 - lost + again) * block["full"] + backups * block["swa"]
