"""Models as data: the pools of a model, their families and figures, and where each figure is from."""

from hicache_core.models.entries import Figure, Model, PoolEntry, Variant
from hicache_core.models.loader import load_model, model_names
from hicache_core.models.pools_file import HandMadePool, load_pools

__all__ = [
    "Figure",
    "HandMadePool",
    "Model",
    "PoolEntry",
    "Variant",
    "load_model",
    "load_pools",
    "model_names",
]
