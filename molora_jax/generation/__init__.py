"""Generation: prompts in, tokens out, for one batch or for many requests that share an engine."""

from molora_jax.generation.engine import Engine, QueueFull
from molora_jax.generation.generate import Generated, generate
from molora_jax.generation.profiles import Profile
from molora_jax.generation.request import Delta, Generation, Request
from molora_jax.generation.sampling import Sampling

__all__ = [
    "Delta",
    "Engine",
    "Generated",
    "Generation",
    "Profile",
    "QueueFull",
    "Request",
    "Sampling",
    "generate",
]
