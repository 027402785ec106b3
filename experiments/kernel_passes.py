"""Tables 3 and 4: a pass for each adapter against one pass for all, and the ladder between them.

The paper's "per-sequence" is K passes over all tokens, of which a token keeps its own.
Real multi-adapter kernels take an adapter for each row, so table3 has those beside it.
"""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_timing
from experiments.kernel_timing import Bench, TimingConfig, digests, ratio_claim, time_claim
from experiments.run_folder import markdown
from pallas_kernels.baselines import BASELINES, HOST, one_pass
from pallas_kernels.bench import host_arm
from pallas_kernels.shapes import ProblemSize

__all__ = ["Config", "digests", "main"]

PAPER_SIZES = {"num_tokens": 2048, "width": 4096, "rank": 64, "num_slots": 4}
# The rungs of Table 4 with the paper's milliseconds. Table 3 is the second over the third.
LADDER = {
    "per_sequence_paging": 7.48,
    "per_sequence_hot_set": 5.88,
    "per_token_hot_set": 1.43,
    "per_token_graph": 1.36,
}


PAPER_MS = {
    "per_token": LADDER["per_token_hot_set"],
    "full_passes": LADDER["per_sequence_hot_set"],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TimingConfig):
    """N tokens of width D = F, k = 1; `resident` adapters on the device where there is paging.

    resident  adapters that fit the device where the others are paged in
    """

    num_tokens: int = 2048
    width: int = 1024
    rank: int = 64
    num_slots: int = 4
    resident: int = 2
    repeats: int = 9

    def sizes(self) -> list[ProblemSize]:
        size = ProblemSize(
            num_tokens=self.num_tokens,
            d_in=self.width,
            d_out=self.width,
            rank=self.rank,
            num_slots=self.num_slots,
            top_k=1,
        )
        return [size]


def main(config: Config, run) -> None:
    bench = Bench(config, run)
    (size,) = config.sizes()
    sizes = (
        f"N = {size.num_tokens}, D = F = {size.d_in}, r = {size.rank}, K = {size.num_slots}, k = 1"
    )
    (table3 if run.experiment == "table3" else table4)(bench, config, size, sizes)


def table3(bench: Bench, config: Config, size: ProblemSize, sizes: str) -> None:
    baselines = {name: f for name, f in BASELINES.items() if name != "single_lora"}
    arms = {"per_token": bench.routed(), **baselines}
    times = bench.times(arms, bench.inputs(size), label="update", host=tuple(HOST))
    inputs = bench.inputs(size, base_product=True)
    layer = bench.times(
        {"one_lora": BASELINES["single_lora"], "per_token": bench.routed()},
        inputs,
        label="with the base product",
        base_product=True,
    )
    ours = times.ratio("full_passes", over="per_token")
    of_layer = size.num_slots * layer.ratio("one_lora", over="per_token")
    metrics = {
        **{f"{name}_over_per_token": times.ratio(name, over="per_token") for name in baselines},
        "layer_passes_over_per_token": of_layer,
    }
    where = kernel_timing.unlike(config, **PAPER_SIZES)
    claims = [
        ratio_claim(
            "table3.per_token_speedup",
            where=where,
            paper=4.1,
            ours=ours,
            direction="higher",
            note="full passes over per token, the update alone",
        ),
    ]
    claims += [
        time_claim(f"table3.{name}", where=where, paper_ms=ms, seconds=times.median(arm))
        for name, arm, ms in (
            ("per_sequence", "full_passes", PAPER_MS["full_passes"]),
            ("per_token", "per_token", PAPER_MS["per_token"]),
        )
    ]
    rows = [
        [
            name,
            kernel_timing.milliseconds(times, name),
            f"{times.ratio(name, over='per_token'):.2f}",
        ]
        for name in arms
    ]
    near = ""
    if jax.default_backend() == "cpu" and times.ratio("per_adapter_loop", "per_token") < 1.3:
        near = (
            "\nThe loop driven by the host comes close to ours here, or passes it: a launch costs "
            "little on a CPU, and the host may read the ids, so that no row is padded to a tile.\n"
        )
    report = (
        f"# A pass for each adapter against one pass for all\n\n{sizes}, "
        f"{kernel_timing.how(config)}\n\n"
        + markdown(["the update alone", "ms", "over per token"], rows)
        + f"\nAuto takes {bench.path('auto', size).strategy} here.\n\n"
        + kernel_timing.explain(list(arms))
        + near
        + f"\nWith the base product, K = {size.num_slots} passes of a layer with one LoRA against "
        f"one routed pass: {of_layer:.2f} times. This is computed, K times one measured pass over "
        "the measured routed pass; putting the K outputs together is not counted.\n"
        + bench.absent()
    )
    kernel_timing.draw_bars(
        bench.run,
        "passes",
        {
            "ours": [kernel_timing.band(times, name) for name in arms],
            "the paper's, H100": [
                kernel_timing.exactly(PAPER_MS.get(name, math.nan)) for name in arms
            ],
        },
        config=config,
        sizes=sizes,
        groups=[name.replace("_", "\n") for name in arms],
        ylabel="milliseconds",
        title="A pass for each adapter against one pass for all, the update alone",
    )
    bench.run.finish(metrics=metrics, claims=claims, report=report)


def table4(bench: Bench, config: Config, size: ProblemSize, sizes: str) -> None:
    inputs = bench.inputs(size)
    # A hot set lies on the device adapter by adapter, or stacked; a paged one lies on the host.
    stacks = tuple((layouts(a), layouts(b)) for a, b in inputs.stacks)
    inputs = dataclasses.replace(inputs, stacks=stacks)
    routed, step = bench.routed(), jax.jit(one_pass)
    cache = Resident(config.resident)

    def passes(x, lora_a, lora_b, routing, base, *, adapter):
        y = base
        for slot in range(size.num_slots):
            a, b = adapter(lora_a, lora_b, slot)
            y = step(x, a, b, routing, y, slot)
        return y

    def on_device(lora_a, lora_b, slot):
        return lora_a["separate"][slot], lora_b["separate"][slot]

    def per_token(x, lora_a, lora_b, routing, base):
        return routed(x, lora_a["stacked"], lora_b["stacked"], routing, base)

    arms = {
        "per_sequence_paging": host_arm(functools.partial(passes, adapter=cache.adapter)),
        "per_sequence_hot_set": host_arm(functools.partial(passes, adapter=on_device)),
        "per_token_hot_set": host_arm(per_token),
        "per_token_graph": per_token,
    }
    times = bench.times(arms, inputs, label="ladder", calls=1)
    names = list(arms)
    metrics = {f"{name}_ms": 1e3 * times.median(name) for name in names}
    metrics["misses_per_pass"] = cache.misses / max(cache.reads, 1)
    where = kernel_timing.unlike(config, **PAPER_SIZES)
    # What is special to a GPU in a rung, as a reason for no verdict elsewhere.
    special = {
        "per_sequence_paging": "a CPU pages nothing to another memory",
        "per_token_graph": "the ratio is one of launches",
    }
    claims = [
        ratio_claim(
            f"table4.{upper}_over_{lower}",
            where=where,
            only_gpu=special.get(lower, special.get(upper, "")),
            paper=LADDER[upper] / LADDER[lower],
            ours=times.ratio(upper, over=lower),
            direction="higher",
        )
        for upper, lower in [*itertools.pairwise(names), (names[0], names[-1])]
    ]
    claims += [
        time_claim(f"table4.{name}", where=where, paper_ms=ms, seconds=times.median(name))
        for name, ms in LADDER.items()
    ]
    rows = [
        [name.replace("_", " "), f"{LADDER[name]}", kernel_timing.milliseconds(times, name)]
        for name in names
    ]
    graph = (
        "one program whose launches are CUDA graphs"
        if jax.default_backend() == "gpu"
        else "one compiled program, there being no CUDA graphs on a CPU"
    )
    report = (
        f"# From a pass for each adapter to one program\n\n{sizes}, "
        f"{kernel_timing.how(config)}\n\n"
        + markdown(["rung", "paper, ms on an H100", "ours, ms"], rows)
        + "\nPer sequence: a program for each adapter over all tokens. Paging: adapters are copied "
        f"from the host, of which the device keeps the {config.resident} used last; "
        f"{metrics['misses_per_pass']:.0%} of the passes copied. Per token, hot set: `lora_delta` "
        f"called from Python, which launches its pieces one by one. Graph: {graph}.\n"
        + bench.absent()
    )
    kernel_timing.draw_bars(
        bench.run,
        "ladder",
        {
            "ours": [kernel_timing.band(times, name) for name in names],
            "the paper's, H100": [kernel_timing.exactly(ms) for ms in LADDER.values()],
        },
        config=config,
        sizes=sizes,
        groups=[name.replace("_", "\n") for name in names],
        ylabel="milliseconds",
        title="From a pass for each adapter to one program",
    )
    bench.run.finish(metrics=metrics, claims=claims, report=report)


def layouts(stack) -> dict:
    """A stack, its adapters on the device, and its adapters on the host."""
    host = tuple(np.array(each) for each in stack)
    return {"stacked": stack, "separate": tuple(stack), "host": host}


class Resident:
    """The `room` adapters used last are on the device; any other is copied from the host."""

    def __init__(self, room: int):
        self.room, self.reads, self.misses = room, 0, 0
        self._kept: collections.OrderedDict = collections.OrderedDict()

    def adapter(self, lora_a, lora_b, slot: int):
        key = (id(lora_a["host"]), slot)
        self.reads += 1
        if key not in self._kept:
            self.misses += 1
            while len(self._kept) >= self.room:
                self._kept.popitem(last=False)
            pair = (lora_a["host"][slot], lora_b["host"][slot])
            self._kept[key] = tuple(jnp.array(each, copy=True) for each in pair)
        self._kept.move_to_end(key)
        return self._kept[key]
