"""Next-token negative log-likelihood, as sums, so that batches of any size and padding add up."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from molora_jax.training.data import Batch


def token_nll(logits: Float[Array, "B S V"], tokens: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """-log p(tokens[:, i + 1] | tokens[:, : i + 1]) in nats at i, float32; last column 0."""
    logits = logits.astype(jnp.float32)
    targets = jnp.roll(tokens, -1, axis=1)
    nll = jax.nn.logsumexp(logits, axis=-1) - _at_target(logits, targets)
    return nll.at[:, -1].set(0.0)


def _at_target(logits, targets):
    # A comparison and not a gather: its gradient fuses into the softmax's, where a gather's is a
    # scatter into a second array of B·S·V numbers.
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.sum(jnp.where(column == targets[..., None], logits, 0.0), axis=-1)


def next_token_loss(
    logits: Float[Array, "B S V"], batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Σ w·nll and Σ w over the targets of `batch`: (0, 0) where there is none, never NaN."""
    nll = token_nll(logits, batch.tokens)
    counted = jnp.where(batch.weights > 0, nll * batch.weights, 0.0)
    return counted.sum(), batch.weights.sum()


def mean_or_zero(total: Float[Array, "*n"], weight: Float[Array, ""]) -> Float[Array, "*n"]:
    """total / weight, 0 where weight is 0."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)
