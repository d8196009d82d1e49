"""Two ranks, each in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any


def tcp() -> str:
    """A store on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run(program: Callable[..., None], init_method: str, folder: Path, *arguments: Any) -> list[int | None]:
    """Run ranks 0 and 1 of ``program``; their exit codes. Reports lie in ``folder``, by rank."""
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=program, args=(rank, init_method, folder / f"{rank}.json", *arguments))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    assert not stuck
    return [process.exitcode for process in processes]


def report(folder: Path, rank: int) -> Any:
    """What a rank wrote down."""
    return json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
