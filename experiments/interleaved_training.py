"""Trains the added vocabulary rows, and one adapter a modality, each on the loss of its own tokens.

A base that is frozen has never seen the added rows. They are trained once, with everything else as
it was, and are from then on a part of the base: the adapters know nothing of how they came.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from experiments.interleaved_data import GRID, PICTURE, Layout
from molora_jax.adapters import AdapterCard, init_adapter, save_adapter
from molora_jax.models import BaseModel
from molora_jax.models.extend import draw_rows, extend_vocabulary, old_rows, with_rows
from molora_jax.routing import FixedRouter
from molora_jax.training import AdapterTrainConfig, TrainConfig
from molora_jax.training.adapter import kept_frozen, trainable_line
from molora_jax.training.data import Batch, BatchOrder, make_batch
from molora_jax.training.loop import fit
from molora_jax.training.losses import next_token_loss


def windows_of(documents: Iterable[list[int]], *, rows: int, seq_len: int) -> Batch:
    """The first `rows` documents, a padded row each; ValueError where there are none."""
    taken = [document for document, _ in zip(documents, range(rows), strict=False)]
    if not taken:
        raise ValueError(f"no document fits seq_len {seq_len}: lengthen it")
    mask = np.arange(seq_len)[None] < np.array([len(each) for each in taken])[:, None]
    tokens = np.zeros(mask.shape, np.int64)
    tokens[mask] = np.concatenate(taken)
    return make_batch(tokens, mask, mask)


def own_windows(windows: Batch, layout: Layout, column: int) -> Batch:
    """The rows that hold tokens of a modality: these have label 0, and their loss alone counts.

    A token's loss is that of what follows it, which its adapter has to foretell.
    """
    own = windows.mask & (layout.modality(windows.tokens) == column)
    labels = np.where(own, np.int32(0), np.int32(-1))
    windows = dataclasses.replace(windows, weights=windows.weights * own, labels=labels)
    return windows.rows(np.flatnonzero(windows.weights.any(axis=1)))


def row_loss(rows, decoder, batch: Batch):
    """Summed next-token loss of the base with these added rows, on every token."""
    extended = with_rows(decoder, **rows)
    out = extended(batch.tokens, batch.mask)
    loss, weight = next_token_loss(extended.logits(out.hidden), batch)
    return loss, weight, {}


def own_loss(adapter, decoder, batch: Batch):
    """Summed loss with the adapter where it will be routed to: on the tokens of label 0 alone."""
    router = FixedRouter(batch.labels[..., None])
    out = decoder(batch.tokens, batch.mask, adapters=adapter.stacks(), router=router)
    loss, weight = next_token_loss(decoder.logits(out.hidden), batch)
    return loss, weight, {}


def extended_base(run, base: BaseModel, windows: Batch, config: TrainConfig, digest: str):
    """(the base with trained rows, the loss curve); rows from the cache where they are there."""
    names = (*PICTURE, *GRID)

    def make(folder: pathlib.Path) -> None:
        first = draw_rows(base.decoder, len(names), seed=config.seed)
        print(f"rows: {trainable_line(first, base.decoder)}", flush=True)
        with kept_frozen(base):
            rows, _ = fit(
                row_loss,
                first,
                BatchOrder(windows, config.batch_size, config.seed),
                config,
                frozen=base.decoder,
                name="rows",
                run_dir=folder,
                identity={"base": base.digest},
            )
        save_file(jax.tree.map(np.asarray, rows), folder / "rows.safetensors")

    def load(folder: pathlib.Path):
        return load_file(folder / "rows.safetensors"), read_curve(folder)

    rows, curve = run.artifact(
        "rows",
        config=[config, list(names)],
        digests={"base": base.digest, "data": digest},
        make=make,
        load=load,
        phase="rows",
    )
    extended = extend_vocabulary(base, names, **rows)
    count = base.config.vocab_size
    for old, now in zip(
        old_rows(base.decoder, count), old_rows(extended.decoder, count), strict=True
    ):
        if old.tobytes() != now.tobytes():
            raise RuntimeError("the base's own rows changed when rows were added to them")
    return extended, curve


def modality_adapter(
    run, base: BaseModel, name: str, windows: Batch, config: AdapterTrainConfig, digest: str
):
    """(PEFT folder, loss curve) of one adapter, from its `own_windows`; it saw no other adapter."""

    def make(folder: pathlib.Path) -> None:
        first = init_adapter(
            base.config,
            rank=config.rank,
            alpha=config.alpha,
            rng=jax.random.key(config.seed),
        )
        print(f"{name}: {trainable_line(first, base.decoder)}", flush=True)
        with kept_frozen(base):
            trained, records = fit(
                own_loss,
                first,
                BatchOrder(windows, config.batch_size, config.seed),
                config,
                frozen=base.decoder,
                name=name,
                run_dir=folder,
                identity={"base": base.digest},
            )
        card = AdapterCard(
            base=base.name,
            data=f"{name} tokens of interleaved documents",
            command="molora run --experiment=table8",
            metrics={"train_loss": records[-1]["loss"]},
        )
        adapter = trained.to_adapter(name, base_name=base.name)
        # overwrite: a kill before the artifact was published leaves the folder behind.
        save_adapter(adapter, folder / "adapter", card=card, overwrite=True)

    return run.artifact(
        "adapter",
        config=[config, "own tokens"],
        digests={"base": base.digest, "data": digest},
        make=make,
        load=lambda folder: (folder / "adapter", read_curve(folder)),
        phase=f"adapter/{name}",
    )


def read_curve(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a training run, one a step, as `fit` wrote them."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
