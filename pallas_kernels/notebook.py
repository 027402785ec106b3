"""How a Routing shows itself in a notebook: coloured cells, tokens across and layers down."""

import html

import jax
import numpy as np

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its black.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
MOST_TOKENS, MOST_LAYERS = 120, 40  # cells of a notebook's page


def slot_color(slot: int) -> str:
    """Colour of an adapter slot, the same in every picture; grey for −1, the base alone."""
    return "#999999" if slot < 0 else PALETTE[slot % len(PALETTE)]


def routing_html(adapter_ids, gates) -> str | None:
    """ids and gates (L, N, k) or (N, k) as HTML, None inside `jit`: there is nothing to read yet.

    A cell is a token in a layer, in the colour of the slot with its largest gate, and as strong as
    that gate; hovering says all of its slots and gates.
    """
    if isinstance(adapter_ids, jax.core.Tracer) or isinstance(gates, jax.core.Tracer):
        return None
    ids, weight = np.asarray(adapter_ids), np.asarray(gates, np.float32)
    if ids.ndim not in (2, 3) or ids.shape != weight.shape:
        return None
    ids, weight = ids.reshape(-1, *ids.shape[-2:]), weight.reshape(-1, *ids.shape[-2:])
    L, N, k = ids.shape
    rows = []
    for layer in range(min(L, MOST_LAYERS)):
        cells = "".join(
            _cell(ids[layer, token], weight[layer, token], f"layer {layer}, token {token}: ")
            for token in range(min(N, MOST_TOKENS))
        )
        rows.append(f"<tr><th style='font-weight:normal'>{layer}</th>{cells}</tr>")
    slots, counts = np.unique(ids[..., 0], return_counts=True)
    legend = "&ensp;".join(
        f"<span style='color:{slot_color(int(slot))}'>■</span> "
        f"{'base only' if slot < 0 else f'slot {slot}'} {count / max(ids[..., 0].size, 1):.0%}"
        for slot, count in zip(slots, counts, strict=True)
    )
    more = f"; the first {MOST_TOKENS} tokens are shown" if N > MOST_TOKENS else ""
    more += f"; the first {MOST_LAYERS} layers are shown" if L > MOST_LAYERS else ""
    title = html.escape(f"Routing of {N} tokens in {L} layer{'s' * (L != 1)}, k = {k}{more}")
    return (
        f"<div>{title}<br>first choices: {legend}"
        "<table style='border-collapse:collapse;font-size:70%'>" + "".join(rows) + "</table></div>"
    )


def _cell(ids: np.ndarray, gates: np.ndarray, where: str) -> str:
    chosen = [(float(g), int(i)) for i, g in zip(ids, gates, strict=True) if i >= 0]
    gate, slot = max(chosen, default=(1.0, -1))
    said = ", ".join(f"slot {i} {g:.3f}" for g, i in sorted(chosen, reverse=True)) or "base only"
    # A NaN is shown pale, and said.
    strength = min(max(gate, 0.15), 1.0) if np.isfinite(gate) else 0.15
    return (
        f"<td title='{where}{said}' style='padding:0;width:9px;min-width:9px;height:9px;"
        f"background:{slot_color(slot)};opacity:{strength:.2f}'></td>"
    )
