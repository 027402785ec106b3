"""Every strategy over a grid of sizes, the choice of `auto`, and what that choice gives away.

Regret is the time of the strategy that `auto` takes over that of the best, less one.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable

from experiments import kernel_timing
from experiments.kernel_timing import Bench, TimingConfig, digests
from experiments.run_folder import markdown, show
from pallas_kernels import bench as kernels_bench
from pallas_kernels.baselines import dense_loop, ragged_dot, single_lora
from pallas_kernels.shapes import WORKLOADS, ProblemSize
from pallas_kernels.strategy import STRATEGIES

__all__ = ["SWEEPS", "Config", "digests", "main"]

BASELINES = {"single_lora": single_lora, "dense_loop": dense_loop, "ragged_dot": ragged_dot}
# `reference` gathers weights for every entry; it is timed where they are no more than this.
REFERENCE_BYTES = 64 * 2**20
# What N = 2048 in float32 should reach on CPU. Layer: k = 2, r = 64, base product included, over
# one LoRA on every token, by (D, K).
FIGURE_TOKENS = 2048
LAYER_TARGETS = {
    (1024, 4): 1.4,
    (1024, 8): 1.4,
    (1024, 16): 1.4,
    (1024, 64): 2.5,
    (4096, 4): 1.2,
    (4096, 8): 1.2,
    (4096, 16): 1.3,
    (4096, 64): 1.6,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TimingConfig):
    """The grid: every N, D = F, r, K and k that go together (k ≤ K).

    num_tokens  the values of N
    widths      the values of D = F
    ranks       the values of r
    num_slots   the values of K
    top_ks      the values of k, adapters a token
    workload    how tokens choose adapters; see pallas_kernels.shapes
    """

    num_tokens: tuple[int, ...] = (64, 1024)
    widths: tuple[int, ...] = (1024,)
    ranks: tuple[int, ...] = (16, 64)
    num_slots: tuple[int, ...] = (4, 16, 64)
    top_ks: tuple[int, ...] = (1, 2)
    workload: str = "uniform"
    repeats: int = 7
    budget_s: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        if self.workload not in WORKLOADS:
            raise ValueError(
                f"Config.workload = {self.workload!r}: expected one of {', '.join(WORKLOADS)}"
            )
        if max(self.top_ks) > max(self.num_slots) or min(self.top_ks) > min(self.num_slots):
            raise ValueError(
                f"Config.num_slots = {self.num_slots}, top_ks = {self.top_ks}: expected for every "
                "K a k that is at most K, and for every k such a K"
            )

    def sizes(self) -> list[ProblemSize]:
        axes = (self.num_tokens, self.widths, self.ranks, self.num_slots, self.top_ks)
        return [
            ProblemSize(num_tokens=n, d_in=d, d_out=d, rank=r, num_slots=slots, top_k=k)
            for n, d, r, slots, k in itertools.product(*axes)
            if k <= slots
        ]


def _full() -> list[str]:
    """The grid of the CPU figures, as one point."""
    values = {
        "num_tokens": (2048,),
        "widths": (1024, 4096),
        "ranks": (16, 64),
        "num_slots": (4, 8, 16, 64),
        "top_ks": (1, 2, 4),
    }
    return ["\n".join(f"strategies.Config.{name} = {value}" for name, value in values.items())]


SWEEPS = {"full": _full}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One size: times of the update alone, and of a layer with its base product."""

    size: ProblemSize
    choice: str
    alone: kernels_bench.Times
    layer: kernels_bench.Times

    @property
    def best(self) -> str:
        """By the same paired ratios as the regret."""
        there = [name for name in STRATEGIES if name in self.alone]
        return min(there, key=lambda name: self.alone.ratio(name, over=self.choice))

    @property
    def regret(self) -> float:
        return 1 / self.alone.ratio(self.best, over=self.choice) - 1

    def over_auto(self, baseline: str) -> float:
        """A baseline's time over that of the strategy chosen, the update alone."""
        return self.alone.ratio(baseline, over=self.choice)

    @property
    def layer_overhead(self) -> float:
        return self.layer.ratio("auto", over="single_lora")

    def __str__(self):
        s = self.size
        return f"N={s.num_tokens} D={s.d_in} r={s.rank} K={s.num_slots} k={s.top_k}"


def main(config: Config, run) -> None:
    bench = Bench(config, run)
    cells = [measure(bench, config, size) for size in config.sizes()]
    worst = max(cells, key=lambda cell: cell.regret)
    figures = reached(cells)
    metrics = {
        "cells": len(cells),
        "regret_mean": statistics.fmean(cell.regret for cell in cells),
        "regret_worst": worst.regret,
        **{name: ours for name, _, ours, _ in figures if not name.startswith("regret")},
    }
    report = (
        f"# Every strategy over a grid of sizes\n\n{len(cells)} cells, tokens {config.workload}, "
        f"{kernel_timing.how(config)}\n\nThe regret of auto is {metrics['regret_mean']:.1%} on "
        f"average and {worst.regret:.1%} in the worst cell, {worst}.\n\n"
        + markdown(
            ["figure", "to reach", "ours", "reached"],
            [[name, aim, show(ours), verdict(ok)] for name, aim, ours, ok in figures],
        )
        + "\nThe figures are of N = 2048 in float32 on a CPU; --sweep=full has the whole grid.\n\n"
        "## Cells\n\n"
        "The update alone: milliseconds of what auto takes, then the time of every strategy over "
        "it, as medians of paired ratios, the best in bold. The last three are a layer with its "
        "base product over the same with one LoRA, and two baselines over auto.\n\n"
        + cell_table(cells)
        + f"\n`reference` is timed where the weights that it gathers are at most "
        f"{REFERENCE_BYTES // 2**20} MiB.\n" + bench.absent()
    )
    draw_by_slots(run, config, cells)
    run.finish(metrics=metrics, report=report)


def measure(bench: Bench, config: Config, size: ProblemSize) -> Cell:
    choice = bench.path("auto", size).strategy
    gathered = size.num_tokens * size.top_k * size.rank * (size.d_in + size.d_out) * 4
    small = [name for name in STRATEGIES if name != "reference" or gathered <= REFERENCE_BYTES]
    arms: dict[str, Callable] = {
        name: bench.routed(name) for name in STRATEGIES if name in (choice, *small)
    }
    label = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(size).items())
    inputs = bench.inputs(size, config.workload, base_product=True)
    alone = bench.times(arms | BASELINES, inputs, label=f"{label}, update")
    layer = bench.times(
        {"single_lora": single_lora, "auto": bench.routed()},
        inputs,
        label=f"{label}, layer",
        base_product=True,
    )
    return Cell(size=size, choice=choice, alone=alone, layer=layer)


def reached(cells: list[Cell]) -> list[tuple[str, str, float | None, bool | None]]:
    """Name, aim, our number, and whether it is reached; None where the grid has no such cell.

    The figures are of N = 2048; a grid without it has numbers and no verdicts.
    """
    rows = []
    there = [cell for cell in cells if cell.size.num_tokens == FIGURE_TOKENS]
    cells = there or cells

    def row(name, aim, values, of, limit, *, at_most):
        ours = of(values) if values else math.nan
        known = math.isfinite(ours) and bool(there)
        ok = (ours <= limit if at_most else ours >= limit) if known else None
        rows.append((name, aim, ours if math.isfinite(ours) else None, ok))

    regrets = [cell.regret for cell in cells]
    row("regret_mean", "at most 0.05", regrets, statistics.fmean, 0.05, at_most=True)
    row("regret_worst", "at most 0.2", regrets, max, 0.2, at_most=True)
    at_16 = [cell.over_auto("dense_loop") for cell in cells if cell.size.num_slots == 16]
    row("dense_loop_over_auto_least_K16", "at least 3", at_16, min, 3, at_most=False)
    ragged = [cell.over_auto("ragged_dot") for cell in cells]
    row("ragged_dot_over_auto_least", "at least 1.5", ragged, min, 1.5, at_most=False)
    for (width, slots), limit in LAYER_TARGETS.items():
        found = [
            cell.layer_overhead
            for cell in cells
            if (cell.size.d_in, cell.size.num_slots, cell.size.rank, cell.size.top_k)
            == (width, slots, 64, 2)
        ]
        name = f"layer_over_single_D{width}_K{slots}"
        row(name, f"at most {limit}", found, max, limit, at_most=True)
    return rows


def verdict(ok: bool | None) -> str:
    return {True: "yes", False: "no", None: "other sizes"}[ok]


def cell_table(cells: list[Cell]) -> str:
    def over_choice(cell, name):
        if name not in cell.alone:
            return "-"
        text = f"{cell.alone.ratio(name, over=cell.choice):.3f}"
        return f"**{text}**" if name == cell.best else text

    header = ["size", "auto takes", "ms", *STRATEGIES, "regret", "layer"]
    header += ["dense loop", "ragged dot"]
    rows = [
        [
            str(cell),
            cell.choice,
            f"{1e3 * cell.alone.median(cell.choice):.3g}",
            *(over_choice(cell, name) for name in STRATEGIES),
            f"{cell.regret:.1%}",
            f"{cell.layer_overhead:.2f}",
            f"{cell.over_auto('dense_loop'):.1f}",
            f"{cell.over_auto('ragged_dot'):.1f}",
        ]
        for cell in cells
    ]
    return markdown(header, rows)


def draw_by_slots(run, config: Config, cells: list[Cell]) -> None:
    """Time over one LoRA's by K, for the largest N, D and r, and k = 2 where there is one."""
    top_k = 2 if 2 in config.top_ks else max(config.top_ks)
    fixed = (max(config.num_tokens), max(config.widths), max(config.ranks), top_k)
    shown = [
        cell
        for cell in cells
        if (cell.size.num_tokens, cell.size.d_in, cell.size.rank, cell.size.top_k) == fixed
    ]

    def over_one_lora(name_of):
        return {
            cell.size.num_slots: kernel_timing.ratio_band(
                cell.alone, name_of(cell), over="single_lora"
            )
            for cell in shown
        }

    curves = {
        name: over_one_lora(lambda cell, name=name: name)
        for name in (*STRATEGIES, "dense_loop", "ragged_dot")
    }
    curves["auto takes"] = over_one_lora(lambda cell: cell.choice)
    n, d, r, k = fixed
    kernel_timing.draw_curves(
        run,
        "by_slots",
        curves,
        xlabel="adapters K",
        ylabel="time over one LoRA's",
        config=config,
        sizes=f"N = {n}, D = F = {d}, r = {r}, k = {k}",
        title=f"Every strategy over one LoRA, the update alone, tokens {config.workload}",
    )
