"""What the experiment `serving` reports of its simulations: tables, curves and claims."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import kernel_timing
from experiments.kernel_timing import Band
from experiments.run_folder import Claim, Run, markdown
from molora_jax.generation.simulate import Simulation

WHAT = {
    "mixed": "continuous batching, a row taking the next request whatever its adapter: ours",
    "one_adapter": "a batch holds rows of one adapter; when it has ended, the next is of all that "
    "wait for the adapter of the oldest. The same compiled programs, so that a batch of few rows "
    "costs a whole step",
    "one_request": "per sequence: one request at a time, by programs compiled for one row",
}
WORDS = {
    "mixed": "mixed batch",
    "one_adapter": "one adapter at a time",
    "one_request": "one request at a time",
}
COLUMNS = {
    "queueing": "queueing",
    "time_to_first_token": "first token",
    "time_per_output_token": "per token",
    "latency": "last token",
}
Cell = tuple[float, int]  # requests a second, number of adapters
Value = Callable[[Simulation], float]


@dataclasses.dataclass(frozen=True)
class Found:
    """Simulations by cell and policy, one a repeat; those of a repeat served the same trace.

    differ  answers of a mixed batch that were not those of a batch of one adapter
    """

    cells: Mapping[Cell, Mapping[str, Sequence[Simulation]]]
    differ: int

    def band(self, cell: Cell, policy: str, value: Value) -> Band:
        """The median over repeats, the least and the greatest."""
        values = [value(each) for each in self.cells[cell][policy]]
        return statistics.median(values), min(values), max(values)

    def ratio(self, cell: Cell, value: Value, policy: str, *, over: str) -> float:
        """The median over repeats of one policy's value over the other's."""
        pairs = zip(self.cells[cell][policy], self.cells[cell][over], strict=True)
        return statistics.median(value(a) / value(b) for a, b in pairs)


def throughput(done: Simulation) -> float:
    """Tokens a second."""
    return done.tokens_per_second


def percentile(what: str, q: float) -> Value:
    """Seconds."""
    return lambda done: done.percentile(what, q)


def summary(done: Simulation) -> dict[str, Any]:
    """For metrics.jsonl; a simulation in which something was compiled does not end."""
    times = {f"{what}_p50_p99_s": [done.percentile(what, q) for q in (50, 99)] for what in COLUMNS}
    return {"tokens_per_second": done.tokens_per_second, "compilations": 0, **times}


def metrics(found: Found) -> dict[str, float]:
    made: dict[str, float] = {"compilations": 0, "answers_that_differ": found.differ}
    for (rate, count), policies in found.cells.items():
        for name in policies:
            start = f"rate{rate:g}_adapters{count}_{name}"
            for label, value in (
                ("tokens_per_second", throughput),
                ("first_token_p50_s", percentile("time_to_first_token", 50)),
                ("first_token_p99_s", percentile("time_to_first_token", 99)),
                ("latency_p50_s", percentile("latency", 50)),
                ("latency_p99_s", percentile("latency", 99)),
            ):
                made[f"{start}_{label}"] = found.band((rate, count), name, value)[0]
    return made


def claims(config: Any, found: Found) -> list[Claim]:
    """At the highest rate, where requests wait for one another."""
    cell = max(config.rates), config.num_adapters
    where = (
        f"{setting(config)}, at {cell[0]:g} requests a second, median of {config.repeats} traces; "
        "the paper serves no trace"
    )

    def claim(name, ours, direction, note):
        return Claim(
            id=f"serving.{name}",
            kind="order",
            ours=ours,
            unit="x",
            direction=direction,
            holds=ours > 1 if direction == "higher" else ours < 1,
            note=f"{note}: {where}",
        )

    made = []
    for over, words in (("one_adapter", "one adapter at a time"), ("one_request", "one request")):
        faster = found.ratio(cell, throughput, "mixed", over=over)
        made.append(
            claim(
                f"throughput_over_{over}",
                faster,
                "higher",
                f"tokens a second over {words}",
            )
        )
        waits = found.ratio(cell, percentile("latency", 99), "mixed", over=over)
        made.append(claim(f"p99_over_{over}", waits, "lower", f"P99 latency over {words}"))
    return made


def setting(config: Any) -> str:
    return (
        f"{kernel_timing.device()}, {config.dtype}, {config.base}, {config.rows} rows, "
        f"K = {config.num_slots}, r = {config.rank}, {config.arrivals} arrivals, "
        f"{config.pattern} access"
    )


def written(config: Any, found: Found) -> str:
    by_rate = [(rate, config.num_adapters) for rate in config.rates]
    by_count = [(config.rate, count) for count in config.adapter_counts]
    (low, high), (least, most) = config.prompt_tokens, config.answer_tokens
    answers = config.repeats * config.requests * len(config.cells)
    return (
        "# Serving many adapters: mixed batches, one adapter or one request at a time\n\n"
        f"{setting(config)}. Traces of {config.requests} requests, prompts of {low} to {high} and "
        f"answers of {least} to {most} tokens, {config.repeats} for each line with other seeds; "
        "every policy serves the same ones, in alternating order, in real time. Latencies count "
        "from the arrival in the trace. Medians over traces (least to greatest in brackets). "
        f"A P99 of {config.requests} requests is close to the longest.\n\n"
        + "".join(f"- {name.replace('_', ' ')}: {what}\n" for name, what in WHAT.items())
        + f"\n0 programs were compiled while requests were served. {found.differ} of {answers} "
        "answers of mixed batches differ from those of batches of one adapter.\n"
        f"\n## Over the arrival rate, {config.num_adapters} adapters\n\n"
        + table(found, by_rate, lambda cell: f"{cell[0]:g} a second")
        + f"\n## Over the number of adapters, {config.rate:g} requests a second\n\n"
        + table(found, by_count, lambda cell: str(cell[1]))
        + f"\nThe bank has {config.num_slots} slots: of more adapters than that, those that are "
        "asked for are loaded while others are served.\n"
    )


def table(found: Found, cells: Sequence[Cell], label: Callable[[Cell], str]) -> str:
    header = ["", "policy", "tokens a second"]
    header += [f"{name}, ms P50 / P99" for name in COLUMNS.values()]
    rows = []
    for cell in cells:
        for name in found.cells[cell]:
            middle, low, high = found.band(cell, name, throughput)
            times = (
                " / ".join(
                    f"{1e3 * found.band(cell, name, percentile(what, q))[0]:.0f}" for q in (50, 99)
                )
                for what in COLUMNS
            )
            speed = f"{middle:.1f} ({low:.1f} to {high:.1f})"
            rows.append([label(cell), name.replace("_", " "), speed, *times])
    return markdown(header, rows)


def draw(config: Any, run: Run, found: Found) -> None:
    """A line for each policy: throughput and P99 over the rate, and over the number of adapters."""
    by_rate = {(rate, config.num_adapters): rate for rate in config.rates}
    by_count = {(config.rate, count): count for count in config.adapter_counts}
    values = {
        "throughput": ("tokens a second", throughput, "Tokens a second"),
        "latency": ("P99, seconds to the last token", percentile("latency", 99), "P99 latency"),
        "first_token": (
            "P99, seconds to the first token",
            percentile("time_to_first_token", 99),
            "P99 time to the first token",
        ),
    }
    for axis, cells, xlabel, fixed in (
        ("rate", by_rate, "requests a second", f"{config.num_adapters} adapters"),
        ("adapters", by_count, "adapters", f"{config.rate:g} requests a second"),
    ):
        for name, (ylabel, value, title) in values.items():
            curves = {
                WORDS[policy]: {
                    x: found.band(cell, policy, value) for cell, x in sorted(cells.items())
                }
                for policy in WHAT
            }
            kernel_timing.draw_curves(
                run,
                f"{name}_over_{axis}",
                curves,
                config=config,
                xlabel=xlabel,
                ylabel=ylabel,
                title=f"{title} over {xlabel}, {config.arrivals} arrivals",
                sizes=f"{config.base}, {config.rows} rows, {fixed}, {config.pattern} access",
            )
