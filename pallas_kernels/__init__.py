"""Per-token low-rank updates over a bank of adapters: one operation, several ways to run it."""

from pallas_kernels.api import lora_delta, lora_deltas, make_plan
from pallas_kernels.shapes import ProblemSize
from pallas_kernels.strategy import explain
from pallas_kernels.types import DispatchPlan, Routing

__all__ = [
    "DispatchPlan",
    "ProblemSize",
    "Routing",
    "explain",
    "lora_delta",
    "lora_deltas",
    "make_plan",
]
