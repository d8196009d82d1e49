"""What the ranks of the agreement tests run, each in a process of its own; torch.distributed with gloo."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hicache_core.errors import CapacityError, RankError, SpecError
from hicache_core.memory.agreement import agree, together

TIMEOUT_S = 3.0
BUDGET_BYTES = 100_000_000_000
TOKEN_BYTES = (12_464, 13_120)


@contextmanager
def distributed(rank: int, init_method: str) -> Iterator[None]:
    """A process group of two ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    yield
    # Whoever hosts the store stays until the other rank has read from it; a barrier would need both alive.
    time.sleep(0.2)
    dist.destroy_process_group()


def _unequal(rank: int, kept: list[str]) -> Any:
    """Each rank asks for what fits its layers; only one has the second pool."""
    tokens = BUDGET_BYTES // TOKEN_BYTES[rank]
    with together(timeout_s=TIMEOUT_S, who="host pools") as ranks:
        agreed = ranks.minimum({"kv": tokens, **({"state": 77} if rank else {})})
        ranks.commit()
    return {"own": tokens, "agreed": agreed}


def _exhausted(rank: int, kept: list[str]) -> Any:
    """Rank 1 runs out after the capacity is agreed; rank 0 has allocated by then."""
    with together(timeout_s=TIMEOUT_S, who="host pools") as ranks:
        ranks.minimum({"kv": 100})
        if rank:
            raise CapacityError(who="kv", got="100 tokens", expected="90", remedy="Ask for less.")
        ranks.commit()
        kept.append("memory")
    return None


def _early(rank: int, kept: list[str]) -> Any:
    """Rank 0 fails before it has anything to say."""
    with together(timeout_s=TIMEOUT_S, who="host pools") as ranks:
        if not rank:
            raise ValueError("no model")
        ranks.minimum({"kv": 100})
        kept.append("capacity")
    return None


def _interrupted(rank: int, kept: list[str]) -> Any:
    """Rank 1 is told to stop, which is no error of its program."""
    try:
        with together(timeout_s=TIMEOUT_S, who="host pools") as ranks:
            if rank:
                raise KeyboardInterrupt
            ranks.commit()
            kept.append("memory")
    except KeyboardInterrupt:
        return "interrupted"


def _uncommitted(rank: int, kept: list[str]) -> Any:
    """Rank 1 forgets to commit."""
    with together(timeout_s=TIMEOUT_S, who="host pools") as ranks:
        if not rank:
            ranks.commit()
            kept.append("memory")
    return None


def _nested(rank: int, kept: list[str]) -> Any:
    """An agreement of rank 1 with itself fails within the one of both ranks."""
    with together(timeout_s=TIMEOUT_S, who="host pools") as ranks:
        if rank:
            raise RankError(who="inner", ranks=[7], reason="inner reason", remedy="None.")
        ranks.commit()
        kept.append("memory")
    return None


def _groups(rank: int, kept: list[str]) -> Any:
    """A group of both ranks, and one of rank 1 alone, which rank 0 is not in."""
    both, alone = dist.new_group([0, 1]), dist.new_group([1])
    agreed = [agree({"pages": 10 + rank}, group=both, timeout_s=TIMEOUT_S)]
    try:
        agreed.append(agree({"pages": 10 + rank}, group=alone, timeout_s=TIMEOUT_S))
    except SpecError:
        kept.append("refusal")
    return agreed


def _one_figure(rank: int, kept: list[str]) -> Any:
    """After all that, the ranks still meet."""
    return agree({"pages": 10 + rank}, timeout_s=TIMEOUT_S)


SCENARIOS: Mapping[str, Callable[[int, list[str]], Any]] = {
    "unequal": _unequal,
    "exhausted": _exhausted,
    "early": _early,
    "interrupted": _interrupted,
    "uncommitted": _uncommitted,
    "nested": _nested,
    "groups": _groups,
    "one figure": _one_figure,
}


def outcome(scenario: Callable[[int, list[str]], Any], rank: int) -> dict[str, Any]:
    """What a scenario returned or raised, what it kept, and its seconds."""
    kept: list[str] = []
    start = time.monotonic()
    try:
        result = {"result": scenario(rank, kept)}
    except RankError as error:
        result = {"ranks": error.ranks, "reason": error.reason, "cause": type(error.__cause__).__name__}
    return {**result, "kept": kept, "seconds": time.monotonic() - start}


def run_scenarios(rank: int, init_method: str, report: Path) -> None:
    """All scenarios one after the other; a JSON object of the outcomes in ``report``."""
    with distributed(rank, init_method):
        outcomes = {name: outcome(scenario, rank) for name, scenario in SCENARIOS.items()}
        report.write_text(json.dumps(outcomes), encoding="utf-8")


def run_and_die(rank: int, init_method: str, report: Path, victim: int) -> None:
    """The victim is killed between capacity and commit; the other one reports."""

    def scenario(rank: int, kept: list[str]) -> None:
        with together(timeout_s=TIMEOUT_S, who="host pools") as ranks:
            ranks.minimum({"kv": 100})
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.commit()
            kept.append("memory")

    with distributed(rank, init_method):
        report.write_text(json.dumps(outcome(scenario, rank)), encoding="utf-8")
        # Leaving the group properly needs the other rank; nothing is left to tell.
        os._exit(0)
