"""Figures 5 and 9: grouped products against BGMV, one adapter a row, over the size of the batch.

BGMV reads an adapter for every row and so grows with the batch from the first row on; grouped
reads each adapter once. Where they cross is found between two sizes, on a straight line through
the logarithms of both axes.
"""

import dataclasses
import math
from collections.abc import Sequence

from experiments import kernel_timing
from experiments.kernel_timing import Bench, TimingConfig, digests, ratio_claim, time_claim
from pallas_kernels.baselines import per_row_bgmv
from pallas_kernels.shapes import ProblemSize

__all__ = ["Config", "digests", "main"]

PAPER_SPEEDUP = {512: 1.98, 1024: 2.69}
PAPER_CROSSOVER = 160
PAPER_MS = 0.016  # of the kernel, at every batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TimingConfig):
    """Batches of tokens of width D = F, k = 1, their adapters drawn uniformly from K."""

    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512, 1024)
    width: int = 1024
    rank: int = 64
    num_slots: int = 8
    budget_s: float = 4.0

    def __post_init__(self):
        super().__post_init__()
        if sorted(set(self.batches)) != list(self.batches):
            raise ValueError(f"Config.batches = {self.batches}: expected growing numbers")


def main(config: Config, run) -> None:
    bench = Bench(config, run)
    arms = {
        "grouped": bench.routed("grouped"),
        "auto": bench.routed(),
        "bgmv": bench.routed("bgmv"),
        "per_row_bgmv": per_row_bgmv,
    }
    rows = {}
    for batch in config.batches:
        size = ProblemSize(
            num_tokens=batch,
            d_in=config.width,
            d_out=config.width,
            rank=config.rank,
            num_slots=config.num_slots,
            top_k=1,
        )
        rows[batch] = bench.times(arms, bench.inputs(size), label=f"N={batch}")

    # Our own BGMV where there is one, being the stronger of the two; else XLA's loop over rows.
    rival = "per_row_bgmv" if "bgmv" in bench.missing else "bgmv"
    speedups = {n: times.ratio(rival, over="grouped") for n, times in rows.items()}
    cross = crossover(list(speedups), list(speedups.values()))
    flat = rows[config.batches[-1]].median("grouped") / rows[config.batches[0]].median("grouped")
    metrics = {f"speedup_{n}": speedup for n, speedup in speedups.items()}
    metrics |= {"crossover_tokens": cross, "grouped_largest_over_smallest_batch": flat}
    note = f"over {rival}"
    claims = [
        ratio_claim(
            f"fig9.speedup_{n}", paper=paper, ours=speedups[n], direction="higher", note=note
        )
        for n, paper in PAPER_SPEEDUP.items()
        if n in speedups
    ]
    claim = ratio_claim(
        "fig9.crossover",
        paper=PAPER_CROSSOVER,
        ours=cross,
        direction="lower",
        kind="order",
        unit="tokens",
        note=note,
    )
    if math.isnan(cross) and config.batches[-1] > PAPER_CROSSOVER:
        claim = dataclasses.replace(claim, holds=False, note=f"{note}; the two do not cross")
    claims.append(claim)
    claims += [
        time_claim(f"fig5.grouped_{n}", paper_ms=PAPER_MS, seconds=rows[n].median("grouped"))
        for n in PAPER_SPEEDUP
        if n in rows
    ]
    where = f"at {cross:.0f} tokens" if math.isfinite(cross) else "nowhere in these batches"
    if cross == config.batches[0]:
        where = f"below {cross} tokens, the smallest batch"
    report = (
        f"# Grouped products against one adapter a row\n\nD = F = {config.width}, "
        f"r = {config.rank}, K = {config.num_slots}, k = 1, {kernel_timing.how(config)}\n\n"
        + kernel_timing.times_table({str(n): t for n, t in rows.items()}, list(arms), first="N")
        + f"\nGrouped overtakes {rival} {where}.\n"
        + bench.absent()
    )
    kernel_timing.draw(
        run,
        "batch",
        {
            name: (config.batches, [1e3 * times.median(name) for times in rows.values()])
            for name in arms
            if name not in bench.missing
        },
        xlabel="tokens N",
        ylabel="milliseconds",
        title="Grouped products against one adapter a row",
    )
    run.finish(metrics=metrics, claims=claims, report=report)


def crossover(batches: Sequence[int], speedups: Sequence[float]) -> float:
    """The batch from which on the speedup stays over 1; NaN where it ends below.

    Interpolated in the logarithms of both; the smallest batch where it is never below.
    """
    if not speedups[-1] > 1:
        return math.nan
    below = [i for i, speedup in enumerate(speedups) if speedup <= 1]
    if not below:
        return batches[0]
    i = below[-1]
    low, high = math.log(speedups[i]), math.log(speedups[i + 1])
    share = -low / (high - low)
    return math.exp(math.log(batches[i]) * (1 - share) + math.log(batches[i + 1]) * share)
