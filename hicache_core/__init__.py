"""hicache: the second tier of a hierarchical KV cache, with host pools as plugins.

The names below are handed out on first use, so that declarations, models and checks need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_core.controller import Controller, ControllerConfig
    from hicache_core.device.sim import SimRuntime
    from hicache_core.device_pool import DevicePool
    from hicache_core.models import load_model, model_names
    from hicache_core.plugins import load_plugins
    from hicache_core.spec import platform_named

__version__ = "0.1.0"

_HOMES = {
    "Controller": "hicache_core.controller",
    "ControllerConfig": "hicache_core.controller",
    "DevicePool": "hicache_core.device_pool",
    "SimRuntime": "hicache_core.device.sim",
    "load_model": "hicache_core.models",
    "load_plugins": "hicache_core.plugins",
    "model_names": "hicache_core.models",
    "platform_named": "hicache_core.spec",
}

__all__ = [
    "Controller",
    "ControllerConfig",
    "DevicePool",
    "SimRuntime",
    "load_model",
    "load_plugins",
    "model_names",
    "platform_named",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hicache_core' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
