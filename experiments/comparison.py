"""Runs side by side: which settings differ, which run is best, as table, CSV and picture.

`molora results RUNS...` prints such tables, and a sweep ends with one.
"""

import argparse
import collections
import csv
import dataclasses
import fnmatch
import io
import itertools
import pathlib
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments import artifacts, registry
from experiments.entries import DIGEST, Entry, find, read
from experiments.run_folder import markdown, show
from molora_jax import display
from molora_jax.display import terminal
from molora_jax.files import naming_path
from molora_jax.tools.arguments import Parser

PROG = "python -m experiments.results"
SHOWN_METRICS = 8  # columns of the table in a file; the CSV has them all
GAP = 2  # letters between two columns on a terminal
LISTED = 12  # metrics that a message names
# Words of a metric's name that say which way is better.
LOWER = {"loss", "nll", "nats", "perplexity", "ppl", "ms", "us", "seconds", "latency", "time"}
LOWER |= {"regret", "overhead", "error", "errors"}
HIGHER = {"accuracy", "match", "right", "f1", "ari", "nmi", "throughput", "speedup", "logp"}
BASELINE = {"base", "first", "start", "uniform", "spread"}  # words of what a run is compared with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of one experiment.

    names    settings in which the finished runs differ, in the order of the config
    runs     the finished ones, best first where there is a metric to go by
    by       that metric, or a pattern of several whose mean it is; "" where none is known
    judged   the metrics of `by` that all the runs have: no others can be set beside each other
    lower    whether the lower is the better
    apart    those that did not finish, or cannot be read
    chosen   the metrics asked for; without them a table has the first of all
    """

    experiment: str
    names: list[str]
    runs: list[Entry]
    by: str
    judged: tuple[str, ...]
    lower: bool
    apart: list[Entry]
    chosen: tuple[str, ...] = ()

    def metrics(self) -> list[str]:
        """The chosen metrics; else every one: what the order goes by, then what can be ordered."""
        if self.chosen:
            return list(self.chosen)
        names = metrics_of(self.runs)
        # What all runs have alike says nothing of them.
        names.sort(key=lambda name: len({entry.metrics.get(name) for entry in self.runs}) == 1)
        told = [name for name in names if direction_of(name)]
        return list(dict.fromkeys([*matching(names, self.by), *told, *names]))

    def shown(self, width: int | None = None) -> list[str]:
        """The metrics of a table: as many as fit into `width` letters, at least one."""
        metrics = self.metrics()
        if width is None:
            return metrics if self.chosen else metrics[:SHOWN_METRICS]
        head = [["run", *(entry.path.name for entry in self.runs)]]
        head += [[n, *(_cell(entry.show(n)) for entry in self.runs)] for n in self.names]
        columns = [[n, *(show(entry.metrics.get(n)) for entry in self.runs)] for n in metrics]
        ends = itertools.accumulate(max(map(len, each)) + GAP for each in [*head, *columns])
        fitting = sum(end - GAP <= width for end in ends) - len(head)
        return metrics[: max(1, fitting)]

    def markdown(self, width: int | None = None) -> str:
        """The table, what its order is, and the runs that are not in it.

        width  letters that a terminal has for a line
        """
        shown = self.shown(width)
        rows = [
            [entry.path.name]
            + [_cell(entry.show(name)) for name in self.names]
            + [show(entry.metrics.get(name)) for name in shown]
            for entry in self.runs
        ]
        text = markdown(["run", *self.names, *shown], rows) if rows else "No finished run.\n"
        notes = []
        if len(rows) > 1 and self.by:
            way = "lowest" if self.lower else "highest"
            mean = "mean of " if _many(self.by) else ""
            of_all = matching(metrics_of(self.runs), self.by)
            if not self.judged:
                notes.append(f"In the order given: no metric of {self.by} is in all of them.")
            elif len(self.judged) == len(of_all):
                notes.append(f"Best first: {way} {mean}{self.by}.")
            else:
                notes.append(f"Best first: {way} {mean}{', '.join(self.judged)}, which all have.")
        elif len(rows) > 1:
            notes.append("In the order given: --by=METRIC puts the best first.")
        if more := len(self.metrics()) - len(shown):
            notes.append(f"{more} more: --metrics or --csv.")
        text += "\n" + " ".join(notes) + "\n" if notes else ""
        if self.apart:
            text += f"\nNot in the table, {len(self.apart)}:\n\n"
            text += "".join(f"- {entry.path}: {entry.problem}\n" for entry in self.apart)
        return text

    def print(self) -> None:
        """Prints it: on a terminal as wide as that is, elsewhere as Markdown."""
        width = None
        if terminal.is_terminal(sys.stdout):
            width = terminal.console(sys.stdout).width
        display.show_report(f"# {self.experiment}\n\n{self.markdown(width).rstrip()}")

    def __str__(self) -> str:
        return self.markdown()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = self.shown()
        rows = [
            [entry.path.name, *(_cell(entry.show(name)) for name in self.names)]
            + [entry.metrics.get(name) for name in shown]
            for entry in self.runs
        ]
        return display.Table(
            ["run", *self.names, *shown], rows, title=self.experiment
        )._repr_html_()

    def csv(self) -> str:
        """Every run, unfinished ones too, with its folder and its metrics, unrounded."""
        metrics = self.metrics()
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["run", "status", *self.names, *metrics])
        for entry in [*self.runs, *self.apart]:
            settings = [entry.show(name) for name in self.names]
            values = [entry.metrics.get(name) for name in metrics]
            writer.writerow([str(entry.path), entry.problem or "complete", *settings, *values])
        return lines.getvalue()

    def figure(self) -> Any:
        """A heat map where two settings differ, else parallel coordinates; None without either."""
        runs = [entry for entry in self.runs if score(entry, self.judged) is not None]
        if len(runs) < 2 or not self.names:
            return None
        scores = [score(entry, self.judged) for entry in runs]
        title = f"{self.experiment}: {self.by}"
        values = {name: [entry.show(name) for entry in runs] for name in self.names}
        if len(self.names) != 2:
            columns = {**values, self.by: scores}
            return display.parallel_figure(columns, lower_is_better=self.lower, title=title)
        axes = [sorted({_key(each): each for each in values[name]}.items()) for name in self.names]
        places = [[key for key, _ in axis] for axis in axes]
        grid = [[float("nan")] * len(places[0]) for _ in places[1]]
        for first, second, value in zip(*values.values(), scores, strict=True):
            grid[places[1].index(_key(second))][places[0].index(_key(first))] = value
        x, y = (
            (name, [value for _, value in axis])
            for name, axis in zip(self.names, axes, strict=True)
        )
        return display.grid_figure(
            np.array(grid), x=x, y=y, label=self.by, lower_is_better=self.lower, title=title
        )

    def write(self, folder: pathlib.Path) -> str:
        """Writes table.md, table.csv and, where there is something to draw, table.png."""
        artifacts.write_atomically(folder / "table.md", self.markdown())
        artifacts.write_atomically(folder / "table.csv", self.csv())
        (folder / "table.png").unlink(missing_ok=True)  # an earlier call's
        figure = self.figure()
        if figure is not None:
            display.save_figure(figure, folder / "table.png")
        return f"Written to {folder}: table.md, table.csv" + (", table.png" if figure else "")


def compare(
    entries: Iterable[Entry], *, by: str = "", order: str = "", metrics: Sequence[str] = ()
) -> Comparison:
    """The comparison of runs of one experiment.

    Args:
      by: a metric, or a pattern such as "routed/*" for the mean of those that it matches. Without
        one it is the experiment's own (`registry.Experiment.best`), else the first metric that
        differs and whose name says which way is better.
      order: "higher" or "lower" is better; without it the metric's name decides.
      metrics: names or patterns of the ones to show, in this order; without them as many as fit.

    Raises:
      ValueError: no run has such a metric, or its name does not tell the order.

        >>> comparison = compare(load_runs("results/table14"))
        >>> [run.path.name for run in comparison.runs]
        ['table14']
    """
    entries = list(entries)
    (experiment,) = {entry.experiment for entry in entries if entry.experiment} or {"?"}
    runs = [entry for entry in entries if not entry.problem]
    known = registry.EXPERIMENTS.get(experiment)
    best = known.best if known else None
    known_metrics = metrics_of(runs)
    if order and not by:
        raise ValueError(f"--order={order} is of a metric: name it with --by=METRIC")
    for option, name in [("--by", by)] * bool(by) + [("--metrics", each) for each in metrics]:
        if runs and not matching(known_metrics, name):
            raise ValueError(
                f"{option}={name}: no run of {experiment} has such a metric"
                f"{_known(name, known_metrics)}"
            )
    if not by and metrics and direction_of(metrics[0]):  # what was named is what is asked for
        by = metrics[0]
    if not by:
        by, order = _default(runs, known_metrics, best)
    direction = order or direction_of(by) or (best[1] if best and best[0] == by else "")
    if by and not direction:
        raise ValueError(
            f"--by={by}: its name does not tell which way is better; say --order=higher or "
            "--order=lower"
        )
    lower = direction == "lower"
    judged = [m for m in matching(known_metrics, by) if all(m in run.metrics for run in runs)]
    if judged:
        runs.sort(key=lambda entry: _rank(score(entry, judged), lower))
    return Comparison(
        experiment=experiment,
        names=_varied(runs),
        runs=runs,
        by=by,
        judged=tuple(judged),
        lower=lower,
        apart=[entry for entry in entries if entry.problem],
        chosen=tuple(dict.fromkeys(n for each in metrics for n in matching(known_metrics, each))),
    )


def metrics_of(runs: Iterable[Entry]) -> list[str]:
    """Every metric's name, each once."""
    return list(dict.fromkeys(name for entry in runs for name in entry.metrics))


def matching(metrics: Iterable[str], by: str) -> list[str]:
    """The metric of that name, or those that match the pattern."""
    metrics = list(metrics)
    return [by] if by in metrics else fnmatch.filter(metrics, by)


def score(entry: Entry, judged: Sequence[str]) -> float | None:
    """What a run is judged by: the mean of these metrics; None where one is."""
    values = [entry.metrics[name] for name in judged]
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers and len(numbers) == len(values) else None


def direction_of(metric: str) -> str:
    """ "higher" or "lower", where a word of the metric's name says which is better, else ""."""
    if metric.endswith("/spread"):  # a deviation, of whatever
        return ""
    words = _words(metric)
    lower, higher = bool(words & LOWER), bool(words & HIGHER)
    return "" if lower == higher else "lower" if lower else "higher"


def _words(metric: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", metric.lower()))


def _varied(runs: Sequence[Entry]) -> list[str]:
    names = list(dict.fromkeys(name for entry in runs for name in entry.settings))
    varied = [n for n in names if len({repr(entry.settings.get(n)) for entry in runs}) > 1]
    # A base of another name has another digest, too.
    return [n for n in varied if not (n.endswith(DIGEST) and n.removesuffix(DIGEST) in varied)]


def _default(runs, metrics, best) -> tuple[str, str]:
    """The metric to go by where none was named, and its direction."""
    if best and matching(metrics, best[0]):
        return best
    for name in sorted(metrics, key=lambda name: bool(_words(name) & BASELINE)):
        differs = len({entry.metrics.get(name) for entry in runs}) > 1
        if direction_of(name) and (differs or len(runs) == 1):
            return name, direction_of(name)
    return "", ""


def _rank(value: float | None, lower: bool) -> tuple[bool, float]:
    return value is None, 0.0 if value is None else value if lower else -value


def _known(name: str, metrics: Sequence[str]) -> str:
    """The end of a message about an unknown metric: the nearest, or else all that there are."""
    if near := registry.nearest(name, metrics) or [each for each in metrics if name in each][:3]:
        return f"; did you mean {' or '.join(near)}?"
    more = f" and {len(metrics) - LISTED} more (--csv)" if len(metrics) > LISTED else ""
    return f"; there are {', '.join(metrics[:LISTED]) or 'none'}{more}"


def _many(by: str) -> bool:
    return any(letter in by for letter in "*?[")


def _cell(value: Any) -> str:
    text = " ".join(str(value).split()).replace("|", r"\|")
    return text if len(text) <= 60 else f"{text[:40]} … {text[-17:]}"


def _key(value: Any) -> tuple[int, float, str]:
    """Numbers in their order, then whatever else by its text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def main(arguments: Sequence[str]) -> int:
    """`molora results`; returns the exit code."""
    prog = "molora results" if pathlib.Path(sys.argv[0]).name != "results.py" else PROG
    try:
        return _compared(_asked(arguments, prog))
    except BrokenPipeError:  # an OSError, and no misuse: `leave` sees to it
        raise
    except (ValueError, OSError) as error:
        print(f"{prog}: {registry.one_line(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2


def _path(text: str) -> pathlib.Path:
    return pathlib.Path(text).expanduser()


def _asked(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(
        prog=prog,
        description="A table of runs for each experiment, the best first: the settings in which "
        "they differ, and what they measured.",
        epilog=f"example: {prog} runs/train_adapter --by=heldout_adapter",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=_path, metavar="RUNS",
        help="folders of runs, or folders that hold some, such as runs/NAME")  # fmt: skip
    add("--by", default="", metavar="METRIC",
        help="best first by it, or by the mean of 'routed/*'; default: its own")  # fmt: skip
    add("--order", default="", choices=("higher", "lower"),
        help="which is better, where the metric's name does not say")  # fmt: skip
    add("--metrics", nargs="+", action="extend", default=[], metavar="METRIC",
        help="show these, or those that match 'routed/*'; default: as many as fit")  # fmt: skip
    add("--csv", action="store_true", help="print CSV: every metric (or --metrics), unrounded")
    add("--out", type=_path, metavar="FOLDER",
        help="also write table.md, table.csv and table.png there")  # fmt: skip
    parser.refuse_unknown(arguments)
    return parser.parse_args(arguments)


def _compared(asked: argparse.Namespace) -> int:
    groups = collections.defaultdict(list)
    for path in find(asked.runs):
        entry = read(path)
        groups[entry.experiment].append(entry)
    if asked.csv and len(groups) > 1:
        kinds = ", ".join(f"{len(runs)} of {name}" for name, runs in groups.items())
        raise ValueError(f"--csv is one table, and these are runs {kinds}: name those of one")
    options = {"by": asked.by, "order": asked.order, "metrics": asked.metrics}
    compared = [compare(runs, **options) for runs in groups.values()]
    for each in compared:
        if asked.csv:
            print(each.csv(), end="")
        else:
            each.print()
        if asked.out:
            folder = asked.out if len(groups) == 1 else asked.out / each.experiment
            with naming_path(folder):
                written = each.write(folder)
            print(written, file=sys.stderr)
    return 0
