"""Trains a router over a bank of adapters; base and adapters are frozen.

Two phases, each of which can be left out. The closed-form start solves a ridge regression from the
layer inputs to the adapter whose own data a token came from. The gradient steps then minimise the
language-model loss of the routed model, densely (softmax over all columns, so that each has a
gradient), with the label's cross-entropy and the usual router losses beside it. Top-k comes at
evaluation.
"""

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jaxtyping import Array, Bool, Float

from molora_jax.adapters import AdapterBank
from molora_jax.models import BaseModel
from molora_jax.routing import LearnedRouter, count_nonfinite
from molora_jax.routing.losses import balance_loss, label_loss, z_loss
from molora_jax.routing.metrics import collapse_warning
from molora_jax.routing.select import check_choice, usable_tokens
from molora_jax.token_ids import check_token_ids
from molora_jax.training.adapter import kept_frozen, trainable_line
from molora_jax.training.adapter_checkpoint import stated_name
from molora_jax.training.anneal import AnnealedBatch, AnnealedOrder, tempered
from molora_jax.training.config import RouterTrainConfig
from molora_jax.training.data import (
    Batch,
    BatchOrder,
    concatenate,
    joined_windows,
)
from molora_jax.training.loop import fit
from molora_jax.training.losses import next_token_loss
from molora_jax.training.router_start import start_router


@dataclass(frozen=True, kw_only=True)
class RouterTraining:
    """What train_router did.

    records    one a gradient step, as in metrics.jsonl
    digests    the adapter of each router column, which Composition keeps with the router
    label_use  where the own-data label was used, for whoever reports the result
    """

    records: list[dict]
    digests: tuple[str, ...]
    label_use: str


def train_router(
    base: BaseModel,
    bank: AdapterBank,
    data: Sequence[Batch],
    config: RouterTrainConfig,
    *,
    run_dir: Path | str | None = None,
) -> tuple[LearnedRouter, RouterTraining]:
    """A router whose columns are the bank's adapters, in the order of `bank.list()`.

    data     windows of each adapter's own data, in the same order
    run_dir  as in `fit`: metrics.jsonl, checkpoints, resume

    Raises ValueError for a bank of one adapter (it needs no router), for adapters that are all
    untrained (B = 0: the gradient of the router is then exactly 0), for a top_k, width or
    after_layer that does not fit, and for a token id that the base does not have;
    NonFiniteLossError where training diverges.

        >>> config = mj.RouterTrainConfig(steps=0, start_rows=6, width=4, top_k=1)
        >>> router, told = mj.train_router(base, bank, [windows, windows], config)
        router: code, math; own-data label used: closed-form start
        router: trainable params: ...
        >>> mj.Composition.of(base, bank, router).column_digests == told.digests
        True
    """
    residents = bank.list()
    _check(residents, data, config, base)
    digests = tuple(each.digest for each in residents)
    names = [each.name for each in residents]
    frozen = {
        "decoder": base.decoder,
        "stacks": bank.stacks,
        "column_to_slot": jnp.asarray(bank.column_to_slot(digests)),
    }
    windows = labelled_windows(
        data, joined_share=config.joined_share, split=config.joined_split, seed=config.seed
    )
    print(f"router: {', '.join(names)}; {config.label_use()}", flush=True)
    with kept_frozen(base):
        router = start_router(base.config, windows, config, num_columns=len(digests), frozen=frozen)
        training_k = config.top_k if config.gate == "unit" else len(digests)
        graph, params, rest = nnx.split(  # type: ignore[misc]
            router.with_top_k(training_k), nnx.Param, ...
        )
        print(f"router: {trainable_line(params, (base.decoder, bank.stacks))}", flush=True)
        coefs = {
            "label": np.float32(config.label_coef),
            "balance": np.float32(config.balance_coef),
            "z": np.float32(config.z_coef),
        }
        loss: Any = RouterLoss(graph=graph, top_k=config.top_k)
        rows = BatchOrder(windows, config.batch_size * config.accumulate, config.seed)
        params, records = fit(
            loss,
            params,
            AnnealedOrder(rows, config),
            config,
            frozen=frozen | {"router_data": rest, "coefs": coefs},
            name="router",
            run_dir=run_dir,
            identity={"base": base.digest, **dict(zip(names, digests, strict=True))},
            about={"kind": "router", "base_name": stated_name(base.name), "adapters": names},
            summarise=RouterMonitor(names, config.collapse_share),
        )
    router = nnx.merge(graph, params, rest).with_top_k(config.top_k)
    if config.steps:
        router = tempered(router, config.temperature_at(config.steps - 1))
    return router, RouterTraining(records=records, digests=digests, label_use=config.label_use())


def labelled_windows(
    data: Sequence[Batch], *, joined_share: float, split: Literal["half", "random"], seed: int
) -> Batch:
    """All own windows, labelled, and as many joined rows as make `joined_share` of all."""
    own = [windows.labelled(column) for column, windows in enumerate(data)]
    rows = sum(windows.num_rows for windows in own)
    count = round(rows * joined_share / (1 - joined_share))
    joined = [joined_windows(own, count, seed=seed, split=split)] if count else []
    return concatenate([*own, *joined])


@dataclass(frozen=True)
class RouterLoss:
    """Next-token loss of the routed model + coef · label, balance and z-loss, each a mean."""

    graph: Any
    top_k: int

    def __call__(
        self, params: Any, frozen: dict[str, Any], batch: AnnealedBatch
    ) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
        slots, mask = frozen["column_to_slot"], batch.mask.reshape(-1)
        router = nnx.merge(self.graph, params, frozen["router_data"])
        out = frozen["decoder"](
            batch.tokens,
            batch.mask,
            adapters=frozen["stacks"],
            router=tempered(router, batch.temperature[0, 0]),
            column_to_slot=slots,
        )
        language, weight = next_token_loss(frozen["decoder"].logits(out.hidden), batch)
        logits = out.router_logits
        parts = {
            "label": label_loss(logits, mask, batch.labels.reshape(-1)),
            "balance": balance_loss(logits, mask, top_k=self.top_k, column_to_slot=slots),
            "z": z_loss(logits, mask),
        }
        extra = sum(frozen["coefs"][name] * part for name, part in parts.items())
        # Sums, so that micro-batches add up: the means are weighed like the language loss.
        sums = {"weight": weight, "language": language}
        sums |= {name: part * weight for name, part in parts.items()}
        return language + extra * weight, weight, sums | routing_sums(logits, mask)


def routing_sums(logits: Float[Array, "l N C"], mask: Bool[Array, " N"]) -> dict[str, Array]:
    """Over real tokens: how many chose each column first, by layer; entropy; broken tokens."""
    usable = jax.vmap(usable_tokens, in_axes=(0, None))(logits, mask)
    safe = jnp.where(usable[..., None], logits, 0.0)
    first = jax.nn.one_hot(jnp.argmax(safe, axis=-1), logits.shape[-1])
    p = jax.nn.softmax(safe, axis=-1)
    entropy = -jnp.sum(p * jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny)), axis=-1)
    return {
        "usage": jnp.where(usable[..., None], first, 0.0).sum(axis=1),
        "entropy": jnp.where(usable, entropy, 0.0).sum(),
        "usable": usable.sum(),
        "nonfinite": count_nonfinite(logits, mask).sum(),
    }


class RouterMonitor:
    """Turns a step's sums into what metrics.jsonl says of the router, and warns of a collapse.

    The warning looks at the tokens of the last `steps` steps together, because the few rows of one
    step may well be of one domain. It is given once.
    """

    def __init__(self, names: Sequence[str], threshold: float, *, steps: int = 20):
        self.names, self.threshold = names, threshold
        self.recent: collections.deque[np.ndarray] = collections.deque(maxlen=steps)
        self.warned = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, for a resumed run to say what an unbroken one says."""
        return {"recent": [usage.tolist() for usage in self.recent], "warned": self.warned}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave."""
        self.recent.extend(np.asarray(usage, np.float32) for usage in state["recent"])
        self.warned = state["warned"]

    def __call__(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        self.recent.append(sums["usage"])
        recent = np.sum(list(self.recent), axis=0)
        recent = recent / np.maximum(recent.sum(axis=1, keepdims=True), 1)
        if not self.warned and len(self.recent) == self.recent.maxlen:
            warning = collapse_warning(recent, adapter_names=self.names, threshold=self.threshold)
            if warning is not None:
                logging.warning("%s", warning)
                self.warned = True
        weight = max(float(sums["weight"]), 1.0)
        return {
            **{
                f"{name}_loss": float(sums[name]) / weight
                for name in ("language", "label", "balance", "z")
            },
            "router_entropy": float(sums["entropy"]) / max(float(sums["usable"]), 1.0),
            "usage": [round(float(share), 4) for share in recent.mean(axis=0)],
            "max_share": float(recent.max()),
            "nonfinite_tokens": int(sums["nonfinite"]),
        }


def _check(residents, data: Sequence[Batch], config: RouterTrainConfig, base: BaseModel) -> None:
    names = [each.name for each in residents]
    if len(names) < 2:
        raise ValueError(
            f"the bank holds {names or 'no adapter'}: a router chooses among two or more. A single "
            "adapter needs none: route every token to it with SequenceRouter"
        )
    if len(data) != len(names):
        raise ValueError(
            f"{len(data)} data sets for {len(names)} adapters ({', '.join(names)}): give each "
            "adapter's own data, in the order of bank.list()"
        )
    for name, windows in zip(names, data, strict=True):
        check_token_ids(
            windows.tokens, base.config.vocab_size, name=f"data of adapter {name!r}: tokens"
        )
    check_choice(top_k=config.top_k, num_columns=len(names), gate=config.gate)
    layers = base.config.num_layers
    if config.after_layer is not None and not -1 <= config.after_layer < layers - 1:
        raise ValueError(
            f"after_layer {config.after_layer} leaves no layer to adapt: {base.name!r} has "
            f"{layers} layers, numbered from 0. Choose one of -1 (the embedding) to {layers - 2}, "
            "or None for a decision in every layer"
        )
    if config.start == "ridge" and config.width < 2 * len(names):
        raise ValueError(
            f"width {config.width} is too small for {len(names)} adapters: start='ridge' takes two "
            f"hidden units for each. Set width to {2 * len(names)} or more, or start='random'"
        )
    untrained = [
        each.name
        for each in residents
        if not any(pair.b.any() for pair in each.adapter.modules.values())
    ]
    if len(untrained) == len(names):
        raise ValueError(
            f"every adapter has B = 0 ({', '.join(names)}): each equals the base, so the gradient "
            "of the router would be exactly 0. Train the adapters first"
        )
    if untrained:
        logging.warning("untrained adapters (B = 0, equal to the base): %s", ", ".join(untrained))
