"""Pictures of one analysed text: choices by layer, entropy, agreement of layers, forced losses."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from molora_jax.display.figures import _color_bar, _drawable, _figure, _quiet
from molora_jax.display.text import adapter_color, printable_pieces, show_breaks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_TEXTS = 100  # tokens whose texts can still be read under a picture


def choice_figure(
    choices: Mapping[str, Int[ArrayLike, "L N"]],
    tokens: Sequence[str | bytes],
    *,
    adapter_names: Sequence[str],
    title: str = "Adapter of each token, layer by layer",
) -> "Figure":
    """Layer × token map in the adapters' colours, a panel for each router; white: no adapter."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    shown = {name: np.asarray(ids) for name, ids in choices.items()}
    L, N = next(iter(shown.values())).shape
    figure = _figure(_width(N), 1.5 + len(shown) * (0.5 + 0.075 * max(L, 12)))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    # The last is taken by −1.
    colors = np.array([to_rgb(adapter_color(j)) for j in range(len(adapter_names))] + [(1, 1, 1)])
    for axes, (name, ids) in zip(panels, shown.items(), strict=True):
        axes.imshow(colors[ids], aspect="auto", interpolation="nearest")
        axes.set_ylabel("layer")
        _whole_numbers(axes.yaxis)
        if len(shown) > 1:
            axes.set_title(name, loc="left", fontsize=10, parse_math=False)
        _quiet(axes)
    _token_axis(panels[-1], tokens)
    figure.suptitle(title, parse_math=False)
    none = any((ids < 0).any() for ids in shown.values())
    handles = [Patch(color=colors[j], label=name) for j, name in enumerate(adapter_names)]
    if none:
        handles.append(Patch(facecolor="white", edgecolor="grey", label="base only"))
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def entropy_figure(
    entropies: Mapping[str, Float[ArrayLike, "l N"]],
    *,
    num_adapters: int,
    title: str = "Entropy of a token's router softmax, by layer",
) -> "Figure":
    """Median over tokens with the middle half as a band, for each router; ln J is the most."""
    figure = _figure(6.4, 3.8)
    axes = figure.add_subplot()
    for index, (name, values) in enumerate(entropies.items()):
        values = np.asarray(values, np.float64)
        known = np.isfinite(values).any(axis=1)
        layers = np.flatnonzero(known)
        low, middle, high = np.nanpercentile(values[known], (25, 50, 75), axis=1)
        color = adapter_color(index)
        marker = "o" if len(layers) == 1 else None
        axes.plot(layers, middle, color=color, marker=marker, linestyle="-" if not index else "--",
                  label=_plain(f"{name}, median and middle half"))  # fmt: skip
        if len(layers) == 1:
            axes.vlines(layers, low, high, color=color)
        else:
            axes.fill_between(layers, low, high, color=color, alpha=0.18, linewidth=0)
    most = float(np.log(max(num_adapters, 1)))
    axes.axhline(most, color="#777777", linewidth=1, linestyle=":")
    axes.annotate(f"ln {num_adapters}: no preference", (0.01, most), xytext=(0, -4),
                  xycoords=("axes fraction", "data"), textcoords="offset points", va="top",
                  fontsize=8, color="#555555")  # fmt: skip
    axes.set_ylim(-0.03, max(most * 1.06, 0.1))
    _whole_numbers(axes.xaxis)
    axes.set_xlabel("layer")
    axes.set_ylabel("entropy (nats)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def agreement_figure(
    agreements: Mapping[str, Float[ArrayLike, "L L"]],
    *,
    title: str = "Share of tokens with the same adapter in two layers",
) -> "Figure":
    """Layer × layer heat map, a panel for each router, on one scale."""
    shown = {name: np.asarray(matrix, np.float64) for name, matrix in agreements.items()}
    figure = _figure(1.6 + 3.6 * len(shown), 4.2)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    low = min(float(matrix.min()) for matrix in shown.values())
    low = min(np.floor(low * 10) / 10, 0.9)
    for axes, (name, matrix) in zip(panels, shown.items(), strict=True):
        image = axes.imshow(matrix, cmap="Blues", vmin=low, vmax=1.0, origin="lower")
        _whole_numbers(axes.xaxis)
        _whole_numbers(axes.yaxis)
        axes.set_xlabel("layer")
        axes.set_ylabel("layer")
        if len(shown) > 1:
            axes.set_title(name, loc="left", fontsize=10, parse_math=False)
        _quiet(axes)
    figure.suptitle(title, fontsize=11)
    _color_bar(figure, image, list(panels), "share of tokens")
    return figure


def forced_figure(
    differences: Float[ArrayLike, "J1 N"],
    tokens: Sequence[str | bytes],
    *,
    adapter_names: Sequence[str],
    title: str = "Loss with every token at one adapter, less the routed loss",
) -> "Figure":
    """Forced adapter × token map, centred at 0; `adapter_names` names each row.

    Colours end at the 97th percentile of the absolute difference, so that one surprise does not
    pale all else; white where there is no loss.
    """
    values = np.asarray(differences, np.float64)
    known = np.abs(values[np.isfinite(values)])
    limit = max(float(np.percentile(known, 97)), 0.05) if known.size else 1.0
    rows = [
        f"{name} ({mean:+.2f})" if np.isfinite(mean) else name
        for name, mean in zip(adapter_names, _row_means(values), strict=True)
    ]
    figure = _figure(_width(values.shape[1]), 2.3 + 0.3 * len(values))
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto",
                        interpolation="nearest")  # fmt: skip
    axes.set_yticks(range(len(values)), rows, parse_math=False)
    _token_axis(axes, tokens)
    axes.set_title(f"{title}; mean in brackets", fontsize=11, parse_math=False)
    _quiet(axes)
    _color_bar(figure, image, axes, "nats, above 0: worse")
    return figure


def _row_means(values: np.ndarray) -> list[float]:
    return [float(row[np.isfinite(row)].mean()) if np.isfinite(row).any() else np.nan
            for row in values]  # fmt: skip


def _whole_numbers(axis: Any) -> None:
    axis.get_major_locator().set_params(integer=True)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")


def _width(num_tokens: int) -> float:
    return min(max(6.4, 2.4 + 0.14 * num_tokens), 16.0)


def _token_axis(axes: Any, tokens: Sequence[str | bytes]) -> None:
    if len(tokens) > _MOST_TEXTS:
        axes.set_xlabel("token")
        return
    texts = [_drawable(show_breaks(piece)[:14]) for piece in printable_pieces(tokens)]
    axes.set_xticks(
        range(len(tokens)), texts, rotation=90, fontsize=6.5, family="monospace", parse_math=False
    )
