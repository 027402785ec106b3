"""Figures 5 and 9: grouped products against BGMV, one adapter a row, over the size of the batch.

BGMV reads an adapter for every row and so grows with the batch from the first row on; grouped
reads each adapter once. Where they cross is found between two sizes, on a straight line through
the logarithms of both axes.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

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
    """Batches of tokens of width D = F, k = 1, their adapters drawn uniformly from K.

    batches  numbers of tokens, growing
    """

    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512, 1024)
    width: int = 1024
    rank: int = 64
    num_slots: int = 8
    budget_s: float = 4.0

    def __post_init__(self):
        super().__post_init__()
        if sorted(set(self.batches)) != list(self.batches):
            raise ValueError(f"Config.batches = {self.batches}: expected growing numbers")

    def sizes(self) -> list[ProblemSize]:
        return [
            ProblemSize(
                num_tokens=batch,
                d_in=self.width,
                d_out=self.width,
                rank=self.rank,
                num_slots=self.num_slots,
                top_k=1,
            )
            for batch in self.batches
        ]


def main(config: Config, run) -> None:
    bench = Bench(config, run)
    arms = {
        "grouped": bench.routed("grouped"),
        "auto": bench.routed(),
        "bgmv": bench.routed("bgmv"),
        "per_row_bgmv": per_row_bgmv,
    }
    rows, taken = {}, {}
    for batch, size in zip(config.batches, config.sizes(), strict=True):
        taken[batch] = bench.path("auto", size).strategy
        rows[batch] = bench.times(arms, bench.inputs(size), label=f"N={batch}")

    # Our own BGMV where there is one, being the stronger of the two; else XLA's loop over rows.
    rival = "per_row_bgmv" if "bgmv" in bench.missing else "bgmv"
    speedups = {n: times.ratio(rival, over="grouped") for n, times in rows.items()}
    cross = crossover(list(speedups), list(speedups.values()))
    flat = rows[config.batches[-1]].median("grouped") / rows[config.batches[0]].median("grouped")
    metrics = {f"speedup_{n}": speedup for n, speedup in speedups.items()}
    metrics |= {"crossover_tokens": cross, "grouped_largest_over_smallest_batch": flat}
    note = f"over {rival}"
    where = kernel_timing.unlike(config, width=4096, rank=64, num_slots=8)
    claims = [
        ratio_claim(
            f"fig9.speedup_{n}",
            where=where,
            paper=paper,
            ours=speedups[n],
            direction="higher",
            note=note,
        )
        for n, paper in PAPER_SPEEDUP.items()
        if n in speedups
    ]
    claim = ratio_claim(
        "fig9.crossover",
        where=where,
        paper=PAPER_CROSSOVER,
        ours=cross,
        direction="lower",
        kind="order",
        unit="tokens",
        note=note,
        only_gpu="where they cross depends on launches and memory",
    )
    if math.isnan(cross) and config.batches[-1] > PAPER_CROSSOVER:
        on_gpu = jax.default_backend() == "gpu"
        end = "the two do not cross" + ("" if on_gpu else ", and off a GPU that is no verdict")
        claim = dataclasses.replace(
            claim, holds=False if on_gpu else None, note=f"{where}; {note}; {end}"
        )
    claims.append(claim)
    claims += [
        time_claim(
            f"fig5.grouped_{n}",
            where=where,
            paper_ms=PAPER_MS,
            seconds=rows[n].median("grouped"),
        )
        for n in PAPER_SPEEDUP
        if n in rows
    ]
    place = f"at {cross:.0f} tokens" if math.isfinite(cross) else "nowhere in these batches"
    if cross == config.batches[0]:
        place = f"below {cross} tokens, the smallest batch"
    sizes = f"D = F = {config.width}, r = {config.rank}, K = {config.num_slots}, k = 1"
    report = (
        f"# Grouped products against one adapter a row\n\n{sizes}, "
        f"{kernel_timing.how(config)}\n\n"
        + kernel_timing.times_table({str(n): t for n, t in rows.items()}, list(arms), first="N")
        + f"\nGrouped overtakes {rival} {place}. Auto takes "
        f"{kernel_timing.taken(taken)} tokens.\n\n"
        + kernel_timing.explain(list(arms))
        + bench.absent()
    )
    kernel_timing.draw_curves(
        run,
        "batch",
        {name: {n: kernel_timing.band(t, name) for n, t in rows.items()} for name in arms},
        config=config,
        sizes=sizes,
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
