"""What a run shows: tables and reports in a terminal, heat maps, curves, and text coloured by the
adapter of each token.

The names below are imported when they are first used: a table needs neither JAX nor matplotlib.
"""

import importlib
from typing import Any

_HOMES = {
    "Table": "tables",
    "adapter_color": "text",
    "agreement_figure": "routing_figures",
    "bank_table": "tables",
    "choice_figure": "routing_figures",
    "composition_table": "tables",
    "curve_figure": "figures",
    "entropy_figure": "routing_figures",
    "explorer_page": "explorer",
    "forced_figure": "routing_figures",
    "grid_figure": "sweep_figures",
    "html_page": "page",
    "layer_share_figure": "figures",
    "loss_table": "tables",
    "parallel_figure": "sweep_figures",
    "printable_pieces": "text",
    "report_table": "tables",
    "save_figure": "figures",
    "share_figure": "figures",
    "show": "terminal",
    "show_report": "terminal",
    "terminal_text": "text",
    "token_figure": "figures",
    "use_color": "terminal",
    "warn": "terminal",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'molora_jax.display' has no attribute {name!r}")
    return getattr(importlib.import_module(f"molora_jax.display.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
