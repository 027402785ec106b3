"""Draws the two pictures of how_it_works.md: `python docs/draw.py` writes them beside this file."""

import pathlib
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = pathlib.Path(__file__).resolve().parent
FROZEN, ADAPTED, ROUTED, PLAIN = "#d9dee6", "#f6c48a", "#a9cbe8", "#ffffff"
SLOTS = ("#f6c48a", "#a8d8a8", "#d9b3e0", "#eeeeee")  # three adapters, and an empty slot


def main() -> None:
    """Writes data_flow.png and layout.png."""
    for name, figure in (("data_flow", data_flow()), ("layout", layout())):
        # Without the version of matplotlib in it the file changes only when the picture does.
        figure.savefig(HERE / f"{name}.png", dpi=110, metadata={"Software": None})


def data_flow() -> Figure:
    """One pass, from token ids to logits, with what is decided where."""
    figure, axes = canvas(11, 5.6)
    box(axes, 0.2, 4.2, 1.5, 0.7, "token ids\n(B, S)", PLAIN)
    box(axes, 2.2, 4.2, 1.5, 0.7, "embedding", FROZEN)
    axes.add_patch(Rectangle((4.0, 0.35), 5.0, 5.0, fill=False, linestyle="--", color="#777777"))
    axes.text(4.1, 5.1, "layer, L times (one scan)", fontsize=9, color="#555555", va="center")
    box(axes, 4.2, 4.2, 1.5, 0.7, "hidden state\n(B, S, D)", PLAIN)
    box(axes, 4.2, 2.8, 1.5, 0.8, "router\n(of this layer)", ROUTED)
    box(axes, 4.2, 1.5, 1.5, 0.8, "Routing: ids,\ngates (N, k)", ROUTED)
    box(axes, 4.2, 0.5, 1.5, 0.7, "plan: tokens by\nadapter", ROUTED)
    box(axes, 6.9, 4.2, 1.9, 0.7, "norm, then x (N, D)", FROZEN)
    box(axes, 6.4, 2.8, 1.0, 0.8, "x·Wᵀ\nfrozen", FROZEN)
    box(axes, 7.7, 2.8, 1.1, 0.8, "Σ gate·\nB·(A·x)", ADAPTED)
    box(axes, 6.9, 1.5, 1.9, 0.8, "sum: q, k, v, o,\ngate, up, down", PLAIN)
    box(axes, 6.9, 0.5, 1.9, 0.7, "attention, MLP,\nadd to hidden state", FROZEN)
    box(axes, 9.3, 4.2, 1.5, 0.7, "final norm,\noutput", FROZEN)
    box(axes, 9.3, 2.8, 1.5, 0.8, "logits\n(B, S, V)", PLAIN)
    box(axes, 9.3, 1.5, 1.5, 0.8, "AdapterBank,\nK slots", ADAPTED)
    box(axes, 9.3, 0.5, 1.5, 0.7, "adapter folders\n(PEFT)", PLAIN)
    arrow(axes, (1.7, 4.55), (2.2, 4.55))
    arrow(axes, (3.7, 4.55), (4.2, 4.55))
    arrow(axes, (5.7, 4.55), (6.9, 4.55))
    axes.plot([0.95, 0.95], [4.2, 3.2], color="#444444", linewidth=1.2)
    arrow(axes, (0.95, 3.2), (4.2, 3.2))
    axes.text(
        0.95, 2.75, "a router by token ids, row or control\ntoken decides once, before layer 0",
        fontsize=8.5, va="center", color="#555555",
    )  # fmt: skip
    for row, (color, text) in enumerate(
        ((FROZEN, "frozen base"), (ADAPTED, "adapters"), (ROUTED, "the decision"))
    ):
        axes.add_patch(
            Rectangle((0.95, 1.6 - 0.4 * row), 0.35, 0.24, facecolor=color, edgecolor="#444444")
        )
        axes.text(1.45, 1.72 - 0.4 * row, text, fontsize=9, va="center")
    arrow(axes, (4.95, 4.2), (4.95, 3.6))
    arrow(axes, (4.95, 2.8), (4.95, 2.3))
    arrow(axes, (4.95, 1.5), (4.95, 1.2))
    arrow(axes, (7.2, 4.2), (6.9, 3.6))
    arrow(axes, (8.1, 4.2), (8.25, 3.6))
    arrow(axes, (6.9, 2.8), (7.4, 2.3))
    arrow(axes, (8.25, 2.8), (8.15, 2.3))
    arrow(axes, (7.85, 1.5), (7.85, 1.2))
    arrow(axes, (10.05, 1.2), (10.05, 1.5))
    axes.plot([9.3, 9.15, 9.15], [1.9, 1.9, 3.2], color="#444444", linewidth=1.2)
    arrow(axes, (9.15, 3.2), (8.8, 3.2))
    # Left of the column of the base product, so that no arrow crosses a box.
    axes.plot([5.7, 6.0, 6.0], [1.9, 1.9, 2.55], color="#444444", linewidth=1.2)
    axes.plot([5.7, 6.0, 6.0], [0.85, 0.85, 1.9], color="#444444", linewidth=1.2)
    axes.plot([6.0, 7.95], [2.55, 2.55], color="#444444", linewidth=1.2)
    arrow(axes, (7.95, 2.55), (7.95, 2.8))
    arrow(axes, (9.0, 4.55), (9.3, 4.55))
    arrow(axes, (10.05, 4.2), (10.05, 3.6))
    return figure


def layout() -> Figure:
    """The bank of a projection, a Routing, and the plan that sorts its tokens."""
    figure, axes = canvas(11, 5.2)
    title(axes, 0.2, 4.9, "AdapterBank.stacks['q_proj'], one layer of L")
    for slot, (color, text) in enumerate(
        zip(SLOTS, ("code, r = 8", "math, r = 4", "law, r = 8", "empty"), strict=True)
    ):
        y = 3.9 - 0.85 * slot
        axes.text(0.2, y + 0.3, f"slot {slot}", fontsize=9, va="center")
        for x, width, label in ((0.9, 1.5, "A (R, D)"), (2.7, 1.5, "B (R, F)")):
            axes.add_patch(Rectangle((x, y), width, 0.6, facecolor="#eeeeee", edgecolor="#444444"))
            rows = 0.0 if text == "empty" else 0.3 if "4" in text else 0.6
            axes.add_patch(Rectangle((x, y + 0.6 - rows), width, rows, facecolor=color))
            axes.add_patch(Rectangle((x, y), width, 0.6, fill=False, edgecolor="#444444"))
            axes.text(x + width / 2, y + 0.3, label, fontsize=8, ha="center", va="center")
        axes.text(4.3, y + 0.3, text, fontsize=8, va="center")
    axes.text(
        0.2, 0.75, "K slots of rank R, whatever is in them: a load\nwrites one slot and compiles"
        " nothing. Grey is\nzero. The scale alpha/r is folded into B.", fontsize=8.5, va="center",
    )  # fmt: skip
    title(axes, 5.6, 4.9, "Routing, k = 2")
    ids = ((0, 1), (0, 1), (1, 2), (0, 1), (2, -1), (1, 2))
    gates = ((0.8, 0.2), (0.9, 0.1), (0.6, 0.4), (0.7, 0.3), (1, 0), (0.5, 0.5))
    for column, text in ((6.25, "ids"), (7.3, "gates")):
        axes.text(column, 4.55, text, fontsize=9, ha="center", va="center")
    for token, (chosen, shares) in enumerate(zip(ids, gates, strict=True)):
        y = 4.0 - 0.42 * token
        axes.text(5.6, y + 0.18, f"{token}", fontsize=9, va="center")
        for choice in range(2):
            cell(
                axes,
                5.9 + 0.42 * choice,
                y,
                f"{chosen[choice]}".replace("-", "−"),
                slot_color(chosen[choice]),
            )
            cell(axes, 6.95 + 0.42 * choice, y, f"{shares[choice]:g}", PLAIN)
    axes.text(
        5.6, 1.1, "a row a token; −1 is no\nadapter, and with nothing\nelse it keeps its base",
        fontsize=8.5, va="center",
    )  # fmt: skip
    title(axes, 8.3, 4.9, "plan: tokens by set of adapters")
    groups = (("{0, 1}", (0, 1, 3)), ("{1, 2}", (2, 5)), ("{2}", (4,)))
    y = 4.0
    for name, tokens in groups:
        for token in tokens:
            cell(axes, 8.5, y, f"{token}", PLAIN)
            for place, chosen in enumerate(i for i in ids[token] if i >= 0):
                cell(axes, 9.0 + 0.42 * place, y, f"{chosen}", slot_color(chosen))
            y -= 0.42
        axes.text(9.98, y + 0.39 + 0.21 * len(tokens), f"tile {name}", fontsize=9, va="center")
        y -= 0.12
    axes.text(
        8.3, 0.85, "made once from the ids, shared by\nthe projections of a decision: a\ntile"
        " reads its adapters once", fontsize=8.5, va="center",
    )  # fmt: skip
    return figure


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure whose coordinates are inches, without axes."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """A rounded box with text in its middle."""
    shape = FancyBboxPatch(
        (x + 0.06, y + 0.06), width - 0.12, height - 0.12, boxstyle="round,pad=0.06",
        facecolor=color, edgecolor="#444444",
    )  # fmt: skip
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, fontsize=9, ha="center", va="center")


def arrow(axes: Axes, start: Sequence[float], end: Sequence[float]) -> None:
    """A straight arrow."""
    axes.add_patch(
        FancyArrowPatch(
            tuple(start),
            tuple(end),
            arrowstyle="-|>",
            mutation_scale=11,
            color="#444444",
            shrinkA=0,
            shrinkB=0,
        )
    )


def cell(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """A small square of a table."""
    axes.add_patch(Rectangle((x, y), 0.42, 0.36, facecolor=color, edgecolor="#444444"))
    axes.text(x + 0.21, y + 0.18, text, fontsize=8, ha="center", va="center")


def title(axes: Axes, x: float, y: float, text: str) -> None:
    """A bold line."""
    axes.text(x, y, text, fontsize=9.5, weight="bold", va="center")


def slot_color(slot: int) -> str:
    """That of its adapter; white for no adapter."""
    return PLAIN if slot < 0 else SLOTS[slot]


if __name__ == "__main__":
    main()
