"""What ``check`` and ``plan`` share: which group is asked about, sizes, and the solver's answer as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from attrs import frozen

from hicache_core.assembly import PoolGroup, file_group, model_group
from hicache_core.compat import DEFAULT_RING_BYTES, Answer, PoolPlan, Violation
from hicache_core.errors import ByteSizeError
from hicache_core.plugins import PluginRegistry
from hicache_core.spec import PLATFORMS, Platform, PoolSpec
from hicache_core.spec.units import parse_bytes


@frozen(kw_only=True)
class GivenSize:
    """A size as the operator gave it.

    Args:
        text: the text, whose unit messages use.
        nbytes: the bytes that it stands for.
    """

    text: str
    nbytes: int


def given_size(ctx: click.Context, param: click.Parameter, value: str | None) -> GivenSize | None:
    """Callback of an option: the size that it gives; what is none is misuse."""
    if value is None:
        return None
    try:
        return GivenSize(text=value, nbytes=parse_bytes(value))
    except ByteSizeError as error:
        raise click.BadParameter(f"{error.got} is no size; expected {error.expected}.") from error


def size_option(*names: str, **attributes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option that takes ``64GiB``, ``1.5GB`` or bytes."""
    return click.option(*names, metavar="SIZE", callback=given_size, **attributes)


_OPTIONS = (
    click.option("--model", help="Name of a model, or path of a model file."),
    click.option("--pools", "pools_path", metavar="FILE.toml", help="A hand-made group in place of --model."),
    click.option("--variant", help="A row format of the model; the platform's default where left out."),
    click.option(
        "--page-size", "page_slots", type=click.IntRange(min=1), help="Slots of a page, where open."
    ),
    click.option(
        "--allow-kernel-layer-first",
        is_flag=True,
        help="Take kernel + layer_first where the platform serves it on request only.",
    ),
    click.option("--no-probe", is_flag=True, help="The start-up probe is switched off."),
    size_option(
        "--ring-bytes",
        "ring",
        default=str(DEFAULT_RING_BYTES),
        help="Budget of the staging ring of a device; 64MiB where left out.",
    ),
)


def group_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which group is asked about, and what its operator takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def platform_option(*, required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``--platform``."""
    listed = f"One of {', '.join(PLATFORMS)}, or what a plugin brings."
    return click.option("--platform", "platform_name", required=required, help=listed)


@frozen(kw_only=True)
class Asked:
    """What the operator asks about.

    Args:
        model: name or path of a model; None with ``pools_path``.
        pools_path: a file of hand-made pools; None with ``model``.
        variant: a variant of the model; None for the platform's default.
        page_slots: slots of a page; None for the model's own.
        allow_kernel_layer_first, no_probe, ring: what the solver is told.
    """

    model: str | None
    pools_path: str | None
    variant: str | None
    page_slots: int | None
    allow_kernel_layer_first: bool
    no_probe: bool
    ring: GivenSize

    def __attrs_post_init__(self) -> None:
        if (self.model is None) == (self.pools_path is None):
            raise click.UsageError("Give one of --model and --pools.")
        if self.pools_path is not None and (self.variant or self.page_slots):
            raise click.UsageError("--variant and --page-size are for --model; a file says them itself.")

    def group(self, platform: Platform, registry: PluginRegistry) -> PoolGroup:
        """The group on a platform; raises what :mod:`hicache_core.assembly` does."""
        if self.pools_path is not None:
            return file_group(self.pools_path, registry)
        return model_group(self.model or "", self.variant, platform, registry, page_slots=self.page_slots)

    @property
    def choices(self) -> dict[str, Any]:
        """The options of a query, by the names that JSON has too."""
        return {
            "allow_kernel_layer_first": self.allow_kernel_layer_first,
            "probe": not self.no_probe,
            "ring_bytes": self.ring.nbytes,
        }


def answer_data(answer: Answer) -> dict[str, Any]:
    """The answer without the pools of its plan, as JSON has it."""
    near = answer.nearest
    return {
        "answer": answer.outcome.value,
        "conditions": [
            {"rule": c.rule, "code": c.code, "text": c.text}
            for c in (answer.plan.conditions if answer.plan else ())
        ],
        "violations": [violation_data(violation) for violation in answer.violations],
        "nearest": near
        and {
            "io_backend": near.io_backend,
            "layout": near.layout,
            "allow_kernel_layer_first": near.allow_kernel_layer_first,
        },
    }


def violation_data(violation: Violation) -> dict[str, Any]:
    """One violation, as JSON has it."""
    return {
        "id": violation.id,
        "rule": violation.rule,
        "code": violation.code,
        "pool": violation.pool or None,
        "got": violation.got,
        "expected": violation.expected,
        "remedy": violation.remedy,
    }


def pool_data(spec: PoolSpec) -> dict[str, Any]:
    """What a pool is, as JSON has it."""
    return {
        "pool": spec.pool,
        "family": spec.family,
        "index_space": spec.index_space.name,
        "page_slots": spec.index_space.page_slots,
        "layers": spec.layer_count,
        "row_bytes": {buffer.name: buffer.row_bytes for buffer in spec.buffers},
    }


def plan_data(plan: PoolPlan) -> dict[str, Any]:
    """How a pool moves, as JSON has it."""
    return {
        "backup": plan.backup.value,
        "load": plan.load.value,
        "staged": plan.staged,
        "backup_host_indices": plan.backup_host_indices.value,
        "load_host_indices": plan.load_host_indices.value,
        "backup_device_indices": plan.backup.device_indices.value,
        "load_device_indices": plan.load.device_indices.value,
        "pointer_domain": plan.pointer_domain.value,
        "staging_bytes": plan.staging_bytes,
        "choices": [{"code": choice.code, "text": choice.text} for choice in plan.choices],
    }


def print_refusal(answer: Answer) -> None:
    """Each violation in a line of reason and one of remedy, then the nearest combination that works."""
    for violation in answer.violations:
        print_reason(str(violation), violation.remedy)
    found = f"the nearest combination that works for the whole group is {answer.nearest}"
    click.echo(found if answer.nearest else "no other combination works for the whole group either")


def print_reason(reason: str, remedy: str) -> None:
    """A line of reason and one of remedy, whatever line breaks a plugin put into them."""
    click.echo(" ".join(reason.split()))
    click.echo(f"  {' '.join(remedy.split())}")
