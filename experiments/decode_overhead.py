"""What adapters cost a decode step: an engine's step with a hot set over the step of the base."""

import dataclasses
import math
from typing import Literal

import numpy as np
from flax import nnx

from experiments import kernel_timing
from experiments.random_models import random_adapter
from experiments.registry import check_config
from experiments.run_folder import Claim, Run, markdown, show
from experiments.turns import time_in_turns
from molora_jax.adapters import AdapterBank, HotSet
from molora_jax.generation import Engine, Generation, Profile, Request
from molora_jax.models import BaseModel, base_digest, load_base
from molora_jax.routing import LearnedRouter, VocabularyRouter
from pallas_kernels.bench import Times
from pallas_kernels.strategy import check_names

PROMPT = 16  # tokens
WARM_UP = 3  # turns
# What the mixed batch should cost at most, K = 8 adapters of rank 8 and 8 rows.
AIM = {"num_adapters": 8, "rank": 8, "rows": 8, "mixed_over_base": 1.25}
ARMS = {
    "one_adapter": "every row on the same adapter",
    "mixed": "row i on adapter i",
    "vocabulary": "the adapter of each token by a table over the vocabulary",
    "learned": "two adapters a token, chosen by a router in every layer",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Engines of one base and one bank, stepped in turns with an engine of the base alone.

    base          base model: a name, a folder or a .gguf file
    rows          B, requests decoded together
    num_adapters  K, all resident, on all seven projections
    rank          R of every adapter
    router        the learned one: one decision a layer, or one shared
    arms          what is timed beside the base, of ARMS; an engine is compiled for each kind of
                  router among them
    strategy      how `lora_delta` computes; see pallas_kernels
    dtype         of weights and activations
    repeats       turns, in each of which both engines make one step
    context       T, tokens of a row's cache, which every step reads in full
    """

    base: str = "smollm2-135m"
    rows: int = 8
    num_adapters: int = 8
    rank: int = 8
    router: Literal["per_layer", "shared"] = "per_layer"
    arms: tuple[Literal["one_adapter", "mixed", "vocabulary", "learned"], ...] = (
        "one_adapter",
        "mixed",
        "vocabulary",
        "learned",
    )
    strategy: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    repeats: int = 60
    context: int = 128
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        if min(self.rows, self.rank, self.repeats) < 1 or self.num_adapters < 2:
            raise ValueError(f"{self}: expected at least 2 adapters, and 1 of rows and repeats")
        try:
            check_names(self.strategy, "auto")
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"Config.strategy: {error}") from None
        if not self.arms:
            raise ValueError(f"Config.arms is empty: expected some of {', '.join(ARMS)}")
        needed = PROMPT + WARM_UP + self.repeats + 2
        if self.context < needed:
            raise ValueError(
                f"Config.context = {self.context}, repeats = {self.repeats}: expected a context "
                f"of {needed} tokens or more, {PROMPT} of the prompt and one a step"
            )


def digests(config: Config) -> dict[str, str]:
    return {"base": base_digest(config.base)}


def main(config: Config, run: Run) -> None:
    base = load_base(config.base, dtype=config.dtype)
    names = [f"adapter-{i}" for i in range(config.num_adapters)]
    engines = engines_of(config, base, names)
    asked: dict[str, list[dict]] = {
        "one_adapter": [{"adapter": names[0]}] * config.rows,
        "mixed": [{"adapter": names[i % len(names)]} for i in range(config.rows)],
        "vocabulary": [{"profile": "vocabulary"}] * config.rows,
        "learned": [{"profile": "learned"}] * config.rows,
    }
    found: dict[str, Times] = {}
    for step, name in enumerate(config.arms):
        engine = engines["learned" if name == "learned" else "adapters"]
        found[name] = times = beside_base(config, engines["base"], engine, name, asked[name])
        values = {"base_s": times.median("base"), f"{name}_s": times.median(name)}
        run.log_metrics({"what": name, **values}, step=step, phase="times")
    ratios = {name: times.ratio(name, over="base") for name, times in found.items()}
    metrics = {f"{name}_over_base": ratio for name, ratio in ratios.items()}
    metrics["base_ms"] = 1e3 * found[config.arms[0]].median("base")
    kernel_timing.draw_bars(
        run,
        "steps",
        {"ours": [kernel_timing.ratio_band(found[name], name, over="base") for name in found]},
        config=config,
        sizes=f"{config.base}, {config.rows} rows, K = {config.num_adapters}, r = {config.rank}",
        groups=[name.replace("_", "\n") for name in found],
        ylabel="time over the base's step",
        title="A decode step of an engine with adapters",
    )
    report = written(config, found, ratios)
    run.finish(metrics=metrics, claims=claims(config, ratios), report=report)


def engines_of(config: Config, base: BaseModel, names: list[str]) -> dict[str, Engine]:
    """The base's engine, one with the bank and a table, and one with the bank and a router."""
    K = config.num_adapters
    hot = HotSet(AdapterBank(base.config, num_slots=K, max_rank=config.rank, dtype=config.dtype))
    for i, name in enumerate(names):
        hot.add(random_adapter(base.config, name, rank=config.rank, seed=config.seed + i))
    per_layer = config.router == "per_layer"
    learned = LearnedRouter(
        base.config.hidden_size,
        K,
        top_k=2,
        num_layers=base.config.num_layers if per_layer else None,
        after_layer=None if per_layer else base.config.num_layers // 8,
        rngs=nnx.Rngs(config.seed),
    )
    table = np.arange(base.config.vocab_size) % K

    def engine(hot_set, **profiles):
        each = Engine(
            base,
            hot_set,
            rows=config.rows,
            context=config.context,
            buckets=(PROMPT,),
            profiles=profiles,
            strategy=config.strategy,
        )
        each.warm_up()
        return each

    made = {"base": engine(None)}
    if set(config.arms) - {"learned"}:
        vocabulary = Profile(router=VocabularyRouter(table), adapters=names)
        made["adapters"] = engine(hot, vocabulary=vocabulary)
    if "learned" in config.arms:
        made["learned"] = engine(hot, learned=Profile(router=learned, adapters=names))
    return made


def beside_base(config: Config, base: Engine, engine: Engine, name: str, asks: list[dict]) -> Times:
    """Steps of both engines in turns, every row decoding."""
    answers = fill(config, engine, asks)
    of_base = fill(config, base, [{}] * config.rows)
    times = time_in_turns(
        {"base": base.step, name: engine.step}, repeats=config.repeats, warm_up=WARM_UP
    )
    check(config, name, answers)
    check(config, "base", of_base)
    for each, running in ((engine, answers), (base, of_base)):
        for answer in running:
            each.cancel(answer)
        each.step()
    return times


def fill(config: Config, engine: Engine, asks: list[dict]) -> list[Generation]:
    """Gives every row a request that outlasts the timing, and steps until all are decoded."""
    rng = np.random.default_rng(config.seed)
    prompts = rng.integers(0, engine.base.config.vocab_size, (config.rows, PROMPT)).tolist()
    answers = [
        engine.submit(
            Request(prompt=prompt, max_tokens=config.context - PROMPT, ignore_eos=True, **asked)
        )
        for prompt, asked in zip(prompts, asks, strict=True)
    ]
    while engine.num_running < config.rows:
        engine.step()
    return answers


def check(config: Config, name: str, answers: list[Generation]) -> None:
    """That every row was decoded to the end of the timing, with the adapters that the arm says."""
    steps = {len(each.tokens) for each in answers}
    failed = [each.error for each in answers if each.done]
    if failed or min(steps) <= WARM_UP + config.repeats:
        raise RuntimeError(f"arm {name}: rows ended before the timing did: {failed or steps}")
    used = [
        set() if each.routing is None else {int(i) for i in np.unique(each.routing.adapter_ids)}
        for each in answers
    ]
    alone = [{each.slots[each.request.adapter]} for each in answers if each.request.adapter]
    expected = {
        "base": all(not each for each in used),
        "one_adapter": used == alone and len(set.union(*used)) == 1,
        "mixed": used == alone and len(set.union(*used)) == min(config.rows, config.num_adapters),
        "vocabulary": len(set.union(*used)) > 1 and all(-1 not in each for each in used),
        "learned": len(set.union(*used)) > 1 and all(-1 not in each for each in used),
    }
    if not expected[name]:
        raise RuntimeError(f"arm {name}: rows were decoded with the slots {used}")


def claims(config: Config, ratios: dict[str, float]) -> list[Claim]:
    """Beside the paper's module without a verdict: most of a step is not what the module adds."""
    return [
        Claim(
            id=f"decode_overhead.{name}_over_one_adapter",
            kind="ratio",
            paper=paper,
            ours=ratios.get(arm, math.nan) / ratios.get("one_adapter", math.nan),
            unit="x",
            direction="lower",
            holds=None,
            note=f"{kernel_timing.device()}, {config.dtype}; ours is a decode step of "
            f"{config.base} with {config.rows} rows, over one adapter on all rows; the paper's is "
            "one module, d = 4096 and 32 × 128 tokens, so no verdict",
        )
        for name, arm, paper in (("k1", "mixed", 12.1), ("k2", "learned", 27.6))
    ]


def written(config: Config, found: dict[str, Times], ratios: dict[str, float]) -> str:
    of_aim = all(getattr(config, name) == AIM[name] for name in ("num_adapters", "rank", "rows"))
    mixed, aim = ratios.get("mixed"), AIM["mixed_over_base"]
    reached = "other sizes"
    if mixed is None:
        reached = "not timed"
    elif of_aim:
        reached = "yes" if mixed <= aim else "no"
    rows = [
        [
            name.replace("_", " "),
            kernel_timing.milliseconds(times, name),
            kernel_timing.milliseconds(times, "base"),
            f"{ratios[name]:.3f}",
        ]
        for name, times in found.items()
    ]
    return (
        f"# A decode step with adapters over the base's\n\n{config.base}, {config.rows} rows, "
        f"K = {config.num_adapters} resident adapters of rank {config.rank} on all seven "
        f"projections, a cache of {config.context} tokens a row, {config.router} router, strategy "
        f"{config.strategy}; {config.dtype} on {kernel_timing.device()}. Each arm is an engine "
        "with all of its rows decoding, beside one of the base alone: a turn is one `Engine.step` "
        "of both, in alternating order, with the transfer of tokens and routing and the host's "
        f"work on them. Medians of {config.repeats} turns (10th to 90th percentile in brackets); "
        "ratios are medians of paired ratios.\n\n"
        + markdown(["arm", "ms", "base beside it, ms", "over base"], rows)
        + "\n"
        + "".join(f"- {name.replace('_', ' ')}: {ARMS[name]}\n" for name in found)
        + "\n"
        + markdown(
            ["figure", "to reach", "ours", "reached"],
            [["mixed over base", f"at most {aim}", show(mixed), reached]],
        )
    )
