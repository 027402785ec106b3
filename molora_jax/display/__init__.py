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
from molora_jax.display.routing_figures import (
    agreement_figure,
    choice_figure,
    entropy_figure,
    forced_figure,
)
from molora_jax.display.sweep_figures import grid_figure, parallel_figure
from molora_jax.display.tables import (
    Table,
    bank_table,
    composition_table,
    loss_table,
    report_table,
)
from molora_jax.display.text import adapter_color, printable_pieces, terminal_text, use_color

__all__ = [
    "Table",
    "adapter_color",
    "agreement_figure",
    "bank_table",
    "choice_figure",
    "composition_table",
    "curve_figure",
    "entropy_figure",
    "explorer_page",
    "forced_figure",
    "grid_figure",
    "html_page",
    "layer_share_figure",
    "loss_table",
    "parallel_figure",
    "printable_pieces",
    "report_table",
    "save_figure",
    "share_figure",
    "terminal_text",
    "token_figure",
    "use_color",
]
