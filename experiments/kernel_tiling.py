"""Table 9: row blocks of fixed size against the size that the plan chooses, by skew of the tokens.

The paper's adaptive tiling is held against a fixed 64×64. Here a plan has one block size, chosen
by N, k and K; the table has it beside every fixed one, and the best of those for each workload.
"""

import dataclasses

from experiments import kernel_timing
from experiments.kernel_timing import Bench, TimingConfig, digests, ratio_claim
from pallas_kernels.shapes import ProblemSize

__all__ = ["Config", "digests", "main"]

PAPER = {"uniform": 1.04, "skewed": 1.17, "extreme": 1.40}  # fixed 64×64 over adaptive
FIXED = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TimingConfig):
    """N tokens of width D = F, k = 1, in blocks of each size, 64 among them."""

    num_tokens: int = 1024
    width: int = 1024
    rank: int = 64
    num_slots: int = 4
    blocks: tuple[int, ...] = (16, 32, 64, 128, 256)

    def __post_init__(self):
        super().__post_init__()
        if FIXED not in self.blocks:
            raise ValueError(f"Config.blocks = {self.blocks}: expected {FIXED}, the paper's, in it")


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
    arms = {"chosen": bench.routed("grouped")}
    arms |= {f"block_{block}": bench.routed("grouped", block=block) for block in config.blocks}
    rows = {
        workload: bench.times(arms, bench.inputs(size, workload), label=workload)
        for workload in PAPER
    }
    metrics, claims = {}, []
    for workload, times in rows.items():
        over = times.ratio(f"block_{FIXED}", over="chosen")
        claim = f"table9.{workload}_fixed_over_chosen"
        claims.append(ratio_claim(claim, paper=PAPER[workload], ours=over, direction="higher"))
        best = min((each for each in arms if each in times), key=times.median)
        metrics[f"{workload}_fixed_over_chosen"] = over
        metrics[f"{workload}_chosen_over_best"] = times.ratio("chosen", over=best)
    report = (
        f"# Row blocks of fixed size against the chosen one\n\nN = {size.num_tokens}, "
        f"D = F = {size.d_in}, r = {size.rank}, K = {size.num_slots}, k = 1, strategy grouped, "
        f"{kernel_timing.how(config)}\n\n"
        + kernel_timing.times_table(rows, list(arms), first="tokens")
        + "\nThe chosen block over the best of its row: "
        + ", ".join(f"{w} {metrics[f'{w}_chosen_over_best']:.2f}" for w in rows)
        + f".\n\n{str(__doc__).partition(chr(10) * 2)[2]}"
        + bench.absent()
    )
    curves = {
        workload: (config.blocks, [1e3 * times.median(f"block_{b}") for b in config.blocks])
        for workload, times in rows.items()
    }
    kernel_timing.draw(
        run,
        "blocks",
        curves,
        xlabel="rows in a block",
        ylabel="milliseconds",
        title="Time by block size",
    )
    run.finish(metrics=metrics, claims=claims, report=report)
