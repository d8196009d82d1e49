"""Models as data: the pools of a model, their families and figures, and where each figure is from."""

from hicache_core.models.entries import Figure, Model, PoolEntry, Variant
from hicache_core.models.loader import load_model, model_names

__all__ = ["Figure", "Model", "PoolEntry", "Variant", "load_model", "model_names"]
