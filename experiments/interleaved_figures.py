"""What was generated, as PNG: letters beside real ones, puzzles, and who wrote which token."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.interleaved_data import BODY, CODES, MODALITIES, Grid, Layout, to_bits
from experiments.interleaved_generation import (
    PROFILE,
    Generated,
    columns_of,
    grids_in,
    pictures_in,
)
from experiments.interleaved_sources import Data
from molora_jax.display import adapter_color, save_figure

# The colours that ARC's own pages give to 0 … 9.
ARC_COLORS = (
    *("#000000", "#0074D9", "#FF4136", "#2ECC40", "#FFDC00"),
    *("#AAAAAA", "#F012BE", "#FF851B", "#7FDBFF", "#870C25"),
)
ACROSS = 8  # pictures of one alphabet on each side of the sheet, at most


def draw(generated: Generated, data: Data, layout: Layout, pieces: Any, path: pathlib.Path) -> None:
    """sheet.png, puzzles.png, strip.png, and every whole picture in pictures/.

    pieces  ids → the text of each
    """
    by_alphabet = whole_pictures(generated, layout)
    folder = path / "pictures"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for alphabet, pictures in by_alphabet.items():
        name = "".join(c if c.isalnum() else "_" for c in alphabet.lower())
        for at, bits in enumerate(pictures):
            save_bits(bits, folder / f"{name}_{at}.png")
    save_figure(sheet(by_alphabet, data), path / "sheet.png")
    if generated.solved:
        save_figure(puzzle_figure(generated.solved, layout), path / "puzzles.png")
    save_figure(strip(*shown(generated, layout), layout, pieces), path / "strip.png")


def whole_pictures(generated: Generated, layout: Layout) -> dict[str, list[np.ndarray]]:
    """By alphabet of the prompt, the first picture of every answer, where it is whole.

    Further pictures of an answer have captions that the model chose.
    """
    found: dict[str, list[np.ndarray]] = {}
    for text, generation in generated.answers[PROFILE]:
        pictures = found.setdefault(text.split(",")[0], [])
        first = pictures_in(up_to_first_end(generation.tokens, layout), layout)
        pictures += first.pictures
    return found


def up_to_first_end(ids: Sequence[int], layout: Layout) -> list[int]:
    end = layout.grid - 1
    ids = list(ids)
    return ids[: ids.index(end) + 1] if end in ids else ids


def save_bits(bits: np.ndarray, path: pathlib.Path, *, scale: int = 8) -> None:
    """A PNG of the picture as it is, each of its cells `scale` pixels wide; ink is black."""
    from matplotlib.image import imsave

    large = np.kron(1 - bits, np.ones((scale, scale)))
    imsave(path, large, cmap="gray", vmin=0, vmax=1)


def sheet(by_alphabet: Mapping[str, Sequence[np.ndarray]], data: Data):
    """A line an alphabet: generated pictures on the left, held-out real ones on the right."""
    from matplotlib.figure import Figure

    across = min(ACROSS, max(1, *(len(pictures) for pictures in by_alphabet.values())))
    gap, pitch = 10, 16
    image = np.full((pitch * len(by_alphabet), 2 * pitch * across + gap), 0.88)
    inch = 0.028  # of a cell
    figure = Figure(
        figsize=(inch * image.shape[1] + 2.7, inch * image.shape[0] + 0.5), layout="constrained"
    )
    axes = figure.add_subplot()
    rng = np.random.default_rng(0)
    for line, (alphabet, pictures) in enumerate(by_alphabet.items()):
        known = [p.codes for p in data.heldout_pictures if p.alphabet == alphabet]
        real = [to_bits(known[at]) for at in rng.permutation(len(known))[:across]]
        for side, shown_here in ((0, pictures[:across]), (pitch * across + gap, real)):
            for at, bits in enumerate(shown_here):
                top, left = line * pitch + 1, side + at * pitch + 1
                image[top : top + 14, left : left + 14] = 1 - bits
    axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_yticks([line * pitch + 8 for line in range(len(by_alphabet))], list(by_alphabet))
    side = pitch * across
    axes.set_xticks(
        [side / 2, side + gap + side / 2],
        ["generated for the alphabet", "real, held out"],
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def puzzle_figure(solved: Sequence[tuple[Any, Any]], layout: Layout):
    """A line a held-out puzzle: the pair shown, the input, what was generated, what was wanted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.75 * len(solved) + 0.3), layout="constrained")
    panels = figure.subplots(len(solved), 5, squeeze=False)
    titles = ("shown: input", "shown: output", "input", "generated", "wanted")
    for line, (puzzle, generation) in zip(panels, solved, strict=True):
        answer = next(iter(grids_in(generation.tokens, layout)), None)
        grids = (*puzzle.shown, puzzle.given, answer, puzzle.wanted)
        for axes, title, grid in zip(line, titles, grids, strict=True):
            axes.set_title(title, fontsize=9)
            _grid(axes, grid)
    return figure


def _grid(axes: Any, grid: Grid | None) -> None:
    from matplotlib.colors import ListedColormap

    axes.set_xticks([])
    axes.set_yticks([])
    if grid is None:
        axes.text(0.5, 0.5, "no grid", ha="center", va="center", transform=axes.transAxes)
        return
    cells = np.array(grid)
    axes.imshow(cells, cmap=ListedColormap(ARC_COLORS), vmin=-0.5, vmax=9.5)
    height, width = cells.shape
    axes.set_xticks(np.arange(0.5, width - 1), minor=True)
    axes.set_yticks(np.arange(0.5, height - 1), minor=True)
    axes.grid(which="minor", color="#555555", linewidth=0.5)
    axes.tick_params(which="both", length=0)


def shown(generated: Generated, layout: Layout) -> tuple[list[int], np.ndarray, int]:
    """Ids and adapters of the answer with most whole pictures, and where it begins."""
    answers = [generation for _, generation in generated.answers[PROFILE]]
    best = max(answers, key=lambda each: len(pictures_in(each.tokens, layout).pictures))
    columns = columns_of(best)
    ids = [*best.request.prompt, *best.tokens]
    # The last token of an answer is never read.
    return ids[: len(columns)], columns, len(best.request.prompt)


def strip(ids: Sequence[int], columns: np.ndarray, begins: int, layout: Layout, pieces: Any):
    """Every token of a sample in the colour of its adapter; its pictures above, its text below.

    begins  the first token that was generated
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    n = len(ids)
    figure = Figure(figsize=(min(max(7.0, 0.085 * n), 14.0), 3.6), layout="constrained")
    axes = figure.add_subplot()
    colors = ListedColormap([adapter_color(at) for at in range(-1, len(MODALITIES))])
    axes.imshow(
        columns[None], cmap=colors, vmin=-1.5, vmax=2.5, aspect="auto", extent=(-0.5, n - 0.5, 0, 1)
    )
    for start in [at for at, token in enumerate(ids) if token == layout.picture]:
        codes = layout.codes(ids[start + 1 : start + 1 + BODY])
        if codes is not None and len(codes) == CODES:
            bits = to_bits(codes)
            inset = axes.inset_axes((start + 12, 1.25, BODY - 22, 2.6), transform=axes.transData)
            inset.imshow(1 - bits, cmap="gray", vmin=0, vmax=1)
            inset.set_xticks([])
            inset.set_yticks([])
    for at, text in enumerate(pieces(list(ids))):
        if columns[at] == 0 and any(c.isalnum() for c in text):
            axes.text(at, -0.12, text.strip(), rotation=90, ha="center", va="top", fontsize=8)
    axes.axvline(begins - 0.5, color="black", linestyle="--", linewidth=1)
    axes.text(begins + 0.5, 3.95, "generated", ha="left", va="top", fontsize=9)
    axes.set_ylim(-1.9, 4.0)
    axes.set_xlim(-1, n)
    axes.set_yticks([])
    axes.set_xlabel("token")
    axes.spines[["top", "right", "left"]].set_visible(False)
    present = sorted(set(columns.tolist()))
    names = {-1: "base", **dict(enumerate(MODALITIES))}
    axes.legend(
        handles=[Patch(color=adapter_color(at), label=f"{names[at]} adapter") for at in present],
        loc="upper center", ncols=len(present), frameon=False, bbox_to_anchor=(0.5, 1.14),
    )  # fmt: skip
    return figure


def losses_figure(losses: Mapping[str, Mapping[str, float]]):
    """Bars: held-out loss of every arm, a group a modality."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    arms = list(losses)
    width = 0.8 / len(arms)
    for at, arm in enumerate(arms):
        values = losses[arm]
        places = np.arange(len(values)) + (at - (len(arms) - 1) / 2) * width
        axes.bar(places, list(values.values()), width, label=arm, color=adapter_color(at - 1))
    axes.set_xticks(range(len(losses[arms[0]])), [f"behind {name}" for name in losses[arms[0]]])
    axes.set_ylabel("held-out loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, fontsize=8)
    return figure
