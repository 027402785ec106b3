"""From logits to the next token: greedy, or sampled with temperature, top-k and top-p."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep every token. Names as in transformers."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature}: expected 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: expected 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: expected more than 0, at most 1")


def sample(
    key: Array,
    logits: Float[Array, "B V"],
    temperature: Array | float,
    top_k: Array | int,
    top_p: Array | float,
) -> Int[Array, " B"]:
    """One token a row. The parameters are data, so that changing them compiles nothing.

    The most likely token always stays allowed; of equal logits the lower id wins, as in argmax.
    """
    V = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1) / jnp.maximum(temperature, 1e-6)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    rank = jnp.arange(V)[None]
    allowed = ((before < top_p) | (top_p >= 1)) & ((rank < top_k) | (top_k == 0)) | (rank == 0)
    drawn = jax.random.categorical(key, jnp.where(allowed, ranked, -jnp.inf), axis=-1)
    drawn = jnp.where(temperature > 0, drawn, 0)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
