"""What a sweep found, as PNG: a heat map of two settings, or parallel coordinates of any number."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from molora_jax.display.figures import _color_bar, _drawable, _figure, _quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_TEXT = 18  # letters of a tick
APART = 0.055  # of an axis' height, so that two ticks do not touch
BEST = "#c2410c"


def grid_figure(
    values: Float[ArrayLike, "Y X"],
    *,
    x: tuple[str, Sequence[object]],
    y: tuple[str, Sequence[object]],
    label: str,
    lower_is_better: bool,
    title: str = "",
) -> "Figure":
    """Heat map of a number over two settings, the best cell framed; NaN is a cell without a run.

    Args:
      x, y: the setting's name, and its values in the order of the columns and rows.
      label: what the number is.
    """
    values = np.asarray(values, np.float64)
    Y, X = values.shape
    texts = [[_short(each) for each in setting[1]] for setting in (x, y)]
    figure = _figure(2.6 + 0.95 * X, 1.5 + 0.55 * Y)
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="Blues_r" if lower_is_better else "Blues", aspect="auto")
    low, high = image.get_clim()
    for row, column in np.ndindex(Y, X):
        value = values[row, column]
        share = (value - low) / (high - low) if high > low else 0.5
        dark = (1 - share if lower_is_better else share) > 0.6
        text = "–" if np.isnan(value) else f"{value:.4g}"
        color = "white" if dark else "black"
        axes.text(column, row, text, ha="center", va="center", color=color)
    axes.set_facecolor("0.92")  # where there is no run
    if high > low:
        best = int((np.nanargmin if lower_is_better else np.nanargmax)(values))
        _frame(axes, *divmod(best, X))
    axes.set_xticks(range(X), texts[0], parse_math=False)
    axes.set_yticks(range(Y), texts[1], parse_math=False)
    axes.set_xlabel(x[0], parse_math=False)
    axes.set_ylabel(y[0], parse_math=False)
    axes.set_title(title, parse_math=False)
    _quiet(axes)
    _color_bar(figure, image, axes, label)
    return figure


def parallel_figure(
    columns: Mapping[str, Sequence[object]], *, lower_is_better: bool, title: str = ""
) -> "Figure":
    """Parallel coordinates: an upright axis for every column, a line for every run.

    Args:
      columns: what each run has, in order; the last is the number that colours the lines, and the
        best run's line is the thick one. A column of numbers is drawn to scale (a logarithmic one
        where they are positive and span a factor of 20), any other with a place for each value.
    """
    names = list(columns)
    from matplotlib import colormaps

    figure = _figure(1.6 + 1.55 * len(names), 4.2)
    axes = figure.add_subplot()
    heights = np.stack([_draw_axis(axes, i, columns[name]) for i, name in enumerate(names)], -1)
    worth = 1 - heights[:, -1] if lower_is_better else heights[:, -1]
    best = int(np.argmax(worth))
    for run in np.argsort(worth):  # the best on top
        axes.plot(
            range(len(names)),
            heights[run],
            color=BEST if run == best else colormaps["Blues"](0.3 + 0.6 * worth[run]),
            linewidth=2.5 if run == best else 1.2,
            zorder=4 if run == best else 3,
        )
    axes.set_xticks(range(len(names)), [_short(name) for name in names], parse_math=False)
    axes.set_xlim(-0.25, len(names) - 0.5)
    axes.set_ylim(-0.06, 1.06)
    axes.set_yticks([])
    _quiet(axes)
    way = "the lower" if lower_is_better else "the higher"
    axes.set_title(f"{title}\n{way}, the better; the best run is the thick line", parse_math=False)
    return figure


def _draw_axis(axes, position: int, values: Sequence[object]) -> np.ndarray:
    """Draws one upright axis with its ticks; returns the height (0 to 1) of every value."""
    axes.axvline(position, color="0.75", linewidth=1, zorder=1)
    numeric = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
    if numeric:
        numbers = np.array(values, np.float64)
        scaled = _scale(numbers)
        low, high = float(scaled.min()), float(scaled.max())
        span = high - low
        heights = (scaled - low) / span if span > 0 else np.full(len(scaled), 0.5)
        places = {f"{number:.4g}": height for number, height in zip(numbers, heights, strict=True)}
    else:
        texts = [_short(each) for each in values]
        distinct = sorted(set(texts))
        spread = np.linspace(0, 1, len(distinct)) if len(distinct) > 1 else np.array([0.5])
        places = dict(zip(distinct, spread, strict=True))
        heights = np.array([places[text] for text in texts])
    last = -np.inf
    for text, height in sorted(places.items(), key=lambda place: place[1]):
        # It would be written over the one below it, or over the topmost.
        if height - last < APART or 0 < 1 - height < APART:
            continue
        last = height
        axes.text(
            position + 0.05,
            height,
            text,
            va="center",
            fontsize=8,
            zorder=5,
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
        )
    return heights


def _scale(numbers: np.ndarray) -> np.ndarray:
    """The numbers, or their logarithms where a linear axis would crowd the small ones."""
    low, high = numbers.min(), numbers.max()
    return np.log(numbers) if low > 0 and high >= 20 * low else numbers


def _frame(axes, row: int, column: int) -> None:
    from matplotlib.patches import Rectangle

    where = (column - 0.5, row - 0.5)
    axes.add_patch(Rectangle(where, 1, 1, fill=False, edgecolor=BEST, linewidth=2.5, zorder=3))


def _short(value: object) -> str:
    """A value as a tick has it: on one line, cut in the middle, in letters that the font has."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = _drawable(" ".join(text.split()))
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[: half - 1]}…{text[-half:]}"
