"""From logits to the next token: greedy, or sampled with temperature, top-k and top-p."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MIN_TEMPERATURE = 1e-5  # logits over less would leave float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep every token. Names as in transformers.

    Temperatures between 0 and MIN_TEMPERATURE are refused.

        >>> mj.Sampling(temperature=0.7, top_p=0.9)
        Sampling(temperature=0.7, top_k=0, top_p=0.9)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature {self.temperature}: expected 0 (greedy) or >= {MIN_TEMPERATURE}"
            )
        if not isinstance(self.top_k, int) or not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k {self.top_k}: expected 0 (all tokens) to 2**31 - 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: expected more than 0, at most 1")


def sample(
    keys: Array,
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
) -> Int[Array, " B"]:
    """One token a row, by the row's own key (a `jax.random` key each) and parameters.

    The parameters are data, so that changing them compiles nothing; sorting and drawing are run
    only where some row asks for them, and what a row draws does not depend on its neighbours. The
    most likely token always stays allowed; of equal logits the lower id wins, as in argmax.
    """
    warm = temperature > 0
    restricted = warm & ((top_k > 0) | (top_p < 1))
    scaled = logits / jnp.where(warm, temperature, 1.0)[:, None]
    kept = jax.lax.cond(
        restricted.any(),
        lambda: jnp.where(allowed_tokens(scaled, top_k, top_p), scaled, -jnp.inf),
        lambda: scaled,
    )
    # Gumbel's way to draw: noise by token id, and the largest sum.
    noise = jax.lax.cond(
        warm.any(),
        lambda: jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys),
        lambda: jnp.zeros_like(logits),
    )
    chosen = jnp.argmax(jnp.where(warm[:, None], kept + noise, logits), axis=-1)
    return chosen.astype(jnp.int32)


def allowed_tokens(
    logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The top_k largest (0: all), and the fewest most likely whose probabilities reach top_p."""
    V = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probability = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    rank = jnp.arange(V)[None]
    within_p = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    within_k = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    allowed = (within_p & within_k) | (rank == 0)
    place = jnp.argsort(order, axis=-1)  # the rank of each token id
    return jnp.take_along_axis(allowed, place, axis=-1)
