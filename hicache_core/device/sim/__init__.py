"""The simulator: a device runtime on the CPU with address spaces of its own, strict and asynchronous."""

from hicache_core.device.sim.faults import Faults
from hicache_core.device.sim.runtime import SimRuntime

__all__ = ["Faults", "SimRuntime"]
