"""What the experiments that time kernels share: how they time, claim, tabulate and draw."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np
from absl import logging

from experiments.registry import check_config
from experiments.run_folder import Claim, Run, markdown
from molora_jax.display import curve_figure, save_figure
from molora_jax.display.text import adapter_color
from pallas_kernels import bench
from pallas_kernels.paths import Path
from pallas_kernels.shapes import ProblemSize
from pallas_kernels.strategy import BACKENDS, check_names

# A value with its 10th and 90th percentile.
Band = tuple[float, float, float]
NOTHING: Band = (math.nan, math.nan, math.nan)

# What each arm of a comparison is, for the reports.
ARMS = {
    "single": "one LoRA on every token, which needs no routing",
    "fixed": "the routed update with every token on one adapter",
    "per_token": "the routed update, `lora_delta`",
    "full_passes": "K passes over all tokens, of which a token keeps its own",
    "dense_loop": "PEFT's mixed batch in one program: adapter by adapter, on rows it has picked",
    "per_adapter_loop": "the same loop driven by the host, a program for each adapter on its rows",
    "per_row_bgmv": "Punica's BGMV in plain JAX: each row reads its own adapter",
    "ragged_dot": "JAX's own grouped product, with its sort",
    "grouped": "our strategy that sorts rows by adapter and reads each adapter once",
    "auto": "our strategy that the cost model takes for the size",
    "bgmv": "our strategy in which each row reads its own adapter",
}


class HasDtype(Protocol):
    """What drawing reads of a config."""

    @property
    def dtype(self) -> str: ...


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
    dtype        of weights and activations
    seed         of weights and adapter ids

    What the sizes of those are that have them:

    num_tokens   N, tokens of a call
    width        D = F, channels of what comes in and goes out
    rank         r of every adapter
    num_slots    K, adapters of the bank
    strategy     how `lora_delta` computes; see pallas_kernels

    A config with a `strategy` has it checked with the backend; `sizes` has every size measured.
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
        strategy = getattr(self, "strategy", "auto")
        try:
            check_names(strategy, self.backend)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(
                f"Config.strategy = {strategy!r}, backend = {self.backend!r}: {error}"
            ) from None
        try:
            self.sizes()
        except ValueError as error:
            raise ValueError(f"Config: {error}") from None

    def sizes(self) -> list[ProblemSize]:
        """Every size that is measured."""
        raise NotImplementedError


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
        self._routed_runs = False
        if run.scale == "paper" and jax.default_backend() != "gpu":
            logging.warning("scale paper is for a GPU; on %s it takes very long", device())

    def routed(self, strategy: str = "auto", **options) -> Callable:
        """A strategy on the config's backend, as an arm."""
        function = bench.routed(strategy, backend=self.config.backend, **options)

        def arm(*operands):
            y = function(*operands)
            self._routed_runs = True
            return y

        return arm

    def path(self, strategy: str, size: ProblemSize) -> Path:
        """What a strategy runs at this size, on the device that runs this."""
        return bench.path_here(strategy, size, backend=self.config.backend)

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

    def compiled(
        self,
        arms: Mapping[str, Any],
        inputs: bench.Inputs,
        *,
        host: Sequence[str] = (),
        calls: int | None = None,
        base_product: bool = False,
    ) -> dict[str, bench.Arm]:
        """The arms that are there, in order; arguments as `times` has them.

        Raises:
          NotImplementedError: an arm is not there, and no routed one ever was.
        """
        ready = {name: arm for name, arm in arms.items() if isinstance(arm, bench.Arm)}
        functions = {name: arm for name, arm in arms.items() if name not in ready}
        calls = calls or self.config.calls
        made, missing = bench.compile_arms(
            functions, inputs, host=host, calls=calls, base_product=base_product
        )
        self.missing |= missing
        if missing and not self._routed_runs:
            raise NotImplementedError("; ".join(f"{n}: {why}" for n, why in missing.items()))
        ready |= made
        return {name: ready[name] for name in arms if name in ready}

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
        ordered = self.compiled(arms, inputs, host=host, calls=calls, base_product=base_product)
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
    """What reports and pictures call the device: "CPU", or the GPU's name."""
    first = jax.devices()[0]
    return first.device_kind if first.platform == "gpu" else first.platform.upper()


def unlike(config: HasDtype, **paper: int) -> str:
    """Device and dtype, and the sizes that are not the paper's: what a claim's note begins with.

    Args:
      paper: the paper's value of fields of the config.
    """
    symbols = {"num_tokens": "N", "width": "D", "rank": "r", "num_slots": "K"}
    said = [
        f"{symbols[name]} = {getattr(config, name)}"
        for name, value in paper.items()
        if getattr(config, name) != value
    ]
    return ", ".join([device(), config.dtype, *said])


def ratio_claim(
    name: str,
    *,
    where: str,
    paper: float,
    ours: float,
    direction: Literal["higher", "lower"],
    kind: Literal["ratio", "order"] = "ratio",
    unit: str = "x",
    note: str = "",
    only_gpu: str = "",
) -> Claim:
    """A claim that holds where ours is at least as good as the paper's number.

    Args:
      where: as `unlike` has it.
      only_gpu: why there is no verdict off a GPU, where there is none.
    """
    known = math.isfinite(ours)
    holds = (ours >= paper if direction == "higher" else ours <= paper) if known else None
    where += f"; {note}" if note else ""
    if not known:
        where += "; not measured, so nothing to compare"
    elif only_gpu and jax.default_backend() != "gpu":
        holds = None
        where += f"; {only_gpu}, so no verdict off a GPU"
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


def time_claim(name: str, *, where: str, paper_ms: float, seconds: float) -> Claim:
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
        note=f"{where}; the paper's is an H100" + ("" if on_gpu else ", so no verdict here"),
    )


def milliseconds(times: bench.Times, name: str) -> str:
    """Median and spread as a table has them: `1.23 (1.20 to 1.31)`."""
    if name not in times:
        return "-"
    middle, low, high = (_plain(1e3 * value) for value in (times.median(name), *times.spread(name)))
    return f"{middle} ({low} to {high})"


def _plain(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def times_table(rows: Mapping[str, bench.Times], arms: Sequence[str], *, first: str) -> str:
    """A markdown table: a row a comparison, a column an arm."""
    header = [first, *(f"{name.replace('_', ' ')}, ms" for name in arms)]
    cells = [
        [label, *(milliseconds(times, name) for name in arms)] for label, times in rows.items()
    ]
    return markdown(header, cells)


def explain(names: Sequence[str]) -> str:
    """A list of what the arms are; those that need no word are left out."""
    return "".join(f"- {name.replace('_', ' ')}: {ARMS[name]}\n" for name in names if name in ARMS)


def taken(by_size: Mapping[int, str]) -> str:
    """Which strategy at which sizes: "bgmv at 1, 4; grouped at 16"."""
    return "; ".join(
        f"{strategy} at " + ", ".join(str(n) for n, each in by_size.items() if each == strategy)
        for strategy in dict.fromkeys(by_size.values())
    )


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


def band(times: bench.Times, name: str) -> Band:
    """Milliseconds of an arm."""
    if name not in times:
        return NOTHING
    low, high = times.spread(name)
    return 1e3 * times.median(name), 1e3 * low, 1e3 * high


def ratio_band(times: bench.Times, name: str, over: str) -> Band:
    """Paired ratios of two arms."""
    if name not in times or over not in times:
        return NOTHING
    pairs = times.seconds[name] / times.seconds[over]
    low, high = np.percentile(pairs, (10, 90))
    return float(np.median(pairs)), float(low), float(high)


def exactly(value: float) -> Band:
    """A number without samples, such as the paper's."""
    return value, value, value


def draw_curves(
    run: Run,
    name: str,
    curves: Mapping[str, Mapping[Any, Band]],
    *,
    config: HasDtype,
    xlabel: str,
    ylabel: str,
    title: str,
    sizes: str,
    marks: Mapping[str, tuple[int, Band]] | None = None,
) -> None:
    """Curves over sizes, each in its band, as `name`.png in the run's folder.

    Args:
      curves: by label the value at each x, a number; what was not measured is left out.
      sizes: of the problem, for the title's second line.
      marks: by label of a curve a point beside it.
    """
    known = {
        label: {x: each for x, each in points.items() if math.isfinite(each[0])}
        for label, points in curves.items()
    }
    known = {label: points for label, points in known.items() if points}
    figure = curve_figure(
        {
            label: (list(points), [y for y, _, _ in points.values()])
            for label, points in known.items()
        },
        ylabel=ylabel,
    )
    axes = figure.axes[0]
    for line, (label, points) in zip(list(axes.lines), known.items(), strict=True):
        line.set_marker("o")
        lows, highs = ([each[i] for each in points.values()] for i in (1, 2))
        axes.fill_between(list(points), lows, highs, color=line.get_color(), alpha=0.15, lw=0)
        if marks and label in marks:
            x, (y, low, high) = marks[label]
            axes.errorbar(
                x, y, [[y - low], [high - y]], fmt="*", ms=13, color=line.get_color(), mec="black"
            )
    axes.set_xscale("log", base=2)
    ticks = sorted({x for points in known.values() for x in points})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel(xlabel)
    _finish(run, name, axes, config, title=title, sizes=sizes)


def draw_bars(
    run: Run,
    name: str,
    series: Mapping[str, Sequence[Band]],
    *,
    config: HasDtype,
    groups: Sequence[str],
    ylabel: str,
    title: str,
    sizes: str,
) -> None:
    """A group of bars for each category, a bar of it for each of the series, as `name`.png.

    Bars whose label says "paper" are hatched.
    """
    figure = curve_figure({}, ylabel=ylabel)
    figure.set_size_inches(max(6.4, 0.55 * len(groups) * len(series)), 4.2)
    axes = figure.axes[0]
    width = 0.84 / len(series)
    for i, (label, bars) in enumerate(series.items()):
        here = [(g, each) for g, each in enumerate(bars) if math.isfinite(each[0])]
        if not here:
            continue
        values = [y for _, (y, _, _) in here]
        errors = [[y - low for _, (y, low, _) in here], [high - y for _, (y, _, high) in here]]
        of_paper = "paper" in label
        drawn = axes.bar(
            [g + (i - (len(series) - 1) / 2) * width for g, _ in here],
            values,
            0.94 * width,
            yerr=None if of_paper else errors,
            label=label,
            error_kw={"elinewidth": 1},
            color="white" if of_paper else adapter_color(i),
            edgecolor="gray" if of_paper else None,
            hatch="///" if of_paper else None,
        )
        axes.bar_label(drawn, [f"{value:.3g}" for value in values], fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlabel("")
    axes.margins(y=0.15)
    axes.set_axisbelow(True)
    _finish(run, name, axes, config, title=title, sizes=sizes)


def _finish(run: Run, name: str, axes: Any, config: HasDtype, *, title: str, sizes: str):
    """The vertical scale with plain numbers, no legend of one entry, the title; then the file."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axes.dataLim.intervaly
    values = [patch.get_height() for patch in axes.patches] or [low]
    low = min(low, *values) if low > 0 else min(values)
    if low > 0 and high > 8 * low:
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")
        axes.set_ylim(0.7 * low, 1.5 * high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if axes.get_legend():  # made before the markers were
        axes.get_legend().remove()
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=3)
    axes.set_title(f"{title}\n{device()}, {config.dtype}; {sizes}", fontsize=10)
    save_figure(axes.figure, run.path / f"{name}.png")
