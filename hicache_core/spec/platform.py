"""Facts about a device and its runtime, as values; nothing here looks at the machine.

Sources: registered memory and aliases as published with sglang#35233 (MI355X, ROCm 7.2), the WSL2 report of
the same fault on an RTX 5090, and measurements on an H200 (driver 580, CUDA 13.0).
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen
from attrs import validators as v

from hicache_core.errors import UnknownNameError
from hicache_core.spec.checks import name as a_name


class Alias(enum.Enum):
    """How the device address of registered host memory relates to its CPU address."""

    EQUAL = "equal"
    DISTINCT = "distinct"
    NONE = "none"
    """Nothing is registered: the framework pins, and kernels are given raw addresses."""


class CopyKind(enum.Enum):
    """Kinds of runtime copies; what they accept is a fact per kind."""

    ONE_D = "1d"
    TWO_D = "2d"
    BATCH = "batch"


def _kinds(kinds: Iterable[CopyKind]) -> frozenset[CopyKind]:
    return frozenset(kinds)


@frozen(kw_only=True)
class Platform:
    """A platform profile.

    Args:
        name: the name that operators give.
        vendor: ``sim``, ``cuda``, ``rocm``, ``npu``, ``musa`` or ``xpu``.
        alias: device address of registered memory against its CPU address.
        copy_accepts_host_address: kinds of copy that take the CPU address of registered memory; the others
            need its alias.
        relays_out_backups: whether a staged backup goes through a relayout in the device's ring (else by
            strided copies), where rows and kernels allow either.
        kernel_loads_page_first: whether page_first loads go through a kernel (else through runtime copies).
        kernel_layer_first: whether kernel + layer_first is served without asking.
        staged_required: whether a backup under kernel + page_first must be staged.
        has_kernels: whether there are kernels for it.
        variants_of: the platform whose variants of models exist here too; empty for its own name only.
    """

    name: str = field(validator=a_name())
    vendor: str = field(validator=a_name())
    alias: Alias = field(validator=v.instance_of(Alias))
    copy_accepts_host_address: frozenset[CopyKind] = field(default=frozenset(CopyKind), converter=_kinds)
    relays_out_backups: bool = field(default=True, validator=v.instance_of(bool))
    kernel_loads_page_first: bool = field(default=True, validator=v.instance_of(bool))
    kernel_layer_first: bool = field(default=True, validator=v.instance_of(bool))
    staged_required: bool = field(default=False, validator=v.instance_of(bool))
    has_kernels: bool = field(default=True, validator=v.instance_of(bool))
    variants_of: str = field(default="", validator=v.instance_of(str))

    @property
    def copies_take_host(self) -> bool:
        """Whether each kind of copy that carries rows takes the CPU address of registered memory."""
        return {CopyKind.TWO_D, CopyKind.BATCH} <= self.copy_accepts_host_address

    @property
    def variant_names(self) -> tuple[str, ...]:
        """The names under which variants of models list this platform."""
        return (self.name, self.variants_of) if self.variants_of else (self.name,)

    @staticmethod
    def probe() -> Platform:
        """The facts of the machine at hand, asked of its runtime and of bytes that it moves.

        Takes torch, and starts the device where there is one; without one the answer is ``cpu-sim``.

        Raises:
            DeviceError: there is a device, and its runtime fails.
        """
        module: Any = importlib.import_module("hicache_core.device.probe")
        probed: Platform = module.probe_platform()
        return probed


def _rocm(name: str, alias: Alias) -> Platform:
    return Platform(
        name=name,
        vendor="rocm",
        alias=alias,
        kernel_loads_page_first=False,
        kernel_layer_first=False,
        staged_required=True,
    )


def _cuda(name: str, alias: Alias, takes_host: Iterable[CopyKind] = tuple(CopyKind)) -> Platform:
    # Strided copies by the copy engine were the fastest in nearly every cell on an H200, both ways.
    return Platform(
        name=name,
        vendor="cuda",
        alias=alias,
        copy_accepts_host_address=takes_host,
        relays_out_backups=False,
        kernel_loads_page_first=False,
    )


def _framework_pinned(vendor: str) -> Platform:
    return Platform(name=vendor, vendor=vendor, alias=Alias.NONE, has_kernels=False)


PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform(name="cpu-sim", vendor="sim", alias=Alias.EQUAL),
        _cuda("cuda", Alias.EQUAL),
        _cuda("cuda-wsl2", Alias.DISTINCT, (CopyKind.ONE_D, CopyKind.TWO_D)),
        _rocm("rocm", Alias.EQUAL),
        _rocm("rocm-mi355x", Alias.DISTINCT),
        _framework_pinned("npu"),
        _framework_pinned("musa"),
        _framework_pinned("xpu"),
    )
}


DEVICES = ("sim", "cuda", "hip")
"""Device runtimes that the core brings; ``sim`` simulates the facts of any platform."""


def platform_named(name: str, platforms: Mapping[str, Platform] = PLATFORMS) -> Platform:
    """The profile of that name; raises UnknownNameError listing the names that exist.

    Args:
        name: name of a profile.
        platforms: the profiles that there are: those of the core, or with those of plugins,
            ``registry.platforms``.
    """
    try:
        return platforms[name]
    except KeyError:
        raise UnknownNameError(
            who="platform",
            got=repr(name),
            expected=f"one of {', '.join(platforms)}",
            remedy="Give one of these with --platform.",
        ) from None
