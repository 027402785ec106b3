"""Routers: which adapters each token uses, with their losses, metrics and closed-form start.

Every router is a Flax module with the attributes `decision` and `top_k` and the call
(token_ids, hidden, mask, state, column_to_slot) → (Routing, logits | None, state).
"""

from molora_jax.routing.control import KEEP, ControlTokenRouter
from molora_jax.routing.fixed import FixedRouter, RouterData, SequenceRouter, VocabularyRouter
from molora_jax.routing.learned import LearnedRouter
from molora_jax.routing.linear import PrototypeRouter, StatisticsRouter
from molora_jax.routing.modulated import ModulatedRouter
from molora_jax.routing.registry import (
    ROUTERS,
    Router,
    build_router,
    router_arrays,
    router_config,
)
from molora_jax.routing.select import count_nonfinite, rms_normalize, select
from molora_jax.routing.statistics import RouterStatistics
from molora_jax.routing.statistics_file import (
    PackedStatistics,
    load_statistics,
    save_statistics,
)
from pallas_kernels import Routing

__all__ = [
    "KEEP",
    "ROUTERS",
    "ControlTokenRouter",
    "FixedRouter",
    "LearnedRouter",
    "ModulatedRouter",
    "PackedStatistics",
    "PrototypeRouter",
    "Router",
    "RouterData",
    "RouterStatistics",
    "Routing",
    "SequenceRouter",
    "StatisticsRouter",
    "VocabularyRouter",
    "build_router",
    "count_nonfinite",
    "load_statistics",
    "rms_normalize",
    "router_arrays",
    "router_config",
    "save_statistics",
    "select",
]
