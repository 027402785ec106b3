"""Serving over arrival rate and number of adapters: mixed batches, one adapter, one request."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Literal

from experiments import serving_report
from experiments.access import PATTERNS, pattern
from experiments.random_models import random_adapter
from experiments.registry import check_config
from experiments.run_folder import Run
from experiments.serving_report import Cell, Found
from molora_jax.adapters import AdapterBank, HotSet
from molora_jax.generation import Engine
from molora_jax.generation.simulate import (
    Policy,
    Simulation,
    one_adapter,
    one_request,
    simulate,
    together,
)
from molora_jax.generation.traces import Arrival, bursty_times, poisson_times, random_arrivals
from molora_jax.models import base_digest, load_base

POLICIES: dict[str, Policy] = {
    "mixed": together,
    "one_adapter": one_adapter,
    "one_request": one_request,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Traces of `requests` requests, each served by every policy, `repeats` with other seeds.

    base            base model: a name, a folder or a .gguf file
    rates           requests a second, with `num_adapters` adapters
    num_adapters    how many where the rate varies
    adapter_counts  numbers of adapters, at the rate `rate`
    rate            requests a second where the number of adapters varies
    requests        requests of a trace
    repeats         traces of each kind, with other seeds
    pattern         which adapter a request asks for: see experiments.access
    arrivals        each on its own, or all in the first of every four seconds
    rows            B, of the mixed batch and that of one adapter
    num_slots       K of the bank; adapters beyond it are loaded when they are asked for
    rank            R of every adapter
    prompt_tokens   least and most tokens of a prompt, drawn log-uniformly
    answer_tokens   the same of an answer
    dtype           of weights and activations
    """

    base: str = "smollm2-135m"
    rates: tuple[float, ...] = (1.0, 3.0, 9.0)
    num_adapters: int = 8
    adapter_counts: tuple[int, ...] = (1, 8, 16)
    rate: float = 3.0
    requests: int = 12
    repeats: int = 3
    pattern: str = "uniform"
    arrivals: Literal["poisson", "bursty"] = "poisson"
    rows: int = 8
    num_slots: int = 8
    rank: int = 8
    prompt_tokens: tuple[int, int] = (8, 32)
    answer_tokens: tuple[int, int] = (8, 32)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        if self.pattern not in PATTERNS:
            raise ValueError(
                f"Config.pattern = {self.pattern!r}: expected one of {', '.join(PATTERNS)}"
            )
        for name in ("rates", "adapter_counts"):
            if not getattr(self, name):
                raise ValueError(f"Config.{name} is empty: expected a value")
        numbers = [*self.rates, *self.adapter_counts, self.num_adapters, self.rate, self.requests]
        if min(*numbers, self.repeats, self.rows, self.num_slots, self.rank) <= 0:
            raise ValueError(f"{self}: expected no number below 1 but the seed, and rates above 0")
        for name in ("prompt_tokens", "answer_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"Config.{name} = ({low}, {high}): expected 1 <= least <= most")

    @property
    def cells(self) -> list[Cell]:
        """What is measured, each once."""
        by_rate = [(rate, self.num_adapters) for rate in self.rates]
        by_count = [(self.rate, count) for count in self.adapter_counts]
        return list(dict.fromkeys(by_rate + by_count))


SWEEPS = {
    "patterns": lambda: [f"serving.Config.pattern = {name!r}" for name in PATTERNS],
    "arrivals": lambda: [f"serving.Config.arrivals = {n!r}" for n in ("poisson", "bursty")],
}


def digests(config: Config) -> dict[str, str]:
    return {"base": base_digest(config.base)}


def main(config: Config, run: Run) -> None:
    engines = engines_of(config)
    found = measure(config, run, engines)
    serving_report.draw(config, run, found)
    run.finish(
        metrics=serving_report.metrics(found),
        claims=serving_report.claims(config, found),
        report=serving_report.written(config, found),
    )


def engines_of(config: Config) -> dict[str, Engine]:
    """The engine of each policy: one of `rows` rows for two of them, one of a row for the third."""
    base = load_base(config.base, dtype=config.dtype)
    hot = HotSet(
        AdapterBank(
            base.config, num_slots=config.num_slots, max_rank=config.rank, dtype=config.dtype
        )
    )
    for i, name in enumerate(adapter_names(config)):
        hot.add(random_adapter(base.config, name, rank=config.rank, seed=config.seed + i))
    longest = config.prompt_tokens[1]

    def engine(rows):
        made = Engine(
            base,
            hot,
            rows=rows,
            context=longest + config.answer_tokens[1],
            buckets=(longest,),
            max_waiting=max(256, config.requests),
        )
        made.warm_up()
        return made

    many = engine(config.rows)
    single = many if config.rows == 1 else engine(1)
    return {"mixed": many, "one_adapter": many, "one_request": single}


def adapter_names(config: Config) -> list[str]:
    return [f"adapter-{i}" for i in range(max(config.num_adapters, *config.adapter_counts))]


def trace(config: Config, cell: Cell, repeat: int, vocab_size: int) -> list[Arrival]:
    """The same for every policy."""
    rate, num_adapters = cell
    seed = config.seed + 1000 * repeat
    times = poisson_times if config.arrivals == "poisson" else bursty_times
    names = adapter_names(config)
    asked = pattern(
        config.pattern, num_adapters=num_adapters, length=config.requests, seed=seed + 1
    )
    return random_arrivals(
        times(rate, config.requests, seed=seed),
        [names[i] for i in asked],
        vocab_size=vocab_size,
        prompt_tokens=config.prompt_tokens,
        answer_tokens=config.answer_tokens,
        seed=seed + 2,
    )


def measure(config: Config, run: Run, engines: Mapping[str, Engine]) -> Found:
    differ = 0
    found: dict[Cell, dict[str, list[Simulation]]] = {
        cell: {name: [] for name in POLICIES} for cell in config.cells
    }
    vocab_size = engines["mixed"].base.config.vocab_size
    first = trace(config, config.cells[0], 0, vocab_size)[: config.rows]
    for name in ("mixed", "one_request"):  # adapters come into their slots, and caches fill
        simulate(engines[name], [Arrival(0.0, each.request) for each in first])
    step = 0
    for repeat, cell in itertools.product(range(config.repeats), config.cells):
        arrivals = trace(config, cell, repeat, vocab_size)
        tokens = {}
        for name in list(POLICIES)[:: 1 if repeat % 2 else -1]:
            done = simulate(engines[name], arrivals, policy=POLICIES[name])
            if done.failed:
                raise RuntimeError(
                    f"{name}: {len(done.failed)} requests failed, the first with: "
                    f"{done.failed[0].generation.error}"
                )
            found[cell][name].append(done)
            tokens[name] = [each.generation.tokens for each in done.served]
            values = {"policy": name, "rate": cell[0], "adapters": cell[1], "repeat": repeat}
            values |= serving_report.summary(done)
            run.log_metrics(values, step=step, phase="simulations")
            step += 1
        for mixed, alone in zip(tokens["mixed"], tokens["one_adapter"], strict=True):
            differ += mixed != alone
    return Found(found, differ)
