"""Whatever happens to host memory in whatever order, nothing is left over; nor after a process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.host_mappings import our_bytes
from tests.core.memory_sequences import End, Make, Sequence, Step

ROOT = Path(__file__).resolve().parents[2]

MAKES = st.builds(
    Make,
    pages=st.integers(1, 12),
    allocator=st.sampled_from(["anonymous", "memfd"]),
    limit_pages=st.integers(1, 6),
    refuse_at=st.integers(0, 6),
    refuse_above=st.sampled_from([None, None, 1, 4096, 3 * 4096]),
    accept_pageable=st.booleans(),
    stop=st.sampled_from([False, False, False, True]),
    interrupt_at=st.sampled_from([0, 0, 0, 1, 3]),
)
ENDS = st.builds(
    End,
    which=st.integers(0, 7),
    drop=st.booleans(),
    keep_view=st.booleans(),
    refuse=st.frozensets(st.integers(1, 6), max_size=3),
)
STEPS: st.SearchStrategy[Step] = st.one_of(MAKES, MAKES, ENDS)


@pytest.mark.slow
def test_nothing_is_left_over_whatever_happens() -> None:
    """I9, I27, I30: no registration, mapping, descriptor or booking, with refusals at every step."""
    mapped = our_bytes()

    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(steps=st.lists(STEPS, min_size=1, max_size=8))
    def runs(steps: list[Step]) -> None:
        Sequence(mapped).run(steps)

    runs()


def test_a_step_that_leaves_something_is_seen() -> None:
    """The check can fail: a mapping, a registration and a booking that are not undone."""
    sequence = Sequence()
    sequence._make(Make(pages=3))
    kept = sequence.held.pop()
    with pytest.raises(AssertionError):
        sequence.check()
    with pytest.raises(AssertionError):
        sequence.close()
    kept.destroy()
    sequence.close()


def _shared() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.core.memory_sequences", "7", "20"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_and_starts_again() -> None:
    """I30: SIGKILL while it holds registered memory of both kinds: no file of it is in /dev/shm, and the same
    run from the start ends well."""
    before = _shared()
    with _start() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        assert Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").count("memfd:hicache") == 1
        assert _shared() == before
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert _shared() == before
    with _start() as process:
        out, err = process.communicate("go on\n", timeout=120)
    assert (process.returncode, out) == (0, "half\ndone\n"), err
    assert _shared() == before
