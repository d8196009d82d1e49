"""``hicache replay``: a trace through both tiers with real bytes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from hicache_core.cache.policies import POLICIES
from hicache_core.cli.output import json_option, print_json, print_table, written_for
from hicache_core.plugins import load_plugins
from hicache_core.spec import DEVICES, IO_BACKENDS, LAYOUTS, PLATFORMS

_positive = click.IntRange(min=1)
_OPTIONS = (
    click.option("--model", required=True, help="Name of a model, or path of a model file."),
    click.option("--variant", help="A row format of the model; the platform's default where left out."),
    click.option(
        "--platform", required=True, help=f"One of {', '.join(PLATFORMS)}, or what a plugin brings."
    ),
    click.option("--io-backend", required=True, type=click.Choice(IO_BACKENDS)),
    click.option("--layout", required=True, type=click.Choice(list(LAYOUTS))),
    click.option("--device-blocks", required=True, type=_positive, help="Blocks that the device holds."),
    click.option("--host-blocks", required=True, type=_positive, help="Blocks that the host holds."),
    click.option("--page-size", "page_slots", type=_positive, help="Slots of a page, where open."),
    click.option("--policy", type=click.Choice(list(POLICIES)), default="write_through"),
    click.option(
        "--swa-pages",
        type=_positive,
        help="Device pages of a window's index space; as many as the blocks can have where left out.",
    ),
    click.option(
        "--state-slots", type=_positive, help="Device slots of a state's index space; 16 where left out."
    ),
    click.option("--layers", type=_positive, help="Keep the first N layers of each pool's own list."),
    click.option(
        "--tokens-per-block",
        "block_tokens",
        type=_positive,
        help="Tokens that one block of the trace stands for; the trace's own figure where left out.",
    ),
    click.option("--limit", type=_positive, help="Replay at most N requests."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option(
        "--allow-kernel-layer-first",
        is_flag=True,
        help="Take kernel + layer_first where the platform serves it on request only, after a probe.",
    ),
    click.option(
        "--probe/--no-probe", default=True, help="Prove every pool with bytes before the first request."
    ),
    click.option("--device", type=click.Choice(DEVICES), default="sim", show_default=True),
)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="TRACE")
@_with_options
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as JSON.")
@click.option(
    "--live",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Serve the controller's description on this socket, for `hicache describe --live`.",
)
@json_option
def replay(path: Path, report: Path | None, live: Path | None, as_json: bool, **choices: Any) -> None:
    """Replay TRACE through device and host with real bytes, and compare every loaded one.

    Exit 1 if a byte was wrong or a transfer failed, 2 if the trace cannot be read or the combination cannot
    work.
    """
    import torch

    from hicache_core.live import LiveSocket, describe
    from hicache_core.replay.report import write_report
    from hicache_core.replay.runner import Replay
    from hicache_core.replay.setup import ReplayConfig
    from hicache_core.replay.trace import read_trace

    # The content of a page is too small to share out: threads that wait for one another only cost time.
    torch.set_num_threads(1)
    if report is not None:
        # Before the work, so that a name that cannot be written costs nothing.
        with written_for("--report"):
            report.parent.mkdir(parents=True, exist_ok=True)
    requests = read_trace(path)
    first = next(requests)
    with _populating() as told:
        run = Replay(ReplayConfig(**choices), load_plugins(), first.block_tokens, progress=told)
    try:
        with _progress() as advance, ExitStack() as served:
            if live is not None:
                served.enter_context(LiveSocket(live, lambda: describe(run.controller)))
            run.run(itertools.chain([first], requests), advance)
        result = run.as_dict()
    finally:
        run.close()
    if report is not None:
        with written_for("--report"):
            write_report(report, result)
    if as_json:
        print_json(result.pop("schema"), **result)
    else:
        _print(result)
    if run.report.mismatches or run.report.failed_transfers:
        sys.exit(1)


@contextmanager
def _populating() -> Iterator[Callable[[int, int], None]]:
    """Bytes and rate of each buffer's host memory on the terminal while it is populated."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("host memory"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("populate", total=None)

        def told(done: int, nbytes: int) -> None:
            if done < progress.tasks[0].completed:
                progress.reset(task)
            progress.update(task, completed=done, total=nbytes)

        yield told


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """A count of requests on the terminal; nothing where the output is no terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("requests"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replay", total=None)
        yield lambda: progress.advance(task)


def _print(result: dict[str, Any]) -> None:
    seconds, rates = result["seconds"], result["gigabytes_per_second"]
    rows: list[tuple[str, object]] = [
        ("requests", f"{result['requests']:,} ({result['requests_too_large']:,} too large for the device)"),
        ("blocks referenced", f"{result['blocks']['referenced']:,}"),
        ("hits on the device, blocks", f"{result['hits']['device_blocks']:,}"),
        ("hits on the host, blocks", f"{result['hits']['host_blocks']:,}"),
        ("hits cut, blocks without window or state", f"{result['hits']['cut_blocks']:,}"),
        ("bytes device to host", f"{result['bytes']['device_to_host']:,}"),
        ("bytes host to device", f"{result['bytes']['host_to_device']:,}"),
        ("loaded bytes compared", f"{result['verified_bytes']:,}"),
        ("bytes of both tiers swept", f"{result['swept_bytes']:,}"),
        ("wrong bytes", f"{result['mismatches']:,}"),
        ("dropped blocks", f"{result['dropped_blocks']:,}"),
        ("failed transfers", f"{result['failed_transfers']:,}"),
        ("GB/s device to host, host to device", f"{rates['device_to_host']}, {rates['host_to_device']}"),
        ("seconds", ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())),
        *(("smaller than life", said) for said in result["shrunk"]),
    ]
    print_table(f"{result['model']}, {result['variant']}", ["figure", "value"], rows)
