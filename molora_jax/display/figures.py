"""Heat maps and curves as PNG, as matplotlib `Figure` objects.

They are made without pyplot: nothing global is set and no window opens. `save_figure` writes one.
"""

import functools
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from molora_jax.display.text import adapter_color, printable_pieces, show_breaks
from pallas_kernels.notebook import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def share_figure(
    shares: Float[ArrayLike, "G K"],
    *,
    domain_names: Sequence[str],
    adapter_names: Sequence[str],
    title: str = "Share of each domain's tokens by adapter",
) -> "Figure":
    """Domain × adapter heat map with the numbers in the cells."""
    shares = np.asarray(shares, np.float64)
    G, K = shares.shape
    figure = _figure(1.9 + 0.95 * K, 1.35 + 0.55 * G)
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    for g, k in np.ndindex(G, K):
        text = "–" if np.isnan(shares[g, k]) else f"{shares[g, k]:.1%}"
        axes.text(
            k, g, text, ha="center", va="center", color="white" if shares[g, k] > 0.55 else "black"
        )
    axes.set_xticks(range(K), adapter_names, parse_math=False)
    axes.set_yticks(range(G), domain_names, parse_math=False)
    axes.set_xlabel("adapter")
    axes.set_ylabel("domain")
    axes.set_title(title)
    _quiet(axes)
    _color_bar(figure, image, axes, "share of tokens")
    return figure


def layer_share_figure(
    shares: Float[ArrayLike, "L G K"],
    *,
    domain_names: Sequence[str],
    adapter_names: Sequence[str],
    title: str = "Share of each domain's tokens by adapter and layer",
) -> "Figure":
    """One heat map per domain, adapter × layer, on one scale."""
    shares = np.asarray(shares, np.float64)
    L, G, K = shares.shape
    figure = _figure(max(5.0, 2.4 + 0.2 * L), 0.9 + G * (0.5 + 0.26 * K))
    panels = figure.subplots(G, 1, sharex=True, squeeze=False)[:, 0]
    for g, axes in enumerate(panels):
        image = axes.imshow(shares[:, g].T, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_yticks(range(K), adapter_names, parse_math=False)
        axes.set_title(f"tokens of {domain_names[g]}", loc="left", fontsize=10)
        _quiet(axes)
    _layer_ticks(panels[-1].xaxis, L)
    panels[-1].set_xlabel("layer")
    figure.suptitle(title)
    _color_bar(figure, image, list(panels), "share of tokens")
    return figure


def token_figure(
    gates: Float[ArrayLike, "N K"],
    tokens: Sequence[str | bytes],
    *,
    adapter_names: Sequence[str],
    title: str = "Gate of each adapter, token by token",
) -> "Figure":
    """Token × adapter heat map along one sequence, with the token texts where they fit."""
    gates = np.asarray(gates, np.float64)
    N, K = gates.shape
    if len(tokens) != N:
        raise ValueError(f"{len(tokens)} tokens for gates of {N}: expected one text per token")
    figure = _figure(min(max(5.0, 2.2 + 0.2 * N), 20.0), 1.9 + 0.32 * K)
    axes = figure.add_subplot()
    image = axes.imshow(gates.T, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_yticks(range(K), adapter_names, parse_math=False)
    if N <= 90:
        texts = [_drawable(show_breaks(piece)[:14]) for piece in printable_pieces(tokens)]
        axes.set_xticks(
            range(N), texts, rotation=90, fontsize=7, family="monospace", parse_math=False
        )
    else:
        axes.set_xlabel("token")
    axes.set_title(title)
    _quiet(axes)
    _color_bar(figure, image, axes, "gate")
    return figure


def curve_figure(
    curves: Mapping[str, tuple[Any, Any]],
    *,
    ylabel: str = "loss (nats per token)",
    title: str = "",
    smooth: int = 1,
) -> "Figure":
    """One line per name from (steps, values); `smooth` > 1: a running mean over a pale raw line."""
    figure = _figure(6.4, 3.8)
    axes = figure.add_subplot()
    styles = ("-", "--", "-.", ":")
    for index, (name, (steps, values)) in enumerate(curves.items()):
        steps, values = np.asarray(steps, np.float64), np.asarray(values, np.float64)
        color, style = adapter_color(index), styles[index // len(PALETTE) % len(styles)]
        window = min(smooth, len(values))
        if window > 1:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            # Over fewer values at the start, so that the line begins where the run began.
            total = np.cumsum(np.concatenate([np.zeros(1), values]))
            first = np.maximum(np.arange(1, len(values) + 1) - window, 0)
            last = np.arange(1, len(values) + 1)
            values = (total[last] - total[first]) / (last - first)
        marker = "o" if len(values) == 1 else None
        axes.plot(steps, values, color=color, linestyle=style, marker=marker, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if curves:
        axes.legend(frameon=False)
    return figure


def save_figure(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    """Writes a PNG (or what the suffix says), making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    return path


def _figure(width: float, height: float) -> "Figure":
    # Imported here: matplotlib takes half a second, and most of the library does not draw.
    return _picture_class()(figsize=(width, height), layout="constrained")


@functools.cache
def _picture_class() -> "type[Figure]":
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A Figure that a notebook shows by itself; matplotlib's own needs pyplot for that."""

        def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
            """The picture, and its titles for whom a page is read to."""
            content = io.BytesIO()
            self.savefig(content, format="png", dpi=100, facecolor="white")
            titles = [self.get_suptitle(), *(axes.get_title() for axes in self.axes)]
            return content.getvalue(), {"alt": "; ".join(title for title in titles if title)}

    return Picture


def _drawable(text: str) -> str:
    """`text` with a box for what the font lacks, where matplotlib would warn for every glyph."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("monospace"))
    return "".join(c if font.get_char_index(ord(c)) else "▯" for c in text)


def _color_bar(figure: "Figure", image: Any, axes: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, label=label, pad=0.02)
    bar.outline.set_visible(False)


def _quiet(axes: Any) -> None:
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _layer_ticks(axis: Any, num_layers: int) -> None:
    step = max(1, -(-num_layers // 15))
    axis.set_ticks(range(0, num_layers, step))
