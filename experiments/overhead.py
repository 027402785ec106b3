"""What routing costs: the whole routed forward pass over the base's, paired in one process."""

import dataclasses
import functools
from typing import Literal

from experiments.registry import check_config
from experiments.turns import time_in_turns
from pallas_kernels.strategy import check_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One shape, timed `repeats` times in alternating order after a warm-up.

    base          base model: a name, a folder or a .gguf file
    rows          rows of one forward pass
    seq_len       tokens of a row
    num_adapters  K slots, all with random weights
    rank          R, of every adapter on all seven projections
    top_k         adapters per token
    router        one decision a layer, or one shared
    repeats       turns, in each of which every arm runs once
    strategy      how `lora_delta` computes; see pallas_kernels
    """

    base: str = "smollm2-135m"
    rows: int = 2
    seq_len: int = 256
    num_adapters: int = 4
    rank: int = 8
    top_k: int = 2
    router: Literal["per_layer", "shared"] = "per_layer"
    strategy: str = "auto"
    repeats: int = 21
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        try:
            check_names(self.strategy, "auto")
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"Config.strategy: {error}") from None


def digests(config: Config) -> dict[str, str]:
    from molora_jax.models import base_digest

    return {"base": base_digest(config.base)}


def main(config: Config, run) -> None:
    import jax
    import numpy as np
    from flax import nnx

    from molora_jax.models import load_base
    from molora_jax.routing import LearnedRouter, SequenceRouter

    base = load_base(config.base)
    rng = np.random.default_rng(config.seed)
    shape = (config.rows, config.seq_len)
    tokens = rng.integers(0, base.config.vocab_size, shape).astype(np.int32)
    stacks = random_stacks(base.config, config.num_adapters, config.rank, rng)
    one = jax.tree.map(lambda leaf: leaf[:, :1], stacks)
    where = (
        {"num_layers": base.config.num_layers}
        if config.router == "per_layer"
        else {"after_layer": base.config.num_layers // 8}
    )
    router = LearnedRouter(
        base.config.hidden_size,
        config.num_adapters,
        top_k=config.top_k,
        rngs=nnx.Rngs(config.seed),
        **where,
    )
    always_0 = SequenceRouter(np.zeros(config.rows, np.int32))

    @jax.jit
    def forward(decoder, routed):
        out = decoder(tokens, strategy=config.strategy, **routed)
        return decoder.logits(out.hidden)

    arms = {
        "base": {},
        "one_lora": {"adapters": one, "router": always_0},
        "routed": {
            "adapters": stacks,
            "router": router,
            "column_to_slot": np.arange(config.num_adapters),
        },
    }
    times = time_in_turns(
        {name: functools.partial(forward, base.decoder, routed) for name, routed in arms.items()},
        repeats=config.repeats,
    )
    for repeat in range(config.repeats):
        run.log_metrics({name: times.seconds[name][repeat] for name in arms}, step=repeat)
    metrics = {
        "routed_over_base": times.ratio("routed", over="base"),
        "routed_over_one_lora": times.ratio("routed", over="one_lora"),
        "one_lora_over_base": times.ratio("one_lora", over="base"),
    }
    setting = (
        f"{config.base}, {config.rows} × {config.seq_len} tokens, K = {config.num_adapters}, "
        f"k = {config.top_k}, r = {config.rank}, all seven projections, {config.router} router, "
        f"strategy {config.strategy}"
    )
    report = (
        f"# Routed forward pass over the base's\n\n{setting}. Median of {config.repeats} paired "
        "ratios; the arms alternate in order.\n\n| over | ratio |\n| --- | --- |\n"
        + "".join(
            f"| {name.replace('_', ' ')} | {value:.3f} |\n" for name, value in metrics.items()
        )
    )
    run.finish(metrics=metrics, report=report)


def random_stacks(config, num_slots: int, rank: int, rng) -> dict:
    """A full bank of adapters with random, non-zero A and B on all seven projections."""
    import jax.numpy as jnp

    from molora_jax.adapters import AdapterStack

    L = config.num_layers

    def draw(width):
        values = rng.standard_normal((L, num_slots, rank, width), dtype=jnp.float32)
        return jnp.asarray(values / width**0.5)

    ranks = jnp.full((L, num_slots), rank, jnp.int32)
    return {
        name: AdapterStack(lora_a=draw(d_in), lora_b=draw(d_out), ranks=ranks)
        for name, (d_in, d_out) in config.projection_sizes().items()
    }
