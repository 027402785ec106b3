"""What the experiments that time kernels share: how they time, claim, tabulate and draw."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from absl import logging

from experiments.registry import check_config
from experiments.run_folder import Claim, Run, markdown
from molora_jax.display import curve_figure, save_figure
from pallas_kernels import bench
from pallas_kernels.shapes import ProblemSize
from pallas_kernels.strategy import BACKENDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimingConfig:
    """How arms are timed; each experiment adds its sizes.

    repeats      turns, in each of which every arm runs once
    budget_s     no turn of one comparison begins after so long, once there are three
    calls        calls in one program: 1 on CPU, its sort included; a dozen on a GPU, where a
                 launch costs more than a small kernel, and a call then costs what a dozen cost
                 more than three (the sort, which they share, drops out)
    weight_sets  sets of weights that rotate, so that none waits in a cache
    backend      who runs the strategies; see pallas_kernels
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    repeats: int = 11
    budget_s: float = 10.0
    calls: int = 1
    weight_sets: int = 3
    backend: str = "auto"
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        for field in dataclasses.fields(self):
            if field.name == "seed":
                continue
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and number <= 0:
                    raise ValueError(
                        f"{type(self).__name__}.{field.name} = {value!r}: expected more than 0"
                    )
            if value == ():
                raise ValueError(f"{type(self).__name__}.{field.name} is empty: expected a value")
        if self.backend not in (*BACKENDS, "auto"):
            raise ValueError(
                f"{type(self).__name__}.backend = {self.backend!r}: expected one of "
                f"auto, {', '.join(BACKENDS)}"
            )


def digests(config: Any) -> dict[str, str]:
    """Random inputs: a run reads nothing."""
    del config
    return {}


class Bench:
    """Times comparison after comparison, logs every one, and keeps what was not there."""

    def __init__(self, config: TimingConfig, run: Run):
        self.config, self.run = config, run
        self.missing: dict[str, str] = {}
        self.temp_bytes: dict[str, int | None] = {}  # of the last comparison, by arm
        self._step = 0
        if run.scale == "paper" and jax.default_backend() != "gpu":
            logging.warning("scale paper is for a GPU; on %s it takes very long", device())

    def routed(self, strategy: str = "auto", **options) -> Callable:
        """A strategy on the config's backend, as an arm."""
        return bench.routed(strategy, backend=self.config.backend, **options)

    def inputs(self, size: ProblemSize, workload: str = "uniform", **options) -> bench.Inputs:
        config = self.config
        return bench.make_inputs(
            size,
            workload,
            dtype=config.dtype,
            weight_sets=config.weight_sets,
            seed=config.seed,
            **options,
        )

    def times(
        self,
        arms: Mapping[str, Any],
        inputs: bench.Inputs,
        *,
        label: str,
        host: Sequence[str] = (),
        calls: int | None = None,
        base_product: bool = False,
    ) -> bench.Times:
        """Compiles what is not compiled yet, and times all arms in turns.

        Args:
          arms: functions, or a `bench.Arm` where one is made already.
          host: names of the arms that the host drives.
          calls: in a program, the config's where None; 1 where the rival is driven by the host,
            so that both pay their launches.
        """
        config = self.config
        ready = {name: arm for name, arm in arms.items() if isinstance(arm, bench.Arm)}
        functions = {name: arm for name, arm in arms.items() if name not in ready}
        made, missing = bench.compile_arms(
            functions, inputs, host=host, calls=calls or config.calls, base_product=base_product
        )
        self.missing |= missing
        ready |= made
        ordered = {name: ready[name] for name in arms if name in ready}
        times = bench.time_arms(ordered, inputs, repeats=config.repeats, budget_s=config.budget_s)
        self.temp_bytes = {name: arm.temp_bytes for name, arm in ordered.items()}
        values: dict[str, Any] = {"what": label}
        for name in ordered:
            values[f"{name}_s"] = times.median(name)
            values[f"{name}_p10_p90_s"] = list(times.spread(name))
            values[f"{name}_temp_bytes"] = ordered[name].temp_bytes
        self.run.log_metrics(values, step=self._step, phase="times")
        self._step += 1
        return times

    def absent(self) -> str:
        """A paragraph on what was not there to be timed; empty where all was."""
        if not self.missing:
            return ""
        lines = [f"- {name}: {reason}" for name, reason in self.missing.items()]
        return "\nNot timed, because it is not there:\n\n" + "\n".join(lines) + "\n"


def device() -> str:
    """What a claim's note says of where it was measured: "cpu", or the GPU's name."""
    first = jax.devices()[0]
    return first.device_kind if first.platform == "gpu" else first.platform


def ratio_claim(
    name: str,
    *,
    paper: float,
    ours: float,
    direction: Literal["higher", "lower"],
    kind: Literal["ratio", "order"] = "ratio",
    unit: str = "x",
    note: str = "",
) -> Claim:
    """A claim that holds where ours is at least as good as the paper's number."""
    known = math.isfinite(ours)
    holds = (ours >= paper if direction == "higher" else ours <= paper) if known else None
    where = device() + (f"; {note}" if note else "")
    if not known:
        where += "; not measured, so nothing to compare"
    return Claim(
        id=name,
        kind=kind,
        paper=paper,
        ours=ours,
        unit=unit,
        direction=direction,
        holds=holds,
        note=where,
    )


def time_claim(name: str, *, paper_ms: float, seconds: float) -> Claim:
    """A time beside the paper's, which is of an H100: judged on a GPU alone."""
    on_gpu = jax.default_backend() == "gpu" and math.isfinite(seconds)
    return Claim(
        id=name,
        kind="time",
        paper=paper_ms,
        ours=1e3 * seconds,
        unit="ms",
        direction="lower",
        holds=1e3 * seconds <= paper_ms if on_gpu else None,
        note=f"{device()}; the paper's is an H100" + ("" if on_gpu else ", so no verdict here"),
    )


def milliseconds(times: bench.Times, name: str) -> str:
    """Median and spread as a table has them: `1.23 (1.20 to 1.31)`."""
    if name not in times:
        return "-"
    low, high = times.spread(name)
    return f"{1e3 * times.median(name):.3g} ({1e3 * low:.3g} to {1e3 * high:.3g})"


def times_table(rows: Mapping[str, bench.Times], arms: Sequence[str], *, first: str) -> str:
    """A markdown table: a row a comparison, a column an arm."""
    header = [first, *(f"{name.replace('_', ' ')}, ms" for name in arms)]
    cells = [
        [label, *(milliseconds(times, name) for name in arms)] for label, times in rows.items()
    ]
    return markdown(header, cells)


def how(config: TimingConfig) -> str:
    """One sentence for the report on how its numbers were taken."""
    chained = ""
    if config.calls > 1:
        chained = f", a call being the difference of programs with {config.calls} and fewer calls"
    return (
        f"{config.dtype} on {device()}; medians of up to {config.repeats} turns in alternating "
        f"order (10th to 90th percentile in brackets), {config.weight_sets} sets of weights in "
        f"rotation{chained}; ratios are medians of paired ratios."
    )


def draw(
    run: Run,
    name: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    log: bool = True,
    ticks: Sequence[str] = (),
) -> None:
    """Curves as `name`.png in the run's folder; `ticks` names x = 0, 1, … and x is then linear."""
    known: dict[str, tuple[Any, Any]] = {}
    for label, (xs, ys) in curves.items():
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        if points:
            known[label] = ([x for x, _ in points], [y for _, y in points])
    figure = curve_figure(known, ylabel=ylabel, title=title)
    axes = figure.axes[0]
    for line in axes.lines:
        line.set_marker("o")
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks)
    elif log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    save_figure(figure, run.path / f"{name}.png")
