"""Experiments: one module per question, a registry of them, and the folders their runs write.

What a notebook needs, imported when it is first used:

    load_domains  four kinds of text, each split into training and held-out documents
    load_runs     finished runs as they are found in folders
    compare       runs of one experiment side by side
"""

import importlib
from typing import Any

_HOMES = {"compare": "comparison", "load_domains": "domains", "load_runs": "entries"}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'experiments' has no attribute {name!r}")
    return getattr(importlib.import_module(f"experiments.{_HOMES[name]}"), name)
