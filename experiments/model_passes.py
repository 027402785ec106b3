"""Tables 5 and 7: whole models, a pass for each adapter against one pass for all.

Neither table's text is public beyond its numbers. Of Table 5 we read "diverse" as rows whose tokens
change adapters, "uniform" as rows of one adapter each, shared out evenly, and "single" as one
adapter for all; per sequence is then a pass for each adapter over the rows that have a token of it.
All four times of the paper fit: 4 passes over the whole batch, 4 over a quarter of it, and one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from experiments.model_passes_report import Case, Measured, finish
from experiments.overhead import random_stacks
from experiments.random_models import RANDOM, base_decoder, random_config, random_decoder
from experiments.registry import check_config
from experiments.run_folder import Run
from experiments.turns import time_in_turns
from molora_jax.adapters.stack import AdapterStack, Stacks
from molora_jax.models import Decoder, ModelConfig, base_digest
from molora_jax.routing import FixedRouter, SequenceRouter

# Tokens of a row change adapters after so many.
SPAN = 4
# Table 5: kind, rows, the paper's length and its milliseconds per sequence and per token.
TABLE5 = (
    ("diverse", 4, 128, 179.0, 41.5),
    ("diverse", 8, 128, 178.7, 43.4),
    ("uniform", 8, 256, 178.1, 79.8),
    ("single", 8, 256, 80.3, 80.0),
)
# Table 7: width, layers, rows, length, milliseconds per sequence and per token.
TABLE7 = (
    (1024, 2, 16, 512, 57.7, 14.5),
    (2048, 4, 4, 512, 68.8, 17.3),
    (4096, 4, 16, 512, 488.0, 121.6),
)
STRATEGIES = {"per_token": "auto", "per_token_grouped": "grouped", "per_token_bgmv": "bgmv"}
# What logits may differ by, mean over mean: float32 in another order, and coarser dtypes.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}

Model = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One bank of K adapters on all seven projections, k = 1.

    base        of Table 5: a base model, or "qwen3-4b-random", its shapes with random weights
    lengths     of Table 5: tokens of a row in the diverse cases, and in the others
    models      of Table 7: width, layers, rows and length of each, random weights
    num_adapters  K, all with random weights
    rank        R of every adapter
    dtype       of weights and activations
    repeats     turns, in each of which every arm runs once
    budget_s    no turn of one case begins after so long, once there are three
    """

    base: str = "smollm2-135m"
    lengths: tuple[int, int] = (32, 64)
    models: tuple[Model, Model, Model] = ((256, 2, 8, 128), (512, 4, 2, 128), (1024, 4, 2, 128))
    num_adapters: int = 4
    rank: int = 16
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    repeats: int = 7
    budget_s: float = 30.0
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        numbers = [*self.lengths, *itertools.chain(*self.models)]
        if min(self.num_adapters, self.rank, self.repeats, *numbers) < 1 or self.budget_s <= 0:
            raise ValueError(f"{self}: expected no number below 1 but the seed")
        shortest = min(self.lengths[0], *(length for *_, length in self.models))
        if shortest < SPAN * self.num_adapters:
            raise ValueError(
                f"Config.lengths = {self.lengths}, models = {self.models}, num_adapters = "
                f"{self.num_adapters}: expected rows of {SPAN} tokens or more an adapter, "
                f"{SPAN * self.num_adapters} in all; the shortest has {shortest}"
            )
        if 8 % self.num_adapters:
            raise ValueError(
                f"Config.num_adapters = {self.num_adapters}: expected 1, 2, 4 or 8, to share out "
                "8 rows evenly"
            )


def digests(config: Config) -> dict[str, str]:
    return {} if config.base in RANDOM else {"base": base_digest(config.base)}


def main(config: Config, run: Run) -> None:
    if run.scale == "paper" and jax.default_backend() != "gpu":
        logging.warning("scale paper is for a GPU; on a %s it takes very long", jax.devices()[0])
    (table5 if run.experiment == "table5" else table7)(config, run)


def table5(config: Config, run: Run) -> None:
    decoder = base_decoder(config.base, dtype=config.dtype, seed=config.seed)
    bank = banks(config, decoder.config)
    measured = {}
    for step, (kind, rows, length, per_sequence, per_token) in enumerate(TABLE5):
        ours = config.lengths[kind != "diverse"]
        case = Case(
            name=f"{kind}_{rows}x{length}",
            ids=adapter_ids(kind, rows, ours, config.num_adapters),
            paper_ms={"per_sequence": per_sequence, "per_token": per_token},
            size=f"{rows} × {ours} tokens",
            paper_size=f"{rows} × {length} tokens",
        )
        measured[case.name] = measure(config, run, decoder, bank, case, step=step)
    finish(
        config,
        run,
        measured,
        said=f"{config.base}, K = {config.num_adapters}, r = {config.rank} on all seven "
        f"projections, k = 1. Diverse: rows whose tokens change adapters every {SPAN} tokens; "
        "uniform: rows of one adapter each, shared out evenly; single: one adapter for all.",
        base="" if config.base in RANDOM else f"{config.base} and not Qwen3-4B",
    )


def table7(config: Config, run: Run) -> None:
    measured = {}
    for step, (model, papers) in enumerate(zip(config.models, TABLE7, strict=True)):
        per_sequence, per_token = papers[4:]
        sizes = random_config(*model[:2])
        decoder = random_decoder(sizes, dtype=config.dtype, seed=config.seed)
        case = Case(
            name=f"d{papers[0]}",
            ids=adapter_ids("diverse", *model[2:], config.num_adapters),
            paper_ms={"per_sequence": per_sequence, "per_token": per_token},
            size=words(*model),
            paper_size=words(*papers[:4]),
        )
        measured[case.name] = measure(config, run, decoder, banks(config, sizes), case, step=step)
    finish(
        config,
        run,
        measured,
        base="",
        said=f"Random decoders with gated MLPs, K = {config.num_adapters}, r = {config.rank} on "
        f"all seven projections, k = 1; the tokens of every row change adapters every {SPAN} "
        "tokens, so that every pass needs every row.",
    )


def words(d: int, layers: int, rows: int, length: int) -> str:
    return f"d = {d}, {layers} layers, {rows} × {length} tokens"


def adapter_ids(kind: str, rows: int, length: int, num_adapters: int) -> np.ndarray:
    """(B, S) adapter of each token; see the module's first lines for the kinds."""
    row, token = np.indices((rows, length))
    if kind == "diverse":
        return (token // SPAN + row) % num_adapters
    return row % num_adapters if kind == "uniform" else np.zeros_like(row)


def banks(config: Config, sizes: ModelConfig) -> tuple[Stacks, list[Stacks]]:
    """The bank of all adapters, and one of each alone: what a pass for one adapter reads."""
    rng = np.random.default_rng(config.seed)
    stacks = jax.tree.map(
        lambda leaf: leaf.astype(config.dtype) if leaf.dtype == jnp.float32 else leaf,
        random_stacks(sizes, config.num_adapters, config.rank, rng),
    )
    alone = [
        jax.tree.map(lambda leaf, slot=slot: leaf[:, slot : slot + 1], stacks)
        for slot in range(config.num_adapters)
    ]
    return stacks, alone


@functools.partial(jax.jit, static_argnames="strategy")
def forward(decoder: Decoder, tokens, stacks: Mapping[str, AdapterStack], router, *, strategy: str):
    """Logits (B, S, V)."""
    out = decoder(tokens, adapters=dict(stacks), router=router, strategy=strategy)
    return decoder.logits(out.hidden)


@functools.partial(jax.jit, donate_argnames="logits")
def one_pass(decoder: Decoder, tokens, stacks, ids, slot, rows, logits):
    """`logits`, in which the tokens of adapter `slot` are what it makes of `rows`."""
    router = SequenceRouter(np.zeros(rows.shape[0], np.int32))
    made = forward(decoder, tokens[rows], stacks, router, strategy="auto")
    own = (ids[rows] == slot)[:, :, None]
    return logits.at[rows].set(jnp.where(own, made, logits[rows]))


def arms_of(
    decoder: Decoder, tokens, ids: np.ndarray, bank: tuple[Stacks, list[Stacks]]
) -> dict[str, Callable[[], Any]]:
    """By name, each as a function that returns logits (B, S, V)."""
    stacks, alone = bank
    V = decoder.config.vocab_size
    router = FixedRouter(ids[:, :, None])
    tokens, placed = jnp.asarray(tokens), jnp.asarray(ids)

    def routed(strategy):
        return lambda: forward(decoder, tokens, stacks, router, strategy=strategy)

    def passes(rows_of):
        def run():
            logits = jnp.zeros((*ids.shape, V), jnp.float32)
            for slot, rows in rows_of.items():
                adapter = alone[slot]
                logits = one_pass(decoder, tokens, adapter, placed, np.int32(slot), rows, logits)
            return logits

        return run

    present = [int(slot) for slot in np.unique(ids)]
    needed = {slot: np.flatnonzero((ids == slot).any(axis=1)) for slot in present}
    arms = {name: routed(strategy) for name, strategy in STRATEGIES.items()}
    arms["per_sequence"] = passes(needed)
    if any(len(rows) < len(ids) for rows in needed.values()):
        arms["full_passes"] = passes({slot: np.arange(len(ids)) for slot in present})
    return arms


def measure(config: Config, run: Run, decoder: Decoder, bank, case: Case, *, step: int) -> Measured:
    rng = np.random.default_rng(config.seed)
    tokens = rng.integers(0, decoder.config.vocab_size, case.ids.shape).astype(np.int32)
    arms = arms_of(decoder, tokens, case.ids, bank)
    ours, differences, same = arms["per_token"](), {}, 1.0
    for name, arm in arms.items():
        other = arm()
        differences[name] = float(jnp.abs(other - ours).mean() / jnp.abs(ours).mean())
        if name == "per_sequence":
            same = float((other.argmax(-1) == ours.argmax(-1)).mean())
        del other
    del ours
    for name, difference in differences.items():
        equal = not case.mixed or name.startswith("per_token")
        if equal and not difference <= TOLERANCE[config.dtype]:
            raise RuntimeError(
                f"{case.name}: the logits of {name} differ from those of per_token by "
                f"{difference:.3g} of their size, and should be the same"
            )
    times = time_in_turns(arms, repeats=config.repeats, budget_s=config.budget_s)
    values: dict[str, Any] = {"what": case.name, "same_token": same}
    for name in arms:
        values[f"{name}_s"] = times.median(name)
        values[f"{name}_p10_p90_s"] = list(times.spread(name))
        values[f"{name}_difference"] = differences[name]
    run.log_metrics(values, step=step, phase="times")
    return Measured(case=case, times=times, differences=differences, same_token=same)
