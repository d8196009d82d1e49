"""``hicache plan``: what a host size gives, in bytes and pages, before anything is allocated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import click
from attrs import define, field, frozen
from attrs import validators as v

from hicache_core.assembly import PoolGroup
from hicache_core.cli.groups import (
    Asked,
    GivenSize,
    answer_data,
    group_options,
    platform_option,
    pool_data,
    print_reason,
    print_refusal,
    size_option,
)
from hicache_core.cli.output import json_option, print_json, print_table
from hicache_core.compat import Answer, Outcome, answer
from hicache_core.errors import HostSizeError
from hicache_core.plugins import load_plugins
from hicache_core.sizing import (
    DEFAULT_BLOCK_TOKENS,
    Basis,
    SizeRequest,
    Sizing,
    check_host_memory,
    split_host_size,
)
from hicache_core.spec import IO_BACKENDS, LAYOUTS, platform_named
from hicache_core.spec.units import format_bytes_like

_positive = click.IntRange(min=1)


def _of_spaces(number: Callable[[str], Any]) -> Callable[..., dict[str, Any]]:
    """Callback of an option that is given as ``SPACE=NUMBER``, once for each space."""

    def read(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for value in values:
            space, _, text = value.rpartition("=")
            try:
                given = number(text)
            except (ValueError, ZeroDivisionError) as error:
                raise click.BadParameter(f"{value!r} has no number behind a '='.") from error
            if not space or space in found:
                raise click.BadParameter(f"{value!r} names no index space, or one twice.")
            found[space] = given
        return found

    return read


def _percent(text: str) -> Fraction:
    if "e" in text.lower():
        # Exact arithmetic would write 1e999999999 out.
        raise ValueError(text)
    return Fraction(text.removesuffix("%")) / 100


_OPTIONS = (
    click.option("--io-backend", required=True, type=click.Choice(IO_BACKENDS)),
    click.option("--layout", required=True, type=click.Choice(list(LAYOUTS))),
    size_option("--host-size", required=True, help="Host memory of one rank: 64GiB, 64GB, or bytes."),
    click.option("--ranks", type=_positive, default=1, show_default=True, help="Ranks on the host."),
    size_option("--host-memory", help="Memory of the host, for whether all ranks fit."),
    size_option("--reserve", help="What of --host-memory is kept for others."),
    click.option(
        "--pages",
        metavar="SPACE=N",
        callback=_of_spaces(int),
        multiple=True,
        help="Host pages of an index space; may be given again.",
    ),
    click.option(
        "--share",
        metavar="SPACE=PERCENT",
        callback=_of_spaces(_percent),
        multiple=True,
        help="Percent of the size for an index space; may be given again.",
    ),
    click.option(
        "--block-tokens",
        type=_positive,
        default=DEFAULT_BLOCK_TOKENS,
        show_default=True,
        help="Spaces without pages or share get the rest as one block of so many tokens keeps their pages.",
    ),
    click.option("--device-pages", type=_positive, help="Device pages of the anchor's index space."),
)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@frozen(kw_only=True)
class _Question:
    """The options of a plan that are not those of a check."""

    io_backend: str
    layout: str
    host_size: GivenSize
    ranks: int
    host_memory: GivenSize | None
    reserve: GivenSize | None
    pages: Mapping[str, int]
    share: Mapping[str, Fraction]
    block_tokens: int
    device_pages: int | None

    def __attrs_post_init__(self) -> None:
        if self.reserve is not None and self.host_memory is None:
            raise click.UsageError("--reserve is a part of --host-memory; give that too.")

    @property
    def reserve_bytes(self) -> int:
        """What of the host's memory is kept for others."""
        return 0 if self.reserve is None else self.reserve.nbytes

    def shown(self, nbytes: int) -> str:
        """A size in the unit of --host-size."""
        return format_bytes_like(nbytes, self.host_size.text)


@define(kw_only=True)
class _Result:
    """What there is to say: the solver's answer, the split, and why there is none.

    Args:
        group: the pools.
        answer: the solver's answer.
        sizing: the split of one rank's size; None where the size is too small.
        memory_left_bytes: what all ranks and the reserve leave of the host; None where that was not asked, or
            they do not fit.
        problems: sizes that do not fit.
        warnings: what works and is worth a word: code and text.
    """

    group: PoolGroup
    answer: Answer = field(validator=v.instance_of(Answer))
    sizing: Sizing | None = None
    memory_left_bytes: int | None = None
    problems: list[HostSizeError] = field(factory=list)
    warnings: list[tuple[str, str]] = field(factory=list)

    @property
    def works(self) -> bool:
        """Whether the combination works and the sizes fit."""
        return self.answer.outcome is not Outcome.NO and not self.problems

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep a size that does not fit, so that all reasons are said at once."""
        try:
            yield
        except HostSizeError as error:
            self.problems.append(error)


@click.command()
@group_options
@platform_option(required=True)
@_with_options
@json_option
def plan(platform_name: str, as_json: bool, **given: Any) -> None:
    """Say what a host size gives: pages and bytes of every pool, staging, and what is left.

    Sizes are GB, MB, KB (powers of 1000), GiB, MiB, KiB (powers of 1024) or bytes. The size is that of one
    rank, and is split over the pools: those of one index space share its pages. The group is a MODEL's or a
    FILE's, see `hicache check --help`.

    Exit 1 if the combination cannot work or a size does not fit, with every reason and what would fit.
    """
    names = [attribute.name for attribute in _Question.__attrs_attrs__]
    question = _Question(**{name: given.pop(name) for name in names})
    asked = Asked(**given)
    registry = load_plugins()
    platform = platform_named(platform_name, registry.platforms)
    group = asked.group(platform, registry)
    pair = {"io_backend": question.io_backend, "layout": question.layout, **asked.choices}
    result = _Result(group=group, answer=answer(group.query(registry, platform, **pair)))
    # A pool that is missing would get the bytes of the others, so there is nothing true to say of sizes.
    if not group.missing:
        _split(question, result)
    _compare_with_host(question, result)
    _compare_with_device(question, result)
    if as_json:
        print_json(
            "hicache.plan/1", group=group.title, platform=platform.name, **pair, **_data(question, result)
        )
    else:
        click.echo(f"{group.title} on {platform.name}, {question.io_backend} + {question.layout}")
        _print(question, result)
    sys.exit(0 if result.works else 1)


def _split(question: _Question, result: _Result) -> None:
    request = SizeRequest(
        host_bytes=question.host_size.nbytes,
        pages=question.pages,
        shares=question.share,
        block_tokens=question.block_tokens,
        shown_like=question.host_size.text,
    )
    with result.collecting():
        result.sizing = split_host_size(result.group.specs, request)


def _compare_with_host(question: _Question, result: _Result) -> None:
    if question.host_memory is None:
        return
    with result.collecting():
        result.memory_left_bytes = check_host_memory(
            question.host_size.nbytes,
            ranks=question.ranks,
            memory_bytes=question.host_memory.nbytes,
            reserve_bytes=question.reserve_bytes,
            shown_like=question.host_size.text,
        )


def _compare_with_device(question: _Question, result: _Result) -> None:
    if result.sizing is None or question.device_pages is None:
        return
    first = next(iter(result.sizing.spaces.values()))
    if first.pages < question.device_pages:
        text = (
            f"the host tier is smaller than the device tier: {first.pages:,} host pages against "
            f"{question.device_pages:,} device pages of index space '{first.space.name}'"
        )
        result.warnings.append(("host-below-device", text))


def _data(question: _Question, result: _Result) -> dict[str, Any]:
    moves = result.answer.plan
    return {
        **answer_data(result.answer),
        "fits": result.works,
        "problems": [
            {
                "code": f"{error.code}-{error.reason}",
                "got": error.got,
                "expected": error.expected,
                "remedy": error.remedy,
                "short_bytes": error.short_bytes,
                "fits_bytes": error.fits_bytes,
            }
            for error in result.problems
        ],
        "warnings": [{"code": code, "text": text} for code, text in result.warnings],
        "host_size_bytes": question.host_size.nbytes,
        "ranks": question.ranks,
        "block_tokens": question.block_tokens,
        "staging_bytes": moves.staging_bytes if moves else None,
        "host_memory_bytes": question.host_memory.nbytes if question.host_memory else None,
        "reserve_bytes": question.reserve_bytes,
        "host_memory_left_bytes": result.memory_left_bytes,
        **_sizing_data(question, result.sizing),
    }


def _sizing_data(question: _Question, sizing: Sizing | None) -> dict[str, Any]:
    if sizing is None:
        return {"rank": None, "host": None, "index_spaces": [], "pools": []}
    return {
        "rank": {"nbytes": sizing.nbytes, "left_bytes": sizing.left_bytes},
        "host": {"nbytes": sizing.nbytes * question.ranks, "left_bytes": sizing.left_bytes * question.ranks},
        "index_spaces": [
            {
                "index_space": name,
                "page_slots": space.space.page_slots,
                "basis": space.basis.value,
                "block_pages": space.block_pages,
                "page_bytes": space.page_bytes,
                "pages": space.pages,
                "slots": space.slots,
                "nbytes": space.nbytes,
            }
            for name, space in sizing.spaces.items()
        ],
        "pools": [
            {
                **pool_data(pool.spec),
                "page_bytes": pool.spec.page_bytes,
                "pages": pool.pages,
                "nbytes": pool.nbytes,
                "host_nbytes": pool.nbytes * question.ranks,
            }
            for pool in sizing.pools
        ],
    }


def _print(question: _Question, result: _Result) -> None:
    click.echo(f"the combination works: {result.answer.outcome.value}")
    if result.answer.outcome is Outcome.NO:
        print_refusal(result.answer)
    for error in result.problems:
        reason = f"[{error.code}-{error.reason}] got {error.got}, expected {error.expected}"
        print_reason(reason, error.remedy)
    for code, text in result.warnings:
        click.echo(f"warning [{code}]: {text}")
    if result.sizing is not None:
        _print_sizing(question, result.sizing)
        _print_totals(question, result, result.sizing)


def _print_sizing(question: _Question, sizing: Sizing) -> None:
    if any(space.basis is Basis.BLOCKS for space in sizing.spaces.values()):
        kept = ", ".join(
            f"{space.block_pages} of '{name}'"
            for name, space in sizing.spaces.items()
            if space.basis is Basis.BLOCKS
        )
        click.echo(
            f"pages are shared as one block of {question.block_tokens} tokens keeps them: {kept}; "
            "one at least of each"
        )
    print_table(
        "index spaces, one rank",
        ["index space", "page slots", "by", "pages", "slots", "bytes a page", "bytes"],
        [
            (
                name,
                space.space.page_slots,
                space.basis.value,
                f"{space.pages:,}",
                f"{space.slots:,}",
                f"{space.page_bytes:,}",
                question.shown(space.nbytes),
            )
            for name, space in sizing.spaces.items()
        ],
    )
    print_table(
        f"pools, one rank and all {question.ranks} of the host",
        ["pool", "index space", "layers", "row bytes", "bytes a page", "pages", "bytes", "bytes, all ranks"],
        [
            (
                pool.spec.pool,
                pool.spec.index_space.name,
                pool.spec.layer_count,
                ", ".join(f"{b.name} {b.row_bytes:,}" for b in pool.spec.buffers) or "no bytes",
                f"{pool.spec.page_bytes:,}",
                f"{pool.pages:,}",
                question.shown(pool.nbytes),
                question.shown(pool.nbytes * question.ranks),
            )
            for pool in sizing.pools
        ],
    )


def _print_totals(question: _Question, result: _Result, sizing: Sizing) -> None:
    staging = result.answer.plan.staging_bytes if result.answer.plan else 0
    ranks, memory = question.ranks, question.host_memory
    rows: list[tuple[str, object, object]] = [
        ("asked for", question.shown(sizing.host_bytes), question.shown(sizing.host_bytes * ranks)),
        ("taken by whole pages", question.shown(sizing.nbytes), question.shown(sizing.nbytes * ranks)),
        ("left over", question.shown(sizing.left_bytes), question.shown(sizing.left_bytes * ranks)),
        ("staging ring, on the device", question.shown(staging), question.shown(staging * ranks)),
    ]
    if memory is not None:
        left = result.memory_left_bytes
        rest = "does not fit" if left is None else format_bytes_like(left, memory.text)
        rows += [
            ("host memory", "", format_bytes_like(memory.nbytes, memory.text)),
            ("reserve", "", format_bytes_like(question.reserve_bytes, memory.text)),
            ("left on the host", "", rest),
        ]
    print_table("in all", ["what", "one rank", f"all {ranks} of the host"], rows)
