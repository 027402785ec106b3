"""Table 16: what k = 1, 2, 4 routed adapters a token cost over one LoRA on every token.

The paper's single LoRA, 0.082 ms, is too fast for a base product to be in it, so its ratios are
held against the update alone; with the base product, which every use of it has, they stand beside.
Deciding where tokens go is not in it: `overhead` times the router with a whole model.
"""

import dataclasses

from experiments import kernel_timing
from experiments.kernel_timing import Bench, TimingConfig, digests, ratio_claim, time_claim
from experiments.run_folder import markdown
from pallas_kernels.baselines import single_lora
from pallas_kernels.shapes import ProblemSize, workload

__all__ = ["Config", "digests", "main"]

# Times over the single LoRA's. "fixed" sends every token to one adapter.
PAPER = {"fixed": 10.9, "k1": 12.1, "k2": 27.6, "k4": 48.8}
PAPER_MS = {"single": 0.082, "fixed": 0.894, "k1": 0.995, "k2": 2.267, "k4": 4.001}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TimingConfig):
    """N tokens of width D = F over K adapters; `strategy` as in `lora_delta`."""

    num_tokens: int = 2048
    width: int = 1024
    rank: int = 64
    num_slots: int = 8
    strategy: str = "auto"
    budget_s: float = 20.0

    def sizes(self) -> list[ProblemSize]:
        return [
            ProblemSize(
                num_tokens=self.num_tokens,
                d_in=self.width,
                d_out=self.width,
                rank=self.rank,
                num_slots=self.num_slots,
                top_k=top_k,
            )
            for top_k in (1, 2, 4)
        ]


def main(config: Config, run) -> None:
    bench = Bench(config, run)
    size = config.sizes()[0]
    # One decision for each arm, of which a compiled arm keeps its own.
    routing = {"fixed": workload("identical", size, seed=config.seed)}
    for of_k in config.sizes():
        routing[f"k{of_k.top_k}"] = workload("uniform", of_k, seed=config.seed)
    taken = {of_k.top_k: bench.path(config.strategy, of_k).strategy for of_k in config.sizes()}
    routed = bench.routed(config.strategy)

    def arm(function, name):
        return lambda x, a, b, routing, base: function(x, a, b, routing[name], base)

    arms = {"single": arm(single_lora, "fixed"), **{name: arm(routed, name) for name in routing}}
    rows = {}
    for label, base_product in (("the update alone", False), ("with the base product", True)):
        inputs = bench.inputs(size, base_product=base_product)
        inputs = dataclasses.replace(inputs, routing=routing)
        rows[label] = bench.times(arms, inputs, label=label, base_product=base_product)
    alone = rows["the update alone"]
    ratios = {
        label: {name: times.ratio(name, over="single") for name in routing}
        for label, times in rows.items()
    }
    of_update, of_layer = ratios.values()
    metrics = {f"{name}_over_single": ratio for name, ratio in of_update.items()}
    metrics |= {f"{name}_over_single_with_base": ratio for name, ratio in of_layer.items()}
    where = kernel_timing.unlike(config, num_tokens=32 * 128, width=4096)
    claims = [
        ratio_claim(
            f"table16.{name}_overhead",
            where=where,
            paper=paper,
            ours=of_update[name],
            direction="lower",
            note="the update alone",
        )
        for name, paper in PAPER.items()
    ]
    claims += [
        time_claim(f"table16.{name}", where=where, paper_ms=ms, seconds=alone.median(name))
        for name, ms in PAPER_MS.items()
        if name in alone
    ]
    over = [
        [label, *(f"{ratio:.2f}" for ratio in of_label.values())]
        for label, of_label in ratios.items()
    ]
    over.append(["the paper's", *(f"{ratio}" for ratio in PAPER.values())])
    sizes = f"N = {size.num_tokens}, D = F = {size.d_in}, r = {size.rank}, K = {size.num_slots}"
    report = (
        f"# Routed adapters over one LoRA on every token\n\n{sizes}, strategy {config.strategy}, "
        f"{kernel_timing.how(config)}\n\n"
        + kernel_timing.times_table(rows, list(arms), first="what")
        + "\nOver the single LoRA:\n\n"
        + markdown(["what", *PAPER], over)
        + (
            f"\nFor k, auto takes {kernel_timing.taken(taken)}.\n"
            if config.strategy == "auto"
            else ""
        )
        + "\n"
        + kernel_timing.explain(list(arms))
        + f"- k1, k2, k4: the routed update, a token's adapters drawn uniformly of "
        f"K = {size.num_slots}\n\n{str(__doc__).partition(chr(10) * 2)[2]}" + bench.absent()
    )
    series = {
        label: [kernel_timing.ratio_band(times, name, over="single") for name in PAPER]
        for label, times in rows.items()
    }
    series["the paper's, H100"] = [kernel_timing.exactly(ratio) for ratio in PAPER.values()]
    kernel_timing.draw_bars(
        run,
        "overhead",
        series,
        config=config,
        sizes=sizes,
        groups=["fixed", "k = 1", "k = 2", "k = 4"],
        ylabel="time over one LoRA's",
        title="What routing costs",
    )
    run.finish(metrics=metrics, claims=claims, report=report)
