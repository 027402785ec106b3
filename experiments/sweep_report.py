"""How a sweep ended: its table, what was tried again, what failed and why."""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

from experiments import comparison, entries
from experiments.launcher import Outcome
from experiments.sweeps import LOG, Point


def summary(points: Sequence[Point], outcomes: Sequence[Outcome]) -> str:
    """What became of a sweep: how many of each, which were tried again, which failed and why."""
    by_status = collections.Counter(outcome.status for outcome in outcomes)
    over = by_status["found"] + by_status["done"]
    lines = [f"{over} of {len(points)} points have a result ({by_status['found']} found)"]
    pairs = list(zip(points, outcomes, strict=True))
    for point, outcome in pairs:
        if outcome.status == "done" and outcome.reasons:
            lines.append(f"  tried again: {point.name}: {'; '.join(outcome.reasons)}")
    for point, outcome in pairs:
        if outcome.status == "failed":
            log = point.path / LOG
            where = f"\n    log: {log}" if log.exists() else ""
            lines.append(f"  failed: {point.name}: {outcome.reasons[-1]}{where}")
    if left := by_status["stopped"] + by_status[""]:
        lines.append(f"  {left} not run to the end: the same command goes on with them")
    return "\n".join(lines)


def show_end(
    name: str,
    points: Sequence[Point],
    outcomes: Sequence[Outcome],
    *,
    folder: pathlib.Path,
) -> None:
    """Prints the sweep's table, which is also written into `folder`, and its summary."""
    found = []
    for point, outcome in zip(points, outcomes, strict=True):
        entry = entries.read(point.path, experiment=name)
        if outcome.status not in ("found", "done"):
            problem = [outcome.status or "not started", *outcome.reasons[-1:]]
            entry = dataclasses.replace(entry, problem=": ".join(problem))
        found.append(entry)
    compared = comparison.compare(found)
    try:
        written = compared.write(folder)
    except OSError as error:
        written = f"The table could not be written: {error}"
    compared.print()
    print(f"\n{written}\n\n{summary(points, outcomes)}", flush=True)
