"""Table 9: row blocks of fixed size against the size that the plan chooses, by skew of the tokens.

The paper's adaptive tiling is held against a fixed 64×64. Here a plan has one block size, chosen
by N, k and K; the table has it beside every fixed one, and the best of those for each workload.
"""

import dataclasses

from experiments import kernel_timing
from experiments.kernel_timing import Bench, TimingConfig, digests, ratio_claim
from experiments.run_folder import markdown
from pallas_kernels.bench import Times
from pallas_kernels.shapes import ProblemSize

__all__ = ["Config", "digests", "main"]

PAPER = {"uniform": 1.04, "skewed": 1.17, "extreme": 1.40}  # fixed 64×64 over adaptive
FIXED = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TimingConfig):
    """N tokens of width D = F, k = 1, in blocks of each size, 64 among them.

    blocks  rows of a block, each size timed
    """

    num_tokens: int = 1024
    width: int = 1024
    rank: int = 64
    num_slots: int = 4
    blocks: tuple[int, ...] = (16, 32, 64, 128, 256)

    def __post_init__(self):
        super().__post_init__()
        if FIXED not in self.blocks:
            raise ValueError(f"Config.blocks = {self.blocks}: expected {FIXED}, the paper's, in it")

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
    chosen = bench.path("grouped", size).block
    fixed = {f"block_{block}": block for block in config.blocks}
    functions = {"chosen": bench.routed("grouped")}
    functions |= {name: bench.routed("grouped", block=block) for name, block in fixed.items()}
    arms = bench.compiled(functions, bench.inputs(size))  # the same programs for every workload
    rows = {
        workload: bench.times(arms, bench.inputs(size, workload), label=workload)
        for workload in PAPER
    }
    where = kernel_timing.unlike(config, width=4096, rank=64)
    metrics, claims = {}, []
    for workload, times in rows.items():
        over = times.ratio(f"block_{FIXED}", over="chosen")
        claim = f"table9.{workload}_fixed_over_chosen"
        claims.append(
            ratio_claim(
                claim,
                where=where,
                paper=PAPER[workload],
                ours=over,
                direction="higher",
                note=f"{FIXED} rows over {chosen}, the chosen block",
            )
        )
        metrics[f"{workload}_fixed_over_chosen"] = over
        metrics[f"{workload}_chosen_over_best_fixed"] = over_best_fixed(times)
    metrics["chosen_block"] = chosen
    paired = [
        [
            workload,
            *(f"{times.ratio('chosen', over=name):.2f}" for name in fixed),
            f"{metrics[f'{workload}_chosen_over_best_fixed']:.2f}",
        ]
        for workload, times in rows.items()
    ]
    sizes = (
        f"N = {size.num_tokens}, D = F = {size.d_in}, r = {size.rank}, K = {size.num_slots}, k = 1"
    )
    report = (
        f"# Row blocks of fixed size against the chosen one\n\nThe chosen block has {chosen} "
        f"rows. {sizes}, strategy grouped, "
        f"{kernel_timing.how(config)}\n\n"
        + kernel_timing.times_table(rows, list(arms), first="tokens")
        + "\nTime of the chosen block over that of each fixed one, medians of paired ratios; the "
        "best fixed block is the one with the largest:\n\n"
        + markdown(["tokens", *(f"over {b}" for b in config.blocks), "over the best fixed"], paired)
        + f"\n{str(__doc__).partition(chr(10) * 2)[2]}"
        + bench.absent()
    )
    kernel_timing.draw_curves(
        run,
        "blocks",
        {
            workload: {block: kernel_timing.band(times, name) for name, block in fixed.items()}
            for workload, times in rows.items()
        },
        marks={w: (chosen, kernel_timing.band(times, "chosen")) for w, times in rows.items()},
        config=config,
        sizes=sizes,
        xlabel="rows in a block",
        ylabel="milliseconds",
        title=f"Time by block size (star: chosen, {chosen} rows)",
    )
    run.finish(metrics=metrics, claims=claims, report=report)


def over_best_fixed(times: Times) -> float:
    """The chosen block's time over that of the best fixed one, best by these same paired ratios."""
    return max(times.ratio("chosen", over=name) for name in times.seconds if name != "chosen")
