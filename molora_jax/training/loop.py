"""The training loop: any loss over any small trainable tree, with a frozen tree beside it."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from molora_jax.display.progress import Progress
from molora_jax.models.digest import params_digest
from molora_jax.parallel import (
    check_rows,
    check_same,
    computing,
    current_mesh,
    place,
    place_rows,
    whole,
)
from molora_jax.parallel.local import constrain, constrain_tree
from molora_jax.training.config import TrainConfig
from molora_jax.training.data import Batch
from molora_jax.training.losses import mean_or_zero
from molora_jax.training.run_folder import RunFolder, flat, same_run_of

# loss_fn(params, frozen, batch) -> (Σ w·loss, Σ w, {name: sum}). The sums of the third are added
# over the micro-batches of a step. It is a static argument of the compiled step: give a function
# of a module or a frozen dataclass with __call__, so that equal ones share one compilation.
LossFn = Callable[[Any, Any, Batch], tuple[Array, Array, dict[str, Array]]]


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient became NaN or infinite: the run stopped and exports nothing."""


def fit(
    loss_fn: LossFn,
    params: Any,
    batches: Callable[[int], Batch],
    config: TrainConfig,
    *,
    frozen: Any,
    name: str = "train",
    run_dir: Path | str | None = None,
    identity: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
    summarise: Callable[[dict[str, np.ndarray]], dict[str, Any]] | None = None,
    measure: Callable[[int, Any], dict[str, Any]] | None = None,
) -> tuple[Any, list[dict]]:
    """Minimises Σ w·loss / Σ w over `params` with AdamW and returns (params, one record a step).

    batches    step → a batch of batch_size · accumulate rows; called again for the same step it
               must return the same rows (BatchOrder does). Its `windows`, or without that the
               batch of step 0, tell whether a run to be resumed had the same data
    frozen     what the loss reads and nobody changes: neither donated nor in the optimiser
    run_dir    receives metrics.jsonl and, with config.checkpoint_every, checkpoints/, which are
               written beside the steps that follow. A folder that holds a checkpoint of the same
               run is resumed, with the numbers of a run that was never stopped; one of another run
               is refused, as is one that another process trains in
    identity   what else makes a run the same one (digests of base and adapters)
    about      what its checkpoints say of what they hold, any JSON object
    summarise  the loss function's summed third result → what the record of the step says of it.
               One that remembers earlier steps has `state()`, any JSON object for the checkpoint,
               and `restore(state)`
    measure    (steps done, params) → what the record of the last of them says of held-out data;
               asked after every step, so it answers {} where nothing is due

    Under `parallel.use_mesh` rows, parameters and optimiser are split over the mesh, and the frozen
    tree too; what is returned lies whole on this process again.

    Raises NonFiniteLossError as soon as a loss or gradient is not finite, OSError where a
    checkpoint could not be written: at the next one or at the end.
    """
    run, mesh = None, current_mesh()

    def same_run():
        windows = getattr(batches, "windows", None)
        data = batches(0) if windows is None else windows
        return same_run_of(config, data=data, identity=identity or {})

    if mesh is not None:
        check_same(
            "training", lambda: flat(same_run()) | {"what is trained": params_digest(params)}
        )
    if run_dir is not None:
        run = RunFolder(Path(run_dir), config, same_run=same_run(), about=about or {})
    check_rows(config.batch_size, mesh, what="rows (batch_size)")
    frozen = place(frozen, mesh, title="frozen")
    # Copies, because the step is given its inputs' memory and the caller keeps the originals.
    params = jax.tree.map(jnp.array, place(params, mesh))
    with computing(mesh):
        moments = _adamw(config.clip, config.weight_decay).init if mesh is None else _first_moments
        state = {"params": params, "optimiser": moments(params)}
    state = place(state, mesh, title="trained, with optimiser")
    del params  # of a mesh one device would hold a second copy
    first, history = 0, list[dict]()
    clock = time.perf_counter()

    def report(step, measured, found, progress):
        nonlocal clock
        measured = jax.device_get(measured)
        now = time.perf_counter()
        record = {
            "step": step,
            "loss": float(measured["loss"]),
            "lr": config.lr_at(step),
            "grad_norm": float(measured["grad_norm"]),
            "tokens": int(measured["tokens"]),
            "tokens_per_s": round(float(measured["tokens"]) / (now - clock), 2),
            **(summarise(measured["sums"]) if summarise is not None else {}),
            **found,
        }
        clock = now
        if run is not None:
            run.log(record)
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            raise NonFiniteLossError(_non_finite_message(name, record, history))
        history.append(record)
        progress.update(f"loss {record['loss']:.4f}  {record['tokens_per_s']:.0f} tokens/s")

    with run if run is not None else contextlib.nullcontext():
        if run is not None:
            resumed = run.resume(state)
            first, state, history = resumed.step, resumed.state, resumed.records
            if resumed.summary is not None:
                summarise.restore(resumed.summary)  # type: ignore[union-attr]
        with Progress(name, config.steps, start=first, lasting=True) as progress:
            waiting = None
            for step in range(first, config.steps):
                rows = place_rows(_micro_batches(batches(step), config), mesh, axis=1)
                with computing(mesh):
                    state, measured = _train_step(
                        state,
                        frozen,
                        rows,
                        np.float32(config.lr_at(step)),
                        np.float32(config.clip),
                        np.float32(config.weight_decay),
                        loss_fn=loss_fn,
                    )
                # The record of the step before is read while this one computes.
                if waiting is not None:
                    report(*waiting, progress)
                found = {} if measure is None else measure(step + 1, whole(state["params"], mesh))
                waiting = (step, measured, found)
                if run is not None and run.is_due(step):
                    report(*waiting, progress)
                    waiting = None
                    summary = getattr(summarise, "state", lambda: None)()
                    run.save(step + 1, state, summary=summary)
            if waiting is not None:
                report(*waiting, progress)
    return whole(state["params"], mesh), history


def _micro_batches(batch: Batch, config: TrainConfig) -> Batch:
    """(accumulate · rows, S) → (accumulate, rows, S)."""
    if batch.num_rows != config.accumulate * config.batch_size:
        raise ValueError(
            f"batches gave {batch.num_rows} rows for a step, expected batch_size "
            f"{config.batch_size} × accumulate {config.accumulate}"
        )
    shape = (config.accumulate, config.batch_size)
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, -1), batch)


def _adamw(clip: Any, weight_decay: Any) -> optax.GradientTransformation:
    """AdamW up to its learning rate. The numbers are inputs of the step: one compile for all."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(),
        optax.add_decayed_weights(weight_decay),
    )


@jax.jit
def _first_moments(params: Any) -> Any:
    # Of a mesh each device makes its part alone. The two numbers are not in the state.
    return constrain_tree(_adamw(1.0, 0.0).init(params))


@functools.partial(jax.jit, static_argnames=("loss_fn",), donate_argnames=("state",))
def _train_step(
    state: dict,
    frozen: Any,
    micro_batches: Batch,
    lr: Float[Any, ""],
    clip: Float[Any, ""],
    weight_decay: Float[Any, ""],
    *,
    loss_fn: LossFn,
) -> tuple[dict, dict]:
    """One optimiser step from micro-batches with a leading axis.

    Gradients of sums are added and divided once by all target weights, so that the split into
    micro-batches does not change the step.
    """
    params = state["params"]

    def summed(params, batch):
        loss, weight, sums = loss_fn(params, frozen, batch)
        return loss, (weight, sums)

    def gradient(batch):
        (loss, (weight, sums)), grads = jax.value_and_grad(summed, has_aux=True)(params, batch)
        return {"loss": loss, "weight": weight, "sums": sums, "grads": grads}

    if micro_batches.tokens.shape[0] == 1:
        total = gradient(jax.tree.map(lambda leaf: leaf[0], micro_batches))
    else:
        shape = jax.eval_shape(gradient, jax.tree.map(lambda leaf: leaf[0], micro_batches))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)

        def add(total, batch):
            return jax.tree.map(jnp.add, total, gradient(batch)), None

        total, _ = jax.lax.scan(add, zeros, micro_batches)

    grads = jax.tree.map(lambda grad: mean_or_zero(grad, total["weight"]), total["grads"])
    updates, optimiser = _adamw(clip, weight_decay).update(grads, state["optimiser"], params)
    params = jax.tree.map(lambda p, u: p - (lr * u).astype(p.dtype), params, updates)
    measured = {
        "loss": mean_or_zero(total["loss"], total["weight"]),
        "grad_norm": optax.tree.norm(grads),
        "tokens": total["weight"],
        "sums": total["sums"],
    }
    state = constrain_tree({"params": params, "optimiser": optimiser})
    return state, jax.tree.map(constrain, measured)


def _non_finite_message(name: str, record: dict, history: list[dict]) -> str:
    step, loss, norm = record["step"], record["loss"], record["grad_norm"]
    before = "It is the first step: the base, the adapters or the data are at fault."
    if history:
        last = history[-1]
        before = (
            f"Step {last['step']} was finite (loss {last['loss']:.4f}, gradient norm "
            f"{last['grad_norm']:.4g}), so the parameters broke between steps {last['step']} and "
            f"{step}. Lower lr (here {record['lr']:.3g}) or clip."
        )
    return (
        f"{name}: loss {loss} with gradient norm {norm} at step {step}. {before} "
        "Nothing was exported."
    )
