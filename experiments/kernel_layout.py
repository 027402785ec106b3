"""Table 2: adapters in one stacked array against adapters in arrays of their own.

JAX has no pointers to device memory, so the paper's "indirect" can be read in three ways:

  table      the stack as it is, whose slots are looked up in a table: one more gather of ids
  separate   K arrays, of which a branch of K ways picks one for each tile; no weights are copied
  copied     K arrays, which every step first copies into one

The loop over tiles is the same in all of them, and in `direct`, which reads the stack by slot.
"""

import dataclasses
import statistics

import jax.numpy as jnp

from experiments import kernel_timing
from experiments.kernel_timing import Bench, TimingConfig, digests
from experiments.run_folder import markdown
from pallas_kernels.baselines import tile_loop
from pallas_kernels.shapes import ProblemSize
from pallas_kernels.types import Routing

__all__ = ["Config", "digests", "main"]

# The paper's milliseconds by number of adapters: indirect, direct.
PAPER = {
    4: (0.215, 0.196),
    8: (0.228, 0.194),
    16: (0.227, 0.201),
    32: (0.232, 0.207),
    64: (0.258, 0.218),
}
PAPER_MEAN = 1.14
INDIRECT = ("table", "separate", "copied")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TimingConfig):
    """N tokens of width D = F, one adapter a token, in tiles of `block` rows, for several K.

    num_slots  the values of K
    block      rows of a tile, which has one adapter
    """

    num_tokens: int = 512
    width: int = 1024
    rank: int = 64
    num_slots: tuple[int, ...] = tuple(PAPER)
    block: int = 16

    def sizes(self) -> list[ProblemSize]:
        return [
            ProblemSize(
                num_tokens=self.num_tokens,
                d_in=self.width,
                d_out=self.width,
                rank=self.rank,
                num_slots=num_slots,
                top_k=1,
            )
            for num_slots in self.num_slots
        ]


def main(config: Config, run) -> None:
    bench = Bench(config, run)
    rows = {}
    for size in config.sizes():
        num_slots = size.num_slots
        inputs = bench.inputs(size)
        stacks = tuple((both_layouts(a), both_layouts(b)) for a, b in inputs.stacks)
        inputs = dataclasses.replace(inputs, stacks=stacks)
        rows[num_slots] = bench.times(arms(config.block, num_slots), inputs, label=f"K={num_slots}")

    ratios = {
        name: {k: times.ratio(name, over="direct") for k, times in rows.items()}
        for name in INDIRECT
    }
    means = {name: statistics.fmean(of_k.values()) for name, of_k in ratios.items()}
    metrics = {f"{name}_over_direct": mean for name, mean in means.items()}
    where = kernel_timing.unlike(config, width=4096, rank=64)
    claims = [
        kernel_timing.ratio_claim(
            "table2.indirect_over_direct",
            where=where,
            paper=PAPER_MEAN,
            ours=means["separate"],
            direction="higher",
            note="mean over K; separate arrays, a branch for each tile",
        )
    ]
    for num_slots, times in rows.items():
        if num_slots in PAPER:
            name, paper_ms = f"table2.direct_{num_slots}", PAPER[num_slots][1]
            claims.append(
                kernel_timing.time_claim(
                    name, where=where, paper_ms=paper_ms, seconds=times.median("direct")
                )
            )

    over = [[name, *(f"{r:.2f}" for r in ratios[name].values())] for name in INDIRECT]
    sizes = (
        f"N = {config.num_tokens}, D = F = {config.width}, r = {config.rank}, k = 1, "
        f"tiles of {config.block} rows"
    )
    report = (
        f"# Direct against indirect layout of the weights\n\n{sizes}, "
        f"{kernel_timing.how(config)}\n\n"
        + kernel_timing.times_table(
            {f"K = {k}": times for k, times in rows.items()},
            ("direct", *INDIRECT),
            first="adapters",
        )
        + "\nOver direct:\n\n"
        + markdown(["layout", *(f"K = {k}" for k in rows)], over)
        + "\n"
        + str(__doc__).partition("\n\n")[2]
        + bench.absent()
    )
    curves = {
        name: {k: kernel_timing.ratio_band(t, name, over="direct") for k, t in rows.items()}
        for name in INDIRECT
    }
    curves["the paper's, H100"] = {
        k: kernel_timing.exactly(PAPER[k][0] / PAPER[k][1]) for k in rows if k in PAPER
    }
    kernel_timing.draw_curves(
        run,
        "layouts",
        curves,
        config=config,
        sizes=sizes,
        xlabel="adapters K",
        ylabel="time over the direct layout's",
        title="What an indirect layout costs",
    )
    run.finish(metrics=metrics, claims=claims, report=report)


def both_layouts(stack) -> dict:
    """A compiled arm keeps only what it reads of this."""
    return {"stacked": stack, "separate": tuple(stack)}


def arms(block: int, num_slots: int) -> dict:
    table = jnp.arange(num_slots, dtype=jnp.int32)[::-1]

    def loop(x, a, b, routing, base):
        return tile_loop(x, a, b, routing, base, block=block)

    def direct(x, a, b, routing, base):
        return loop(x, a["stacked"], b["stacked"], routing, base)

    def through_table(x, a, b, routing, base):
        return direct(x, a, b, Routing(table[routing.adapter_ids], routing.gates), base)

    def separate(x, a, b, routing, base):
        return loop(x, a["separate"], b["separate"], routing, base)

    def copied(x, a, b, routing, base):
        return loop(x, jnp.stack(a["separate"]), jnp.stack(b["separate"]), routing, base)

    return {"direct": direct, "table": through_table, "separate": separate, "copied": copied}
