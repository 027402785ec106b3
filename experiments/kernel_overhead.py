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
from pallas_kernels.strategy import STRATEGIES

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

    def __post_init__(self):
        super().__post_init__()
        if self.strategy not in (*STRATEGIES, "auto"):
            raise ValueError(
                f"Config.strategy = {self.strategy!r}: expected one of auto, "
                f"{', '.join(STRATEGIES)}"
            )


def main(config: Config, run) -> None:
    bench = Bench(config, run)
    size = ProblemSize(
        num_tokens=config.num_tokens,
        d_in=config.width,
        d_out=config.width,
        rank=config.rank,
        num_slots=config.num_slots,
        top_k=1,
    )
    # One decision for each arm, of which a compiled arm keeps its own.
    routing = {"fixed": workload("identical", size, seed=config.seed)}
    for top_k in (1, 2, 4):
        of_k = dataclasses.replace(size, top_k=top_k)
        routing[f"k{top_k}"] = workload("uniform", of_k, seed=config.seed)
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
    claims = [
        ratio_claim(
            f"table16.{name}_overhead", paper=paper, ours=of_update[name], direction="lower"
        )
        for name, paper in PAPER.items()
    ]
    claims += [
        time_claim(f"table16.{name}", paper_ms=ms, seconds=alone.median(name))
        for name, ms in PAPER_MS.items()
        if name in alone
    ]
    over = [
        [label, *(f"{ratio:.2f}" for ratio in of_label.values())]
        for label, of_label in ratios.items()
    ]
    over.append(["the paper's", *(f"{ratio}" for ratio in PAPER.values())])
    report = (
        f"# Routed adapters over one LoRA on every token\n\nN = {size.num_tokens}, "
        f"D = F = {size.d_in}, r = {size.rank}, K = {size.num_slots}, strategy {config.strategy}, "
        f"{kernel_timing.how(config)}\n\n"
        + kernel_timing.times_table(rows, list(arms), first="what")
        + "\nOver the single LoRA:\n\n"
        + markdown(["what", *PAPER], over)
        + f"\n{str(__doc__).partition(chr(10) * 2)[2]}"
        + bench.absent()
    )
    curves = {
        label: ((1, 2, 4), [of_label[f"k{top_k}"] for top_k in (1, 2, 4)])
        for label, of_label in {**ratios, "the paper's": PAPER}.items()
    }
    kernel_timing.draw(
        run,
        "overhead",
        curves,
        xlabel="adapters a token, k",
        ylabel="time over one LoRA's",
        title="What routing costs",
    )
    run.finish(metrics=metrics, claims=claims, report=report)
