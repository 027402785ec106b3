"""Router losses over real tokens: load balance, z-loss, and the adapter's-own-data label.

All take logits of one decision (N, C) or of every layer (L, N, C), return the mean over layers, and
leave out padding and tokens whose logits are not finite. A batch without a token to count gives 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from molora_jax.routing.select import (
    choose_columns,
    probabilities,
    resident_columns,
    usable_tokens,
)


def balance_loss(
    logits: Float[Array, "*L N C"],
    mask: Bool[Array, " N"],
    *,
    top_k: int,
    column_to_slot: Int[Array, " C"] | None = None,
) -> Float[Array, ""]:
    """K·Σ_c f_c·p_c, the load-balancing loss of the Switch Transformer (arXiv 2101.03961, eq. 4–6).

    f_c is the share of the top_k choices that fell on column c, p_c its mean probability under the
    dense softmax, K the number of resident columns; 1 when balanced. Only p has a gradient. Give
    the top_k of evaluation also while training densely: with top_k = K every f_c is 1/K, and the
    loss is 1 whatever the router does.
    """
    resident = resident_columns(column_to_slot, logits.shape[-1])

    def one_layer(logits):
        usable = usable_tokens(logits, mask)
        columns, chosen = choose_columns(logits, usable, resident, top_k=top_k)
        one_hot = jax.nn.one_hot(columns, logits.shape[-1], dtype=jnp.float32)
        counts = jnp.where(chosen[:, :, None], one_hot, 0.0).sum(axis=(0, 1))
        f = counts / jnp.maximum(counts.sum(), 1.0)
        p = _mean(probabilities(_safe(logits, usable), resident), usable)
        return resident.sum().astype(jnp.float32) * jnp.sum(f * p)

    return _over_layers(one_layer, logits)


def z_loss(logits: Float[Array, "*L N C"], mask: Bool[Array, " N"]) -> Float[Array, ""]:
    """Mean (log Σ_c exp logit_c)², which keeps logits small (ST-MoE, arXiv 2202.08906, eq. 5)."""

    def one_layer(logits):
        usable = usable_tokens(logits, mask)
        return _mean(jnp.square(jax.nn.logsumexp(_safe(logits, usable), axis=-1)), usable)

    return _over_layers(one_layer, logits)


def label_loss(
    logits: Float[Array, "*L N C"], mask: Bool[Array, " N"], labels: Int[Array, " N"]
) -> Float[Array, ""]:
    """Mean cross-entropy in nats; the label is the adapter whose own data a token came from.

    labels  (N,) column, −1 where unknown: such tokens are left out. Whoever uses this loss says so
            beside the result: the router was told the adapter's-own-data label.
    """
    C = logits.shape[-1]

    def one_layer(logits):
        counted = usable_tokens(logits, mask) & (labels >= 0) & (labels < C)
        log_p = jax.nn.log_softmax(_safe(logits, counted), axis=-1)
        at_label = jnp.take_along_axis(log_p, jnp.clip(labels, 0, C - 1)[:, None], axis=-1)[:, 0]
        return _mean(-at_label, counted)

    return _over_layers(one_layer, logits)


def _over_layers(one_layer: Callable, logits: Float[Array, "*L N C"]) -> Float[Array, ""]:
    return one_layer(logits) if logits.ndim == 2 else jax.vmap(one_layer)(logits).mean()


def _safe(logits: Float[Array, "N C"], counted: Bool[Array, " N"]) -> Float[Array, "N C"]:
    # Before any function of it: a NaN that is masked afterwards is still NaN in the gradient.
    return jnp.where(counted[:, None], logits.astype(jnp.float32), 0.0)


def _mean(values: Float[Array, "N *c"], counted: Bool[Array, " N"]) -> Float[Array, "*c"]:
    weight = counted.astype(jnp.float32)
    shaped = weight.reshape((-1,) + (1,) * (values.ndim - 1))
    return (values * shaped).sum(axis=0) / jnp.maximum(weight.sum(), 1.0)
