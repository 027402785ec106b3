"""Table 6 and Figure 6: per-token against per-sequence, by order of the tokens and by batch.

The paper's per-sequence times grow with the changes of adapter, so per-sequence is read here as
one launch for each span of tokens that share an adapter; K full passes, which no order changes,
stand beside it. Spans, as the paper does not give them: 24 tokens of the first adapter and 8 of
another in turn (text-heavy), 8 of each in turn (balanced), one for each adapter (separated).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import kernel_timing
from experiments.kernel_timing import Bench, TimingConfig, digests, ratio_claim, time_claim
from pallas_kernels.baselines import full_passes, single_lora
from pallas_kernels.bench import Times, host_arm
from pallas_kernels.shapes import ProblemSize
from pallas_kernels.types import Routing

__all__ = ["Config", "digests", "main"]

# The paper's milliseconds: per-token, per-sequence.
PAPER = {
    "text_heavy": (0.23, 5.94),
    "balanced": (0.24, 12.79),
    "separated": (0.24, 1.81),
}
LAUNCHES = "the ratio is one of launches"
PAPER_BATCH = (5.8, 112)  # Figure 6, the least and the greatest speedup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TimingConfig):
    """table6: N tokens in three orders. fig6: batches of sequences of `seq_len`, balanced.

    batches  numbers of sequences of fig6
    seq_len  tokens of such a sequence
    """

    num_tokens: int = 1024
    width: int = 1024
    rank: int = 64
    num_slots: int = 4
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    seq_len: int = 64
    repeats: int = 9
    budget_s: float = 6.0

    def size(self, num_tokens: int) -> ProblemSize:
        return ProblemSize(
            num_tokens=num_tokens,
            d_in=self.width,
            d_out=self.width,
            rank=self.rank,
            num_slots=self.num_slots,
            top_k=1,
        )

    def sizes(self) -> list[ProblemSize]:
        batches = [batch * self.seq_len for batch in self.batches]
        return [self.size(num_tokens) for num_tokens in (self.num_tokens, *batches)]


def main(config: Config, run) -> None:
    bench = Bench(config, run)
    (table6 if run.experiment == "table6" else fig6)(bench, config, run)


def table6(bench: Bench, config: Config, run) -> None:
    rows = {
        order: compare(
            bench, config, order_ids(order, config.num_tokens, config.num_slots), label=order
        )
        for order in PAPER
    }
    ratios = {order: times.ratio("per_sequence", over="per_token") for order, times in rows.items()}
    per_token = [times.median("per_token") for times in rows.values()]
    spread = max(per_token) / min(per_token)
    metrics = {
        **{f"{order}_per_sequence_over_per_token": ratio for order, ratio in ratios.items()},
        **{
            f"{order}_full_passes_over_per_token": times.ratio("full_passes", over="per_token")
            for order, times in rows.items()
        },
        "per_token_slowest_over_fastest_order": spread,
    }
    where = kernel_timing.unlike(config, width=4096, rank=64)
    claims = [
        ratio_claim(
            f"table6.{order}_speedup",
            where=where,
            paper=PAPER[order][1] / PAPER[order][0],
            ours=ratios[order],
            direction="higher",
            note="per-sequence is a launch for each span",
            only_gpu=LAUNCHES,
        )
        for order in PAPER
    ]
    claims.append(
        ratio_claim(
            "table6.order_matters",
            where=where,
            paper=0.24 / 0.23,
            ours=spread,
            direction="lower",
            note="per-token, the slowest order over the fastest",
        )
    )
    for order, times in rows.items():
        name, paper_ms = f"table6.{order}_per_token", PAPER[order][0]
        claims.append(
            time_claim(name, where=where, paper_ms=paper_ms, seconds=times.median("per_token"))
        )
    report = (
        f"# Three orders of tokens\n\nN = {config.num_tokens}, {setting(config)}\n\n"
        + kernel_timing.times_table(rows, ARMS, first="order")
        + f"\n{str(__doc__).partition(chr(10) * 2)[2]}"
        + bench.absent()
    )
    series = {
        arm.replace("_", " "): [kernel_timing.band(times, arm) for times in rows.values()]
        for arm in ARMS
    }
    for i, arm in enumerate(("per token", "per sequence")):
        series[f"{arm}, the paper's H100"] = [kernel_timing.exactly(ms[i]) for ms in PAPER.values()]
    kernel_timing.draw_bars(
        run,
        "orders",
        series,
        config=config,
        sizes=f"N = {config.num_tokens}, {shape(config)}",
        groups=[order.replace("_", "-") for order in PAPER],
        ylabel="milliseconds",
        title="Time by order of the tokens",
    )
    run.finish(metrics=metrics, claims=claims, report=report)


def fig6(bench: Bench, config: Config, run) -> None:
    rows = {}
    for batch in config.batches:
        ids = np.tile(order_ids("balanced", config.seq_len, config.num_slots), batch)
        rows[batch] = compare(bench, config, ids, label=f"batch={batch}")
    ratios = {b: times.ratio("per_sequence", over="per_token") for b, times in rows.items()}
    metrics = {f"speedup_batch_{batch}": ratio for batch, ratio in ratios.items()}
    note = "per-sequence is a launch for each span"
    least, greatest = min(ratios.values()), max(ratios.values())
    claims = [
        ratio_claim(
            f"fig6.{which}_speedup",
            where=kernel_timing.unlike(config, width=4096, rank=64),
            paper=paper,
            ours=ours,
            direction="higher",
            note=note,
            only_gpu=LAUNCHES,
        )
        for which, paper, ours in (
            ("least", PAPER_BATCH[0], least),
            ("greatest", PAPER_BATCH[1], greatest),
        )
    ]
    report = (
        f"# Per token over per sequence by batch\n\nSequences of {config.seq_len} tokens in spans "
        f"of 8, {setting(config)}\n\n"
        + kernel_timing.times_table({str(b): t for b, t in rows.items()}, ARMS, first="batch")
        + f"\nPer sequence over per token: {least:.1f} to {greatest:.1f} times.\n"
        + bench.absent()
    )
    kernel_timing.draw_curves(
        run,
        "batches",
        {
            arm.replace("_", " "): {b: kernel_timing.band(t, arm) for b, t in rows.items()}
            for arm in ARMS
        },
        config=config,
        sizes=f"sequences of {config.seq_len} tokens, {shape(config)}",
        xlabel="sequences in the batch",
        ylabel="milliseconds",
        title="Time by batch",
    )
    run.finish(metrics=metrics, claims=claims, report=report)


ARMS = ("per_token", "per_sequence", "full_passes")


def shape(config: Config) -> str:
    return f"D = F = {config.width}, r = {config.rank}, K = {config.num_slots}, k = 1"


def setting(config: Config) -> str:
    return f"{shape(config)}, {kernel_timing.how(config)}"


def compare(bench: Bench, config: Config, ids: np.ndarray, *, label: str) -> Times:
    routing = Routing(jnp.asarray(ids[:, None], jnp.int32), jnp.ones((len(ids), 1), jnp.float32))
    per_sequence = functools.partial(span_passes, spans=spans(ids))
    arms = {
        "per_token": bench.routed(),
        "per_sequence": host_arm(per_sequence),
        "full_passes": full_passes,
    }
    return bench.times(
        arms, bench.inputs(config.size(len(ids)), routing=routing), label=label, calls=1
    )


def order_ids(order: str, num_tokens: int, num_slots: int) -> np.ndarray:
    """The adapter of each token."""
    token = np.arange(num_tokens)
    if order == "separated":
        return token * num_slots // num_tokens
    span = token // 8
    if order == "balanced":
        return span % num_slots
    others = 1 + span // 4 % max(num_slots - 1, 1)
    return np.where(span % 4 < 3, 0, others % num_slots)


def spans(ids: np.ndarray) -> list[tuple[int, int, int]]:
    """Start, length and adapter of each run of equal ids."""
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
    lengths = np.diff(starts, append=len(ids))
    return [(int(s), int(n), int(ids[s])) for s, n in zip(starts, lengths, strict=True)]


def span_passes(x, lora_a, lora_b, routing, base, *, spans):
    """One launch for each span: a single LoRA on its rows, added where they lie."""
    y = jnp.array(base, copy=True)  # each step is donated what the one before made
    for start, length, slot in spans:
        y = _span(x, lora_a, lora_b, routing, y, start, slot, length=length)
    return y


@functools.partial(jax.jit, static_argnames="length", donate_argnames="y")
def _span(x, lora_a, lora_b, routing, y, start, slot, *, length: int):
    rows = lax.dynamic_slice_in_dim(x, start, length)
    before = lax.dynamic_slice_in_dim(y, start, length)
    after = single_lora(rows, lora_a[slot][None], lora_b[slot][None], routing, before)
    return lax.dynamic_update_slice_in_dim(y, after, start, axis=0)
