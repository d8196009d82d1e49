"""Capabilities: what a pool can do on a platform, each with a verdict and, where it is no, the reason."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

from attrs import evolve, field, fields, frozen
from attrs import validators as v

from hicache_core.spec.platform import Alias, Platform
from hicache_core.spec.pool import PoolSpec

STAGED_ROW_ALIGNMENT = 16
KERNEL_ROW_ALIGNMENT = 8

SERVED_PAIRS = frozenset(
    {
        ("kernel", "layer_first"),
        ("kernel", "page_first"),
        ("direct", "layer_first"),
        ("direct", "page_first_direct"),
    }
)
"""(io_backend, layout) pairs that the core serves for strided rows."""


class Verdict(enum.Enum):
    """Whether a capability is there."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"
    NOT_APPLICABLE = "not-applicable"


@frozen(kw_only=True)
class Capability:
    """One verdict.

    Args:
        verdict: supported, unsupported or not applicable.
        value: what a supported capability amounts to, where it is more than a yes.
        code: reason code of an unsupported one.
        text: the reason, for people.
        remedy: what would make it supported.
    """

    verdict: Verdict = field(validator=v.instance_of(Verdict))
    value: object = None
    code: str = ""
    text: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.verdict is Verdict.SUPPORTED


def supported(value: object = None) -> Capability:
    """The capability is there; ``value`` says what it amounts to."""
    return Capability(verdict=Verdict.SUPPORTED, value=value)


def unsupported(code: str, text: str, remedy: str) -> Capability:
    """The capability is not there, for the reason ``code``."""
    return Capability(verdict=Verdict.UNSUPPORTED, code=code, text=text, remedy=remedy)


def not_applicable(text: str) -> Capability:
    """The question makes no sense for this pool."""
    return Capability(verdict=Verdict.NOT_APPLICABLE, text=text)


@frozen(kw_only=True)
class Capabilities:
    """What one pool can do on one platform.

    Args:
        staged_write_back: backups under kernel + page_first are issued by the host; no kernel stores to
            host memory.
        per_pool_backup_indices: the pool takes part in per-pool index routing: in one backup its host indices
            stay on the CPU where its plan is staged, while a pool that a kernel moves gets its own on the
            device. Without it they go to the device, so that its backups are not staged.
        kernel_rows: a kernel can move its rows through the pointer tables.
        kernel_pointer_domain: ``device`` or ``raw``: what the pool's kernel tables hold for host memory.
        strided_copy: rows of one page can be moved over layers by strided copies.
        token_granular: single tokens can be moved; the value is how many byte ranges one takes in a row.
        served_pairs: the (io_backend, layout) pairs; the value is a frozenset of them.
    """

    staged_write_back: Capability = field(validator=v.instance_of(Capability))
    per_pool_backup_indices: Capability = field(validator=v.instance_of(Capability))
    kernel_rows: Capability = field(validator=v.instance_of(Capability))
    kernel_pointer_domain: Capability = field(validator=v.instance_of(Capability))
    strided_copy: Capability = field(validator=v.instance_of(Capability))
    token_granular: Capability = field(validator=v.instance_of(Capability))
    served_pairs: Capability = field(validator=v.instance_of(Capability))

    def __iter__(self) -> Iterator[tuple[str, Capability]]:
        """Name and verdict of each capability, in the order of declaration."""
        for attribute in fields(Capabilities):
            yield attribute.name, getattr(self, attribute.name)

    def amended(self, changes: Mapping[str, Capability]) -> Capabilities:
        """A copy in which the named capabilities are replaced."""
        return evolve(self, **changes)


def _row_alignment(spec: PoolSpec, multiple: int, what: str) -> Capability:
    bad = [f"{b.name}={b.row_bytes}" for b in spec.buffers if b.row_bytes % multiple]
    if not bad:
        return supported()
    return unsupported(
        "row-alignment",
        f"{what} needs rows of a multiple of {multiple} bytes, and these are not: {', '.join(bad)}",
        f"Pad the rows to a multiple of {multiple} bytes, or use direct.",
    )


def default_capabilities(spec: PoolSpec, platform: Platform) -> Capabilities:
    """What the core's own tables and writers give a pool of strided rows, computed from facts alone.

    Args:
        spec: the pool's declaration.
        platform: the platform it is asked for.
    """
    if not spec.buffers:
        nothing = not_applicable("the pool holds no bytes")
        return Capabilities(
            staged_write_back=nothing,
            per_pool_backup_indices=nothing,
            kernel_rows=nothing,
            kernel_pointer_domain=nothing,
            strided_copy=nothing,
            token_granular=token_granular(spec),
            served_pairs=supported(SERVED_PAIRS),
        )
    kernels = _row_alignment(spec, KERNEL_ROW_ALIGNMENT, "a kernel")
    if not platform.has_kernels:
        kernels = unsupported(
            "no-kernel", f"the core has no kernels for {platform.name}", "Install a plugin that brings them."
        )
    return Capabilities(
        staged_write_back=_row_alignment(spec, STAGED_ROW_ALIGNMENT, "staged write-back"),
        per_pool_backup_indices=supported(),
        kernel_rows=kernels,
        kernel_pointer_domain=supported("raw" if platform.alias is Alias.NONE else "device"),
        strided_copy=supported(),
        token_granular=token_granular(spec),
        served_pairs=supported(SERVED_PAIRS),
    )


def token_granular(spec: PoolSpec) -> Capability:
    """Whether a single token can be moved with all that the pool holds of it, from the declaration alone.

    A buffer with one series of rows for all layers rules it out: a token of a layer would be half a token.
    """
    if not spec.buffers:
        return not_applicable("the pool holds no bytes")
    ranges = [len(spec.token_spans(buffer)) for buffer in spec.buffers]
    if not all(ranges):
        return unsupported(
            "no-spans", "the bytes of one token within its rows are not declared", "Move whole pages."
        )
    if not all(buffer.per_layer for buffer in spec.buffers):
        return unsupported(
            "not-per-layer", "a buffer has one series of rows for all layers", "Move whole pages."
        )
    if len({spec.row_tokens(buffer) for buffer in spec.buffers}) > 1:
        return unsupported(
            "unequal-row-tokens",
            "the rows of its buffers hold different numbers of tokens",
            "Declare them as pools of their own.",
        )
    return supported(max(ranges))
