"""Runs of several seeds as one: curves of each, the mean of their numbers, and the spread."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SPREAD = "spread"


@dataclasses.dataclass(frozen=True)
class SeedRun:
    """The run, with the curves of each seed under a phase of their own."""

    run: Any
    prefix: str

    def artifact(self, kind: str, *, phase: str, **what: Any) -> Any:
        return self.run.artifact(kind, phase=f"{self.prefix}/{phase}", **what)


def over_seeds(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """{name: mean, "name/spread": sample standard deviation} over the metrics of each seed.

    The spread of a single seed is not given, since it would read as 0.

    Raises ValueError where the runs do not have the same names.
    """
    names = list(runs[0])
    for run in runs[1:]:
        if set(run) != set(names):
            odd = sorted(set(run) ^ set(names))
            raise ValueError(f"seeds differ in what they measured: {', '.join(odd)}")
    found = {}
    for name in names:
        values = [float(run[name]) for run in runs]
        found[name] = statistics.fmean(values)
        if len(values) > 1:
            found[f"{name}/{SPREAD}"] = statistics.stdev(values)
    return found


def shown(metrics: Mapping[str, float], name: str, *, digits: int = 3) -> str:
    """ "2.061 ± 0.004", or the mean alone where there is one seed."""
    text = f"{metrics[name]:.{digits}f}"
    spread = metrics.get(f"{name}/{SPREAD}")
    return text if spread is None else f"{text} ± {spread:.{digits}f}"


def counted(seeds: int) -> str:
    """ "1 seed", "3 seeds"."""
    return f"{seeds} seed{'s' * (seeds != 1)}"
