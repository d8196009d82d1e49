"""Capabilities: what a pool can do on a platform, each with a verdict and, where it is no, the reason."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import evolve, field, fields, frozen
from attrs import validators as v

from hicache_core.errors import SpecError
from hicache_core.spec.checks import Validator, refuse
from hicache_core.spec.layout import IO_BACKENDS
from hicache_core.spec.platform import Alias, Platform
from hicache_core.spec.pool import PoolSpec

STAGED_ROW_ALIGNMENT = 16
KERNEL_ROW_ALIGNMENT = 8
DIRECTIONS = ("backup", "load")

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


class PointerDomain(enum.Enum):
    """What a pool's kernel tables hold for host memory."""

    DEVICE = "device"
    """Addresses that the runtime gave for the target device."""
    CPU = "cpu"
    """CPU addresses, whatever the device sees."""
    RAW = "raw"
    """Addresses as they are, on platforms that register nothing."""


class IndexPlace(enum.Enum):
    """Where what moves the rows of a pool reads its indices."""

    CPU = "cpu"
    """In arrays of the host, which issues the copies."""
    DEVICE = "device"
    """In tensors of the device, which a kernel reads."""


class GraphCapture(enum.Enum):
    """What a captured transfer can do when its graph is replayed."""

    FIXED_ADDRESSES = "fixed-addresses"
    """The pages of the capture again."""
    NEW_INDICES = "new-indices"
    """The pages that its index tensors name by then."""


IndexPlaces = frozenset[tuple[str, str, IndexPlace]]
"""(direction, io_backend, place): each place where a pool can take its host indices."""


@frozen(kw_only=True)
class Capability:
    """One verdict.

    Args:
        verdict: supported, unsupported or not applicable.
        value: what a supported capability amounts to, where it is more than a yes.
        code: reason code of an unsupported one.
        text: the reason, for people.
        remedy: what would make it supported.

    Raises:
        SpecError: a value beside a no, which whoever reads the value alone would take for a yes, or a no
            without a reason code.
    """

    verdict: Verdict = field(validator=v.instance_of(Verdict))
    value: object = None
    code: str = field(default="", validator=v.instance_of(str))
    text: str = field(default="", validator=v.instance_of(str))
    remedy: str = field(default="", validator=v.instance_of(str))

    def __attrs_post_init__(self) -> None:
        if self.value is not None and not self:
            self._refuse(f"the value {self.value!r}", "a value where it is supported, and only there")
        if self.verdict is Verdict.UNSUPPORTED and not self.code:
            self._refuse("no code", "a reason code")

    def _refuse(self, got: str, expected: str) -> None:
        raise SpecError(
            who=f"capability ({self.verdict.value})",
            got=got,
            expected=expected,
            remedy="Make it by supported(value), unsupported(code, text, remedy) or not_applicable(text).",
        )

    def __bool__(self) -> bool:
        return self.verdict is Verdict.SUPPORTED

    def as_data(self) -> dict[str, Any]:
        """The verdict as plain data: verdict and value, and of a no also code, text and remedy."""
        said = {"code": self.code, "text": self.text, "remedy": self.remedy}
        shown = {"verdict": self.verdict.value, "value": _plain(self.value)}
        return {**shown, **{key: value for key, value in said.items() if value}}


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(" + ".join(str(_plain(part)) for part in entry) for entry in value)
    return value


def supported(value: object = None) -> Capability:
    """The capability is there; ``value`` says what it amounts to."""
    return Capability(verdict=Verdict.SUPPORTED, value=value)


def unsupported(code: str, text: str, remedy: str) -> Capability:
    """The capability is not there, for the reason ``code``."""
    return Capability(verdict=Verdict.UNSUPPORTED, code=code, text=text, remedy=remedy)


def not_applicable(text: str) -> Capability:
    """The question makes no sense for this pool."""
    return Capability(verdict=Verdict.NOT_APPLICABLE, text=text)


def _no_value(value: object) -> bool:
    return value is None


def _pairs(value: object) -> bool:
    return isinstance(value, frozenset) and value <= SERVED_PAIRS


def _places(value: object) -> bool:
    if not isinstance(value, frozenset):
        return False
    known = {(way, io, place) for way in DIRECTIONS for io in IO_BACKENDS for place in IndexPlace}
    return value <= known


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _power_of_two(value: object) -> bool:
    return isinstance(value, int) and _count(value) and value & (value - 1) == 0


def _one_of(kind: type[enum.Enum]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def _amounts_to(accepts: Callable[[object], bool], expected: str) -> Validator:
    """A capability which, where it is supported, has a value that ``accepts`` takes."""

    def check(instance: object, attribute: Any, value: object) -> None:
        if not isinstance(value, Capability):
            refuse(instance, attribute, value, "a Capability")
        elif value and not accepts(value.value):
            refuse(instance, attribute, value.value, f"supported with {expected}")

    return check


_YES = _amounts_to(_no_value, "no value")


_CLAIMS = (Verdict.SUPPORTED, Verdict.UNSUPPORTED)


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
        kernel_pointer_domain: what the pool's kernel tables hold for host memory; a :class:`PointerDomain`.
        host_index_device: where the pool can take its host indices, per direction and io_backend; the value
            is :data:`IndexPlaces`.
        graph_capture: whether a transfer can be captured in a graph; a :class:`GraphCapture`.
        row_alignment: the value is the largest power of two that divides the bytes of every row.
        strided_copy: rows of one page can be moved over layers by strided copies.
        token_granular: single tokens can be moved; the value is how many byte ranges one takes in a row.
        served_pairs: the (io_backend, layout) pairs; the value is a frozenset of all or some
            of :data:`SERVED_PAIRS`.

    Raises:
        SpecError: a capability is none, or its value is not what is said here.
    """

    staged_write_back: Capability = field(validator=_YES)
    per_pool_backup_indices: Capability = field(validator=_YES)
    kernel_rows: Capability = field(validator=_YES)
    kernel_pointer_domain: Capability = field(
        validator=_amounts_to(_one_of(PointerDomain), "a PointerDomain")
    )
    host_index_device: Capability = field(
        validator=_amounts_to(_places, "a frozenset of (direction, io_backend, IndexPlace)")
    )
    graph_capture: Capability = field(validator=_amounts_to(_one_of(GraphCapture), "a GraphCapture"))
    row_alignment: Capability = field(validator=_amounts_to(_power_of_two, "a power of two"))
    strided_copy: Capability = field(validator=_YES)
    token_granular: Capability = field(validator=_amounts_to(_count, "a whole number of at least 1"))
    served_pairs: Capability = field(
        validator=_amounts_to(_pairs, "a frozenset of pairs that the core serves")
    )

    def __iter__(self) -> Iterator[tuple[str, Capability]]:
        """Name and verdict of each capability, in the order of declaration."""
        for attribute in fields(Capabilities):
            yield attribute.name, getattr(self, attribute.name)

    def amended(self, changes: Mapping[str, Capability]) -> Capabilities:
        """A copy in which the named capabilities are replaced."""
        return evolve(self, **changes)

    def check_arithmetic(self, spec: PoolSpec) -> None:
        """Hold what follows from a declaration alone against it; the rest is for the start-up probe.

        Args:
            spec: the declaration of the pool.

        Raises:
            SpecError: an alignment that does not divide every row, or single tokens where none are declared.
        """
        alignment, tokens = self.row_alignment.value, token_granular(spec)
        if isinstance(alignment, int) and any(b.row_bytes % alignment for b in spec.buffers):
            raise _untrue(spec, f"rows aligned to {alignment}", f"at most {_alignment(spec)}")
        if self.token_granular and not tokens:
            raise _untrue(spec, "single tokens", f"none: {tokens.text}")

    def over_pageable(self, reason: str) -> Capabilities:
        """What is left of them where the host memory of the pool could not be registered.

        Args:
            reason: why it is pageable.
        """
        lost = unsupported("pageable", f"host memory is not registered: {reason}", "Raise the memlock limit.")
        needing = ("kernel_rows", "kernel_pointer_domain", "graph_capture")
        return self.amended({name: lost for name in needing if getattr(self, name).verdict in _CLAIMS})


def _untrue(spec: PoolSpec, got: str, expected: str) -> SpecError:
    return SpecError(
        who=f"capabilities of pool '{spec.pool}'",
        got=got,
        expected=f"{expected}, as its declaration has it",
        remedy="Declare what the rows are.",
    )


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
            host_index_device=nothing,
            graph_capture=nothing,
            row_alignment=nothing,
            strided_copy=nothing,
            token_granular=token_granular(spec),
            served_pairs=supported(SERVED_PAIRS),
        )
    kernels = _row_alignment(spec, KERNEL_ROW_ALIGNMENT, "a kernel")
    if not platform.has_kernels:
        kernels = unsupported(
            "no-kernel",
            f"there are no kernels for {platform.name} here",
            "Install what brings them: a plugin with a profile and a runtime, or triton where one serves.",
        )
    return Capabilities(
        staged_write_back=_row_alignment(spec, STAGED_ROW_ALIGNMENT, "staged write-back"),
        per_pool_backup_indices=supported(),
        kernel_rows=kernels,
        kernel_pointer_domain=supported(
            PointerDomain.RAW if platform.alias is Alias.NONE else PointerDomain.DEVICE
        ),
        host_index_device=supported(_index_places(bool(kernels))),
        graph_capture=unsupported(
            "not-captured",
            "a transfer checks its indices on the host, and may issue batch copies, which a capture refuses",
            "Submit transfers outside of a capture.",
        ),
        row_alignment=supported(_alignment(spec)),
        strided_copy=supported(),
        token_granular=token_granular(spec),
        served_pairs=supported(SERVED_PAIRS),
    )


def _index_places(kernels: bool) -> IndexPlaces:
    """Copies read indices on the CPU, under either io_backend; kernels read them on the device."""
    copies = {(way, io, IndexPlace.CPU) for way in DIRECTIONS for io in IO_BACKENDS}
    return frozenset(copies | {(way, "kernel", IndexPlace.DEVICE) for way in DIRECTIONS if kernels})


def _alignment(spec: PoolSpec) -> int:
    common = math.gcd(*(buffer.row_bytes for buffer in spec.buffers))
    return common & -common


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
