"""Where a router's gradient training starts: at random, or solved from the inputs of the layers.

The solved start reads which adapter's own data a token came from.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from molora_jax.models import ModelConfig
from molora_jax.parallel import computing, current_mesh, fetch, place
from molora_jax.routing import LearnedRouter
from molora_jax.routing.closed_form import calibrate, select_tokens, solve_ridge
from molora_jax.routing.fit import fit_on_features
from molora_jax.routing.statistics import RouterStatistics
from molora_jax.training.config import RouterTrainConfig
from molora_jax.training.data import Batch
from molora_jax.training.evaluate import base_arm, oracle_arm

ROWS_AT_ONCE = 8


def start_router(
    model: ModelConfig,
    windows: Batch,
    config: RouterTrainConfig,
    *,
    num_columns: int,
    frozen: dict[str, Any],
) -> LearnedRouter:
    """The router before the first gradient step; `windows` are labelled.

    The last sixth of the rows is left out of the regression and sets its temperature.
    """
    shared = config.after_layer is not None
    layers = 1 if shared else model.num_layers
    settings: dict[str, Any] = {"top_k": config.top_k, "width": config.width, "gate": config.gate}
    rngs = nnx.Rngs(config.seed)
    if config.start == "random":
        where = {"after_layer": config.after_layer} if shared else {"num_layers": layers}
        router = LearnedRouter(model.hidden_size, num_columns, **settings, **where, rngs=rngs)
        if not config.feature_steps:
            return router

    rows, unseen_from = _drawn_rows(windows, config, num_columns)
    statistics = [RouterStatistics(layers, model.hidden_size) for _ in range(num_columns)]
    unseen, stored = [], []
    for first, batch, inputs in layer_inputs(windows.rows(rows), config, frozen):
        is_unseen = first + np.arange(batch.num_rows) >= unseen_from
        seen = batch.mask & ~is_unseen[:, None]
        for column in np.unique(batch.labels[seen & (batch.labels >= 0)]):
            statistics[column].add(inputs, seen & (batch.labels == column))
        unseen.append(select_tokens(inputs, batch.labels, batch.mask & is_unseen[:, None]))
        if config.feature_steps:
            stored.append(select_tokens(inputs, batch.labels, batch.mask))
    if config.start == "ridge":
        weights, bias = solve_ridge(statistics, ridge=config.ridge)
        weights, bias, _ = calibrate(weights, bias, *_together(unseen))
        if shared:
            weights, bias, settings["after_layer"] = weights[0], bias[0], config.after_layer
        router = LearnedRouter.from_linear(weights, bias, **settings, rngs=rngs)
    if config.feature_steps:
        features, labels = _together(stored)
        router, losses = fit_on_features(
            router,
            jnp.asarray(features[0] if shared else features),
            jnp.asarray(labels),
            steps=config.feature_steps,
            learning_rate=config.lr,
            seed=config.seed,
        )
        if not np.isfinite(np.asarray(losses)).all():
            raise ValueError(f"the {config.feature_steps} feature_steps diverged: lower lr")
    return router


def _drawn_rows(
    windows: Batch, config: RouterTrainConfig, num_columns: int
) -> tuple[Int[np.ndarray, " n"], int]:
    """The rows to read, and where among them those begin that the regression does not see.

    Rows are drawn evenly over all, but of each adapter the regression sees at least half of an
    equal share where there are so many: one with little data would be missed otherwise.
    """
    order = np.random.default_rng(config.seed).permutation(windows.num_rows)
    count = min(config.start_rows, len(order))
    seen = count - max(count // 6, 1)
    least = max(seen // (2 * num_columns), 1)
    labels = windows.labels[order]
    needed = [np.flatnonzero((labels == c).any(axis=1))[:least] for c in range(num_columns)]
    first = np.unique(np.concatenate(needed))
    others = np.setdiff1d(np.arange(len(order)), first)
    filling = max(seen - len(first), 0)
    chosen = np.sort(np.concatenate([first, others[:filling]]))
    unseen = others[filling : filling + count - seen]
    if not len(unseen):
        raise ValueError(
            f"{len(order)} rows for {num_columns} adapters leave none to set how sharp the gates "
            "are: give more data or shorter windows"
        )
    return order[np.concatenate([chosen, unseen])], len(chosen)


def layer_inputs(
    windows: Batch, config: RouterTrainConfig, frozen: dict[str, Any]
) -> Iterator[tuple[int, Batch, Float[np.ndarray, "l B S D"]]]:
    """(first row, batch, what the router of each layer reads of it), a few rows at a time."""
    after = config.after_layer
    mesh = current_mesh()
    frozen = place(frozen, mesh)
    arm = base_arm if after is not None or config.start_states == "base" else oracle_arm
    for first in range(0, windows.num_rows, ROWS_AT_ONCE):
        batch = windows.rows(slice(first, first + ROWS_AT_ONCE)).filled(ROWS_AT_ONCE)
        with computing(mesh):
            inputs = fetch(_layer_inputs(frozen, batch, place(arm(batch), mesh)))
        yield first, batch, inputs if after is None else inputs[after + 1][None]


@jax.jit
def _layer_inputs(frozen: dict[str, Any], batch: Batch, router: nnx.Module) -> Any:
    out = frozen["decoder"](
        batch.tokens,
        batch.mask,
        adapters=frozen["stacks"],
        router=router,
        column_to_slot=frozen["column_to_slot"],
        return_layer_inputs=True,
    )
    return out.layer_inputs


def _together(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    features, labels = zip(*parts, strict=True)
    return np.concatenate(features, axis=1), np.concatenate(labels)
