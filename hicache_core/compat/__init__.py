"""The solver: whether platform, io_backend, layout and pools work together, and which way each pool moves.

Pure functions over facts and declarations; nothing here looks at a machine or imports torch.
"""

from hicache_core.compat.answer import Answer, Combination, Outcome, Violation
from hicache_core.compat.paths import SERVED
from hicache_core.compat.plan import (
    DEFAULT_RING_BYTES,
    Choice,
    Condition,
    Member,
    Path,
    Plan,
    PoolPlan,
    Query,
)
from hicache_core.compat.rules import RULES
from hicache_core.compat.solver import answer, nearest, solve, violations

__all__ = [
    "DEFAULT_RING_BYTES",
    "RULES",
    "SERVED",
    "Answer",
    "Choice",
    "Combination",
    "Condition",
    "Member",
    "Outcome",
    "Path",
    "Plan",
    "PoolPlan",
    "Query",
    "Violation",
    "answer",
    "nearest",
    "solve",
    "violations",
]
