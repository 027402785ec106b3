"""The plan on paper: memory, time and traffic of a step on machines that are not here."""

from molora_jax.parallel.plan.choose import Choice, Plan, choose, plan
from molora_jax.parallel.plan.cluster import H200_NODES, Cluster
from molora_jax.parallel.plan.workload import Workload

__all__ = ["H200_NODES", "Choice", "Cluster", "Plan", "Workload", "choose", "plan"]
