"""What a run shows: heat maps, curves, and text coloured by the adapter of each token."""

from molora_jax.display.explorer import explorer_page
from molora_jax.display.figures import (
    curve_figure,
    layer_share_figure,
    save_figure,
    share_figure,
    token_figure,
)
from molora_jax.display.page import html_page
from molora_jax.display.sweep_figures import grid_figure, parallel_figure
from molora_jax.display.text import adapter_color, printable_pieces, terminal_text, use_color

__all__ = [
    "adapter_color",
    "curve_figure",
    "explorer_page",
    "grid_figure",
    "html_page",
    "layer_share_figure",
    "parallel_figure",
    "printable_pieces",
    "save_figure",
    "share_figure",
    "terminal_text",
    "token_figure",
    "use_color",
]
