"""What the map of specialists says: losses, gains, where the curves cross, and pictures."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.run_folder import Claim, markdown
from experiments.seeds import counted, over_seeds, shown
from molora_jax.display.figures import save_figure
from molora_jax.display.text import adapter_color

LEVEL = 0.01  # nats: arms that differ by less are called level
SETTINGS = {True: "marked", False: "hidden"}
ARMS = {"oracle": "split, own adapter", "router": "split, router", "pooled": "pooled"}
Found = Mapping[tuple[bool, int], Sequence[Mapping[str, Any]]]


def write(config, run, found: Found, rates: Mapping[tuple[str, int], Sequence[float]]) -> None:
    """Metrics, claims, report and figures of all (marked, K)."""
    losses = {
        key: np.asarray([[_losses(seed)[arm] for arm in ARMS] for seed in seeds])
        for key, seeds in found.items()
    }  # (seeds, arms, budgets, conflicts)
    gains = {key: each[:, 2:] - each[:, :2] for key, each in losses.items()}  # of oracle, router
    metrics = over_seeds([_numbers(config, found, seed) for seed in range(config.num_seeds)])
    for (marked, count), each in gains.items():
        for which, arm in enumerate(("oracle", "router")):
            for point, budget in enumerate(config.budgets):
                for at, conflict in enumerate(config.conflicts):
                    name = f"{_name(marked, count)}/conflict{conflict:g}/steps{budget}/{arm}_gain"
                    metrics[name] = float(each[:, which, point, at].mean())
    crossings = _crossings(config, gains)
    for where, points in crossings.items():
        for index, at_point in enumerate(points):
            metrics[f"{where}/crossing{index}"] = at_point
    run.finish(
        metrics=metrics,
        claims=_claims(config, gains),
        report=_report(config, found, metrics, crossings, rates),
    )
    for marked, name in SETTINGS.items():
        mean = {count: losses[marked, count].mean(axis=0) for count in config.adapters}
        title = "The domain stands in the row" if marked else "Nothing says the domain"
        save_figure(_curves(config, mean, title), run.path / f"curves_{name}.png")
        save_figure(
            _map(config, {count: gains[marked, count] for count in config.adapters}, title),
            run.path / f"steps_{name}.png",
        )  # fmt: skip
    save_figure(_last(config, gains), run.path / "map.png")


def clear(gains: np.ndarray) -> np.ndarray:
    """Mean over seeds (the first axis), 0 where it is within LEVEL or within the seeds' spread."""
    mean = gains.mean(axis=0)
    spread = gains.std(axis=0, ddof=1) if len(gains) > 1 else np.zeros_like(mean)
    return np.where(np.abs(mean) >= np.maximum(LEVEL, spread), mean, 0.0)


def crossing(xs: Sequence[float], gains: Sequence[float] | np.ndarray) -> list[float]:
    """Where gains go from below 0 to above or back, interpolated; those that are 0 are passed."""
    kept = [(x, gain) for x, gain in zip(xs, gains, strict=True) if gain]
    return [
        x + (following - x) * gain / (gain - after)
        for (x, gain), (following, after) in itertools.pairwise(kept)
        if gain * after < 0
    ]


def _name(marked: bool, count: int) -> str:
    return f"specialists/{SETTINGS[marked]}/K{count}"


def _losses(seed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "oracle": seed["split"]["val_loss"],
        "router": seed["split"]["routed"],
        "pooled": seed["pooled"]["val_loss"],
    }


def _numbers(config, found: Found, seed: int) -> dict[str, float]:
    """Of the whole budget: losses of each arm, validation and train, and how the router did."""
    numbers: dict[str, float] = {}
    for (marked, count), seeds in found.items():
        split, pooled = seeds[seed]["split"], seeds[seed]["pooled"]
        name = _name(marked, count)
        numbers[f"{name}/split_parameters"] = split["parameters"]
        numbers[f"{name}/pooled_parameters"] = pooled["parameters"]
        for at, conflict in enumerate(config.conflicts):
            for key, value in (
                ("pooled/val_loss", pooled["val_loss"]),
                ("pooled/train_loss", pooled["train_loss"]),
                ("oracle/val_loss", split["val_loss"]),
                ("router/val_loss", split["routed"]),
                ("split/train_loss", split["train_loss"]),
                ("router/right", split["right"]),
            ):
                numbers[f"{name}/conflict{conflict:g}/{key}"] = value[-1][at]
    return numbers


def _crossings(config, gains) -> dict[str, list[float]]:
    """{"…/over_conflict" or "…/over_steps/conflict…": where the mean gain changes sign}."""
    found = {}
    for (marked, count), each in gains.items():
        for which, arm in enumerate(("oracle", "router")):
            mean = clear(each[:, which])  # (budgets, conflicts)
            name = f"{_name(marked, count)}/{arm}"
            found[f"{name}/over_conflict"] = crossing(config.conflicts, mean[-1])
            for at, conflict in enumerate(config.conflicts):
                logs = crossing([math.log2(budget) for budget in config.budgets], mean[:, at])
                found[f"{name}/over_steps/conflict{conflict:g}"] = [2**log for log in logs]
    return found


def _claims(config, gains) -> list[Claim]:
    count, conflict = config.adapters[-1], config.conflicts[-1]
    claims = []
    for marked, which, how in (
        (True, 1, "the row says its domain, a router sends every token"),
        (False, 0, "nothing says the domain, but specialists are told it"),
    ):
        ours = gains[marked, count][:, which, -1, -1]
        arm = ("oracle", "router")[which]
        claims.append(
            Claim(
                id=f"specialists.{SETTINGS[marked]}_{arm}", kind="order",
                ours=float(ours.mean()), unit="nats", direction="higher",
                holds=bool(clear(ours) > 0),
                note=f"held-out loss, pooled less specialists, K = {count}, conflict {conflict:g}, "
                f"{config.steps} steps: {how}; seeds "
                + ", ".join(f"{value:+.3f}" for value in ours),
            )
        )  # fmt: skip
    return claims


def _report(config, found: Found, metrics, crossings, rates) -> str:
    parts = ["# When do specialists win?", _task(config, rates)]
    for marked in SETTINGS:
        rows = []
        for count in config.adapters:
            name = _name(marked, count)
            for conflict in config.conflicts:
                at = f"{name}/conflict{conflict:g}"
                keys = ("oracle/val_loss", "router/val_loss", "pooled/val_loss")
                rows.append(
                    [
                        str(count),
                        f"{conflict:g}",
                        *(shown(metrics, f"{at}/{key}") for key in keys),
                        shown(metrics, f"{at}/split/train_loss"),
                        shown(metrics, f"{at}/pooled/train_loss"),
                        f"{metrics[f'{at}/router/right']:.1%}",
                    ]
                )
        parts += [
            "## The domain stands in the row" if marked else "## Nothing says the domain",
            "Every row begins with the mark of its domain, which the base carries to later tokens."
            if marked
            else "Every row begins with the same mark, whatever its domain. The specialists with "
            "their own adapter are told what nobody else knows.",
            markdown(
                ["K", "conflict", "split, own adapter", "split, router", "pooled", "split, train",
                 "pooled, train", "sent right"],
                rows,
            ),
            _crossing_text(config, crossings, marked),
            f"![curves](curves_{SETTINGS[marked]}.png) ![gain](steps_{SETTINGS[marked]}.png)",
        ]  # fmt: skip
    counts = [
        [
            str(count),
            f"{metrics[f'{_name(True, count)}/split_parameters']:,.0f}",
            f"{metrics[f'{_name(True, count)}/pooled_parameters']:,.0f}",
        ]
        for count in config.adapters
    ]
    parts += [
        "## Parameters",
        markdown(["K", "split, with the router", "pooled"], counts),
        "![map](map.png)",
    ]
    return "\n\n".join(parts)


def _task(config, rates) -> str:
    chosen = "; ".join(
        f"K = {count}, {arm}: {', '.join(f'{rate:g}' for rate in rates[arm, count])}"
        for count in config.adapters
        for arm in ("split", "pooled")
    )
    return (
        f"{config.questions} questions with as many answers; a row has a mark and {config.pairs} "
        "questions, each with its answer behind it, and only answers count. A share of the "
        "questions (the conflict) has another answer in every domain, the rest one for all. Base: "
        f"{config.layers} layers of width {config.width}, pretrained on rows of the same form with "
        "other answers, frozen. Adapters act in the last layer alone, on all projections, because "
        "the router decides there, from what the layers below have gathered. Split: K adapters of "
        f"rank {config.rank}, each trained for steps/K on rows of its own domain, and a router "
        f"(k = 1) solved from statistics of {config.router_rows} rows of each. Pooled: one adapter "
        f"of rank K × {config.rank}, and a little more for the router's parameters, trained on the "
        f"very same rows, mixed. Steps of {config.batch_rows} rows, which are all drawn afresh, "
        "so the training loss, of the last steps, is of rows not yet trained on. Learning rates "
        "are constant, so that every budget is a point of one run; each arm, K and budget has the "
        "one that was best on a seed of its own, by the mean over conflicts where the domain "
        f"stands in the row (for {', '.join(f'{budget:,}' for budget in config.budgets)} steps: "
        f"{chosen}). Nats an answer, mean ± standard deviation of "
        f"{counted(config.num_seeds)}, at {config.steps} steps unless said otherwise; chance is "
        f"{math.log(config.questions):.2f}."
    )


def _crossing_text(config, crossings, marked: bool) -> str:
    """Where the mean gain changes sign, or that it does not."""
    lines = [
        "Where the curves cross, by the mean over seeds, interpolated. Arms are level, and cross "
        f"nothing, where the mean of their difference is within {LEVEL:g} nats or within its "
        "spread over seeds: a constant learning rate has late spikes, of the pooled adapter above "
        "all. A positive gain is one of the specialists."
    ]
    for arm, label in (("oracle", "own adapter"), ("router", "router")):
        for count in config.adapters:
            name = f"{_name(marked, count)}/{arm}"
            over = crossings[f"{name}/over_conflict"]
            steps = {
                conflict: crossings[f"{name}/over_steps/conflict{conflict:g}"]
                for conflict in config.conflicts
            }
            crossed = [
                f"conflict {conflict:g} at {', '.join(f'{point:,.0f}' for point in points)}"
                for conflict, points in steps.items()
                if points
            ]
            lines.append(
                f"- K = {count}, {label}: over the conflict at {config.steps} steps "
                + (f"at {', '.join(f'{point:.2f}' for point in over)}" if over else "none")
                + "; over steps "
                + ("; ".join(crossed) if crossed else "none at any conflict")
                + "."
            )
    return "\n".join([lines[0], "", *lines[1:]])


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _curves(config, losses: Mapping[int, np.ndarray], title: str):
    """Loss against steps, a panel for each K and conflict."""
    rows, columns = len(losses), len(config.conflicts)
    figure = _figure(1.2 + 2.1 * columns, 1.1 + 1.8 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for (count, loss), line in zip(losses.items(), panels, strict=True):
        for at, axes in enumerate(line):
            for index, label in enumerate(ARMS.values()):
                axes.plot(
                    config.budgets, loss[index, :, at], label=label, color=adapter_color(index),
                    marker="o", markersize=3, linestyle=("-", "--", "-")[index],
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"K = {count}, conflict {config.conflicts[at]:g}", fontsize=9)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("steps in all")
    for axes in panels[:, 0]:
        axes.set_ylabel("nats an answer")
    panels[0, 0].legend(frameon=False, fontsize=7)
    figure.suptitle(f"{title}: held-out loss, mean over seeds")
    return figure


def _map(config, gains: Mapping[int, np.ndarray], title: str):
    """Gain over conflict × steps, a column of panels for each K."""
    figure = _figure(1.6 + 3.2 * len(gains), 6.0)
    panels = figure.subplots(2, len(gains), squeeze=False)
    for column, (count, each) in enumerate(gains.items()):
        for which, label in enumerate(("own adapter", "router")):
            axes = panels[which, column]
            image = _cells(axes, each[:, which].mean(axis=0), config.conflicts, config.budgets)
            axes.set_title(f"K = {count}, {label}", fontsize=10)
            axes.set_ylabel("steps in all")
            _marks(axes, clear(each[:, which]))
    _bar(figure, image, panels)
    figure.suptitle(f"{title}: pooled loss less the specialists' (crosses: the curves cross)")
    return figure


def _last(config, gains):
    """Gain over conflict × K with the whole budget, both settings, both ways to choose."""
    figure = _figure(10.0, 1.8 + 1.2 * len(config.adapters))
    panels = figure.subplots(2, 2, squeeze=False)
    for row, marked in enumerate(SETTINGS):
        for which, label in enumerate(("own adapter", "router")):
            cells = np.stack([gains[marked, count][:, which, -1] for count in config.adapters], 1)
            axes = panels[row, which]
            image = _cells(axes, cells.mean(axis=0), config.conflicts, config.adapters)
            axes.set_title(
                f"{'domain in the row' if marked else 'domain hidden'}, {label}", fontsize=10
            )
            axes.set_ylabel("K")
            _marks(axes, clear(cells))
    _bar(figure, image, panels)
    figure.suptitle(
        f"Pooled loss less the specialists', {config.steps} steps (crosses: the curves cross)"
    )
    return figure


def _cells(axes, cells: np.ndarray, columns: Sequence, rows: Sequence):
    from matplotlib.colors import SymLogNorm

    norm = SymLogNorm(linthresh=LEVEL, vmin=-3.0, vmax=3.0)
    image = axes.imshow(cells, cmap="RdBu", norm=norm, aspect="auto", origin="lower")
    for y, x in np.ndindex(*cells.shape):
        dark = abs(cells[y, x]) > 0.3
        axes.text(
            # Above the middle, where crosses lie.
            x, y + 0.27, f"{cells[y, x]:+.2f}", ha="center", va="center", fontsize=7,
            color="white" if dark else "black",
        )  # fmt: skip
    axes.set_xticks(range(len(columns)), [f"{each:g}" for each in columns])
    axes.set_yticks(range(len(rows)), [f"{each:,}" for each in rows])
    axes.set_xlabel("conflict")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _marks(axes, gains: np.ndarray) -> None:
    """A cross wherever a row or a column of cells changes sign."""
    rows, columns = gains.shape
    across = [(x, float(y)) for y in range(rows) for x in crossing(range(columns), gains[y])]
    along = [(float(x), y) for x in range(columns) for y in crossing(range(rows), gains[:, x])]
    for x, y in across + along:
        axes.plot(x, y, marker="x", color="black", markersize=7, markeredgewidth=1.6)


def _bar(figure, image, panels) -> None:
    bar = figure.colorbar(
        image,
        ax=panels,
        pad=0.01,
        label="gain (nats an answer)",
        ticks=[-3, -1, -0.1, 0, 0.1, 1, 3],
    )
    bar.ax.set_yticklabels(["−3", "−1", "−0.1", "0", "0.1", "1", "3"])
    bar.outline.set_visible(False)
