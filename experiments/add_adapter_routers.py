"""What ships with an adapter, and the routers that can be made of it when others arrive."""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.compose import digest_of_windows
from experiments.shipped import statistics_of
from molora_jax.adapters import Adapter, AdapterBank, load_adapter
from molora_jax.models import BaseModel
from molora_jax.routing import (
    LearnedRouter,
    PrototypeRouter,
    RouterStatistics,
    StatisticsRouter,
)
from molora_jax.routing.closed_form import solve_logits
from molora_jax.routing.fit import calibrate_column
from molora_jax.routing.linear import standardised
from molora_jax.routing.prototypes import arrow_keys
from molora_jax.routing.statistics import finite_tokens
from molora_jax.training import TrainConfig, evaluate
from molora_jax.training.data import Batch
from molora_jax.training.gates import train_gate

ALL = "all channels"


@dataclasses.dataclass(frozen=True)
class Shipped:
    """Of each adapter, in order: statistics by kind ("m = 256", ALL), Arrow's key, a gate's key."""

    statistics: dict[str, list[RouterStatistics]]
    arrow: np.ndarray
    gates: np.ndarray
    file_bytes: int

    def routers(self, count: int, *, num_columns: int) -> dict[str, StatisticsRouter]:
        """Solved for the first `count` adapters."""
        return {
            f"statistics, {kind}": StatisticsRouter.solve(parts[:count], num_columns=num_columns)
            for kind, parts in self.statistics.items()
        }

    def prototypes(self, count: int, *, num_columns: int) -> dict[str, PrototypeRouter]:
        """Of the first `count` adapters; the other columns are empty."""

        def padded(keys):
            return np.pad(keys[..., :count], [(0, 0), (0, 0), (0, num_columns - count)])

        return {
            "Arrow": PrototypeRouter(padded(self.arrow), top_k=1, similarity="absolute"),
            "PHATGOOSE": PrototypeRouter(padded(standardised(self.gates)), top_k=1),
        }

    def in_any_order(self) -> bool:
        """Whether adapters in reverse give the same columns, bit for bit."""
        parts = next(iter(self.statistics.values()))
        one, other = StatisticsRouter.solve(parts), StatisticsRouter.solve(parts[::-1])
        return bool(
            (one.weights[...] == other.weights[..., ::-1]).all()
            and (one.bias[...] == other.bias[..., ::-1]).all()
        )

    def unloads_exactly(self, before: dict[str, StatisticsRouter], count: int) -> bool:
        """Whether solving without the later ones gives what there was before they came."""
        again = self.routers(count, num_columns=next(iter(before.values())).num_columns)
        return all(
            bool((again[name].weights[...] == router.weights[...]).all())
            for name, router in before.items()
        )


def shipped(run, base: BaseModel, folders, train, names, config, seed: int) -> Shipped:
    """Gathers or finds what ships with each adapter; each sees its own data alone."""
    adapters = [
        load_adapter(folder, name=name)[0] for folder, name in zip(folders, names, strict=True)
    ]
    kinds = {f"m = {config.features}": config.features, ALL: None}
    statistics: dict[str, list[RouterStatistics]] = {kind: [] for kind in kinds}
    gates, sizes = [], []
    for adapter, own in zip(adapters, train, strict=True):
        for kind, m in kinds.items():
            packed = statistics_of(
                run, base, adapter, own, features=m, rows=config.statistics_rows, seed=seed
            )
            statistics[kind].append(packed.unpack())
            sizes.append(packed.num_bytes)
        gates.append(_gate(run, base, adapter, own, config, seed))
    norm = np.asarray(base.decoder.layers.input_norm[...])
    return Shipped(statistics, arrow_keys(adapters, norm), np.stack(gates, axis=-1), sizes[0])


def _gate(run, base: BaseModel, adapter: Adapter, own: Batch, config, seed: int) -> np.ndarray:
    training = TrainConfig(steps=config.gate_steps, lr=1e-2, warmup_steps=2, seed=seed)

    def make(folder: pathlib.Path) -> None:
        key, _ = train_gate(base, adapter, own, training, run_dir=folder)
        np.save(folder / "gate.npy", key)

    return run.artifact(
        "gate",
        config=training,
        digests={"base": base.digest, "adapter": adapter.digest, "data": digest_of_windows(own)},
        make=make,
        load=lambda folder: np.load(folder / "gate.npy"),
        phase=f"gate/{adapter.name}",
    )


def grown(
    base: BaseModel, trained: LearnedRouter, shipped: Shipped, train, config, seed: int
) -> LearnedRouter:
    """The trained router with a column for each adapter that came later.

    A column begins as the ridge regression's, and its scale and offset are then set on a few tokens
    of every domain that is there by then: unlike the others, this router needs some of their text.
    """
    router = trained
    rng = np.random.default_rng(seed)
    for count in range(trained.num_columns + 1, len(train) + 1):
        weights, bias = solve_logits(shipped.statistics[ALL][:count])
        router = router.grown(weights[..., -1].astype(np.float32), bias[..., -1].astype(np.float32))
        features, labels = [], []
        for column in range(count):
            own = train[column].rows(rng.permutation(train[column].num_rows)[:4])
            inputs = base.decoder(own.tokens, own.mask, return_layer_inputs=True).layer_inputs
            tokens, _ = finite_tokens(np.asarray(inputs), own.mask)
            chosen = rng.permutation(tokens.shape[1])[: config.calibration]
            features.append(tokens[:, chosen])
            labels += [column] * len(chosen)
        router = calibrate_column(
            router, jnp.asarray(np.concatenate(features, axis=1)), jnp.asarray(labels, jnp.int32)
        )
    return router


def by_domain(
    base: BaseModel, bank: AdapterBank, windows: Batch, names, router: Any, slots: np.ndarray
) -> dict[str, float]:
    """Held-out nats of each domain's own rows, and of the rows that change domain ("joined")."""
    at_once = max(size for size in range(1, 11) if windows.num_rows % size == 0)
    found = evaluate(
        base.decoder,
        windows,
        batch_size=at_once,
        adapters=bank.stacks,
        router=router,
        column_to_slot=slots,
    )
    first, last = windows.labels.min(axis=1), windows.labels.max(axis=1)
    pure = first == last
    result = {
        name: found.mean((pure & (first == column))[:, None] & windows.mask)
        for column, name in enumerate(names)
    }
    return result | {"joined": found.mean(~pure[:, None] & windows.mask)}
