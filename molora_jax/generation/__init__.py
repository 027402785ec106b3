"""KV-cache generation, greedy and sampled."""

from molora_jax.generation.generate import Generated, generate
from molora_jax.generation.sampling import Sampling

__all__ = ["Generated", "Sampling", "generate"]
