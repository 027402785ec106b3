"""Trains one LoRA adapter on its own data, knowing nothing of any other."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from molora_jax.adapters import PROJECTIONS, Adapter, TrainableAdapter, init_adapter
from molora_jax.models import BaseModel, params_digest
from molora_jax.models.decoder import Decoder
from molora_jax.routing import SequenceRouter
from molora_jax.token_ids import check_token_ids
from molora_jax.training.adapter_checkpoint import (
    about_adapter,
    start_settings,
    stated_name,
    trainable_of,
)
from molora_jax.training.config import AdapterTrainConfig
from molora_jax.training.data import Batch, BatchOrder
from molora_jax.training.loop import fit
from molora_jax.training.losses import next_token_loss


def train_adapter(
    base: BaseModel,
    windows: Batch,
    config: AdapterTrainConfig,
    *,
    name: str,
    start: Adapter | None = None,
    run_dir: Path | str | None = None,
) -> tuple[Adapter, list[dict]]:
    """Minimises the next-token loss over `windows` and returns (adapter, one record a step).

    A and B are trained unfolded, so that Adam steps as PEFT's; the base is frozen, and its digest
    is compared before and after. `run_dir` as in `fit`: metrics.jsonl, checkpoints, resume.
    `start` is an adapter to go on from, with a new optimiser; rank, alpha and projections of
    `config` must be its own (`start_settings` tells them).

    Raises NonFiniteLossError where training diverges; no adapter comes out then. ValueError for a
    token id that the base does not have.

        >>> config = mj.AdapterTrainConfig(rank=2, steps=1)
        >>> adapter, records = mj.train_adapter(base, windows, config, name="mine")
        mine: trainable params: 8,192 ...
        >>> adapter.rank, len(records)
        (2, 1)
    """
    check_token_ids(
        windows.tokens, base.config.vocab_size, name=f"windows of adapter {name!r}: tokens"
    )
    base_name = stated_name(base.name)
    identity = {"base": base.digest}
    if start is None:
        first = init_adapter(
            base.config,
            rank=config.rank,
            alpha=config.alpha,
            projections=config.projections,
            rng=jax.random.key(config.seed),
            use_rslora=config.use_rslora,
        )
    else:
        first = _started(start, base, config)
        identity["start"] = start.digest
    print(f"{name}: {trainable_line(first, base.decoder)}", flush=True)
    order = BatchOrder(windows, config.batch_size * config.accumulate, config.seed)
    with kept_frozen(base):
        trained, records = fit(
            adapter_loss,
            first,
            order,
            config,
            frozen=base.decoder,
            name=name,
            run_dir=run_dir,
            identity=identity,
            about=about_adapter(first, name=name, base_name=base_name),
        )
    return trained.to_adapter(name, base_name=base_name), records


def _started(start: Adapter, base: BaseModel, config: AdapterTrainConfig) -> TrainableAdapter:
    """An adapter to go on from, held against the base and the settings of the run."""
    start.check_fits(base.config)
    start.check_finite()
    for field, own in start_settings(start).items():
        asked = getattr(config, field)
        if field == "projections":
            asked = tuple(name for name in PROJECTIONS if name in asked)
        if asked != own:
            raise ValueError(
                f"{type(config).__name__}.{field} is {asked!r}, but the adapter {start.name!r} to "
                f"start from has {own!r}: set it to that"
            )
    trainable = trainable_of(start)
    layers = len(next(iter(trainable.lora_a.values())))
    if layers != base.config.num_layers:
        raise ValueError(
            f"adapter {start.name!r} has {layers} layers, the base {base.config.num_layers}: "
            "training adapts a projection in every layer"
        )
    return trainable


def adapter_loss(
    adapter: TrainableAdapter, decoder: Decoder, batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
    """Summed next-token loss with the adapter on every real token."""
    router = SequenceRouter(jnp.zeros(batch.tokens.shape[0], jnp.int32))
    out = decoder(batch.tokens, batch.mask, adapters=adapter.stacks(), router=router)
    loss, weight = next_token_loss(decoder.logits(out.hidden), batch)
    return loss, weight, {}


def trainable_line(trainable: object, frozen: object) -> str:
    """PEFT's line: how many parameters are trained, of how many in all."""
    trained, rest = (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)) for tree in (trainable, frozen)
    )
    total = trained + rest
    return (
        f"trainable params: {trained:,} || all params: {total:,} || "
        f"trainable%: {100 * trained / total:.4f}"
    )


@contextlib.contextmanager
def kept_frozen(base: BaseModel) -> Iterator[None]:
    """Checks that what runs inside leaves every parameter of the base as it was."""
    before = params_digest(base.decoder)
    yield
    after = params_digest(base.decoder)
    if after != before:
        raise RuntimeError(
            f"base {base.name!r} changed in training (sha256 of its parameters {before[:12]} "
            f"before, {after[:12]} after): nothing trained against it is valid; load it anew"
        )
