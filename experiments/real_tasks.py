"""Real question sets: adapters trained apart on three of them, routed, and a fourth asked alone.

Letters beyond the table of design.md: G sets that are trained on; adapter g is of set g alone.
"""

import dataclasses
import functools
from typing import Any, Literal

from experiments import compose
from experiments.registry import check_config

STATISTICS, TRAINED = "MoLoRA, statistics", "MoLoRA, trained"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What is trained on which questions, and how many are asked; the rest is compose's.

    base              base model: a name, a folder or a .gguf file
    dtype             the type it is kept in
    data              "molora_data": the real sets of the folder MOLORA_DATA; "embedded": generated
                      stand-ins; "auto": the former where MOLORA_DATA is set
    rank              of one adapter, with alpha = 2 · rank; the LoRA on the mixture has the rank
                      and the steps of the three together
    adapter_steps     steps of one adapter's training
    adapter_lr        its peak learning rate
    adapter_rows      windows of one of its steps;  adapter_len  tokens of a window
    router_start_rows, router_steps
                      of the router that is trained, as in compose.Config
    features          channels in the statistics of the router that is solved; at least the width
                      of the base: all of them
    statistics_rows   windows of its own data that each adapter's statistics sum
    shots             worked questions before the prompt in one arm of the base; all else has none
    num_questions     asked of each set
    eval_len          longest question that is asked, with its answer, in tokens
    eval_bucket       rows are padded to a multiple of it
    num_seeds         seeds seed, seed + 1, ... of adapters, routers and the questions drawn
    """

    base: str = "smollm2-135m"
    dtype: Literal["float32", "bfloat16"] = "float32"
    data: Literal["auto", "embedded", "molora_data"] = "auto"
    rank: int = 8
    adapter_steps: int = 16
    adapter_lr: float = 1e-3
    adapter_rows: int = 3
    adapter_len: int = 128
    router_start_rows: int = 48
    router_steps: int = 6
    features: int = 576
    statistics_rows: int = 24
    shots: int = 2
    num_questions: int = 64
    eval_len: int = 192
    eval_bucket: int = 32
    num_seeds: int = 1
    seed: int = 0

    def __post_init__(self):
        least = {"num_questions": 2, "eval_len": 16, "adapter_len": 16, "eval_bucket": 1}
        least |= dict.fromkeys(
            ("features", "statistics_rows", "shots", "adapter_steps", "num_seeds"), 1
        )
        check_config(self, least=least)
        self.composed(self.seed)  # refuse what training would

    def composed(self, seed: int) -> compose.Config:
        """The same sizes as a Config of compose, whose functions train what is measured here."""
        return compose.Config(
            base=self.base,
            rank=self.rank,
            alpha=2.0 * self.rank,
            adapter_steps=self.adapter_steps,
            adapter_lr=self.adapter_lr,
            adapter_rows=self.adapter_rows,
            adapter_len=self.adapter_len,
            router_start_rows=self.router_start_rows,
            router_steps=self.router_steps,
            router_joined=0.0,  # a question is of one set
            top_k=1,
            seed=seed,
            command="molora run --experiment=real_tasks",
        )


def digests(config: Config) -> dict[str, str]:
    from experiments.real_tasks_data import load_sets
    from molora_jax.models import base_digest

    sets = {each.name: each.digest for each in load_sets(config.data)}
    return {"base": base_digest(config.base), **sets}


def main(config: Config, run) -> None:
    from experiments import real_tasks_report
    from experiments.real_tasks_data import load_sets
    from experiments.seeds import SeedRun
    from molora_jax.models import load_base

    base = load_base(config.base, dtype=config.dtype)
    sets = load_sets(config.data)
    seeds = [
        measured(SeedRun(run, f"seed {seed}"), base, sets, config, seed)
        for seed in range(config.seed, config.seed + config.num_seeds)
    ]
    real_tasks_report.draw(seeds, run.path)
    numbers = real_tasks_report.metrics(seeds)
    run.finish(
        metrics=numbers,
        claims=real_tasks_report.claims(numbers, seeds),
        report=real_tasks_report.markdown(numbers, seeds, sets, config),
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """One seed.

    scores     {set: {arm: Scores}}, the set that is asked alone last
    curves     {name: records of its training}
    label_use  where the trained router read whose data a token is, in words
    """

    scores: dict[str, dict[str, Any]]
    curves: dict[str, list[dict]]
    label_use: str

    @property
    def trained_on(self) -> list[str]:
        """The sets that have an adapter of their own."""
        return [name for name, arms in self.scores.items() if "own adapter" in arms]


def measured(run, base, sets, config: Config, seed: int) -> Measured:
    """Trains what is not cached, then asks every set in every arm."""
    from experiments.real_tasks_data import training_windows
    from experiments.shipped import statistics_of
    from molora_jax.adapters import AdapterBank
    from molora_jax.routing import StatisticsRouter

    composed = config.composed(seed)
    known = [each for each in sets if each.train]
    rows = config.adapter_steps * config.adapter_rows
    train = [
        training_windows(
            base.tokenizer, each.train, rows=rows, seq_len=config.adapter_len, seed=seed
        )
        for each in known
    ]
    own = {each.name: windows for each, windows in zip(known, train, strict=True)}
    curves: dict[str, list[dict]] = {}
    bank = AdapterBank(base.config, num_slots=len(known), max_rank=config.rank)
    for name, windows in own.items():
        folder, curves[name] = compose.trained_adapter(run, base, composed, {name: windows})
        bank.load(folder, name=name)
    trained, curves["router"], label_use = compose.trained_router(run, base, bank, train, composed)
    folder, curves["mixture"] = compose.trained_adapter(
        run, base, composed, own, steps=len(known) * config.adapter_steps
    )
    pooled = AdapterBank(base.config, num_slots=1, max_rank=len(known) * config.rank)
    pooled.load(folder, name="mixture")
    statistics = [
        statistics_of(
            run, base, each.adapter, windows,
            features=config.features, rows=config.statistics_rows, seed=seed,
        ).unpack()
        for each, windows in zip(bank.list(), train, strict=True)
    ]  # fmt: skip
    routers = {STATISTICS: StatisticsRouter.solve(statistics, top_k=1), TRAINED: trained}
    scores = asked(base, sets, bank, pooled, routers, config, seed)
    return Measured(scores=scores, curves=curves, label_use=label_use)


def asked(base, sets, bank, pooled, routers, config: Config, seed: int) -> dict[str, dict]:
    """{set: {arm: Scores}}: the same questions of a set in every arm."""
    import random

    from experiments.real_tasks_data import shots
    from experiments.real_tasks_measure import Asked, may_follow, score

    ends = may_follow(base)
    known = [each.name for each in bank.list()]
    found: dict[str, dict] = {}
    for each in sets:
        # The order of the set that is asked alone is that of its tasks, in turn.
        drawn = list(each.test)
        if each.train:
            random.Random(f"{each.name}/{seed}").shuffle(drawn)
        fitted = functools.partial(
            Asked.of, base.tokenizer, drawn, count=config.num_questions, max_len=config.eval_len
        )
        questions = fitted()
        arms: dict[str, tuple] = {"base": (questions, bank, (-1,))}
        if each.train:
            arms[f"base, {config.shots} shots"] = (
                fitted(before=shots(each.train, config.shots)), bank, (-1,),
            )  # fmt: skip
            arms["own adapter"] = (questions, bank, (known.index(each.name),))
        else:
            arms |= {f"{name} adapter": (questions, bank, (at,)) for at, name in enumerate(known)}
        arms |= {name: (questions, bank, router) for name, router in routers.items()}
        arms["uniform"] = (questions, bank, tuple(range(len(known))))
        arms["LoRA on the mixture"] = (questions, pooled, (0,))
        found[each.name] = {}
        for name, (rows, adapters, arm) in arms.items():
            scores = score(base, rows, adapters, arm, ends=ends, bucket=config.eval_bucket)
            found[each.name][name] = scores
            print(
                f"{each.name}, {name}: exact match {scores.exact_match:.1%}, "
                f"log p {scores.logp_token:.3f} a token",
                flush=True,
            )
    return found
