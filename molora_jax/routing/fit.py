"""Trains routers on cached layer inputs, every layer at once, with no pass through the model.

The target is the adapter whose own data a token came from: whoever uses a router made here says
so beside the result.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from molora_jax.routing.learned import LearnedRouter


def fit_on_features(
    router: LearnedRouter,
    features: Float[Array, "*L M D"],
    labels: Int[Array, " M"],
    *,
    steps: int = 200,
    batch_size: int = 256,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> tuple[LearnedRouter, Float[Array, "steps *L"]]:
    """Adam on the cross-entropy of the router's logits against labels: (router, loss by step).

    Layers do not see each other, so one run fits them all. The learning rate falls by a cosine.

    features  (L, M, D) layer inputs of the same M real tokens, as `closed_form.select_tokens` gives
              them; (M, D), the output of layer `after_layer`, for a shared router
    labels    (M,) column 0..C−1 of the adapter whose own data a token came from
    """
    layers = () if router.decision == "shared" else (router.num_layers,)
    if features.shape != (*layers, labels.shape[0], router.d_model):
        raise ValueError(
            f"features has shape {features.shape}, expected "
            f"{(*layers, labels.shape[0], router.d_model)} from the router and {labels.shape[0]} "
            "labels"
        )
    low, high = int(jnp.min(labels)), int(jnp.max(labels))
    if low < 0 or high >= router.num_columns:
        raise ValueError(
            f"labels go from {low} to {high}, but the router has columns 0 to "
            f"{router.num_columns - 1}: leave out tokens without a label"
        )
    return _fit(
        router,
        jnp.asarray(features),
        jnp.asarray(labels, jnp.int32),
        jax.random.key(seed),
        steps=steps,
        batch_size=min(batch_size, labels.shape[0]),
        learning_rate=learning_rate,
    )


@functools.partial(jax.jit, static_argnames=("steps", "batch_size", "learning_rate"))
def _fit(
    router: LearnedRouter,
    features: Float[Array, "*L M D"],
    labels: Int[Array, " M"],
    key: Array,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
) -> tuple[LearnedRouter, Float[Array, "steps *L"]]:
    def loss_by_layer(params, batch, targets):
        module = nnx.merge(graph, params)
        if router.decision == "shared":
            logits = module.logits(batch)
        else:
            logits = jax.vmap(lambda one, x: one.logits(x))(module, batch)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        at_target = jnp.where(jnp.arange(log_p.shape[-1]) == targets[:, None], log_p, 0.0)
        loss = -at_target.sum(axis=-1).mean(axis=-1)
        # The sum over layers: each layer's gradient is that of its own loss.
        return loss.sum(), loss

    def step(carry, index):
        params, state = carry
        rows = jax.random.randint(jax.random.fold_in(key, index), (batch_size,), 0, labels.shape[0])
        batch, targets = jnp.take(features, rows, axis=-2), labels[rows]
        (_, loss), grads = jax.value_and_grad(loss_by_layer, has_aux=True)(params, batch, targets)
        updates, state = optimiser.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    optimiser = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))
    graph, params = nnx.split(router)
    (params, _), losses = jax.lax.scan(step, (params, optimiser.init(params)), jnp.arange(steps))
    return nnx.merge(graph, params), losses


def calibrate_column(
    router: LearnedRouter,
    features: Float[Array, "*L M D"],
    labels: Int[Array, " M"],
    *,
    steps: int = 200,
    learning_rate: float = 5e-2,
) -> LearnedRouter:
    """Sets scale and offset of the last column, and nothing else, on a few hundred tokens.

    For a column that `LearnedRouter.grown` added: its logit z becomes s·z + t with the s > 0 and t
    of each layer that have the least cross-entropy against the labels (by Adam; it is convex). The
    logits of the other columns stay.

    features, labels  as in `fit_on_features`; tokens of the new adapter and of the others
    """
    stacked = router.num_layers is not None
    modules = router if stacked else jax.tree.map(lambda leaf: leaf[None], router)
    rows = features if stacked else features[None]
    logits = jax.vmap(lambda one, x: one.logits(x))(modules, rows)
    scale, offset = _scale_and_offset(logits, labels, steps=steps, learning_rate=learning_rate)
    if not stacked:
        scale, offset = scale[0], offset[0]
    other = router.with_top_k(router.top_k)
    w_out, b_out = router.w_out[...], router.b_out[...]
    other.w_out = nnx.Param(w_out.at[..., -1].multiply(scale[..., None]))
    other.b_out = nnx.Param(b_out.at[..., -1].set(b_out[..., -1] * scale + offset))
    return other


@functools.partial(jax.jit, static_argnames=("steps", "learning_rate"))
def _scale_and_offset(
    logits: Float[Array, "L M C"], labels: Int[Array, " M"], *, steps: int, learning_rate: float
) -> tuple[Float[Array, " L"], Float[Array, " L"]]:
    def loss(params):
        moved = jnp.exp(params[0])[:, None] * logits[..., -1] + params[1][:, None]
        log_p = jax.nn.log_softmax(logits.at[..., -1].set(moved), axis=-1)
        chosen = jnp.arange(logits.shape[-1]) == labels[None, :, None]
        return -jnp.where(chosen, log_p, 0.0).sum(axis=-1).mean(axis=-1).sum()

    def step(carry, _):
        params, state = carry
        updates, state = optimiser.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    optimiser = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))
    params = (jnp.zeros(len(logits)), jnp.zeros(len(logits)))
    (params, _), _ = jax.lax.scan(step, (params, optimiser.init(params)), None, length=steps)
    return jnp.exp(params[0]), params[1]
