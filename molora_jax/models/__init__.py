"""Base models: configuration, weights, tokenizer and look-up by name, around one decoder."""

import importlib
from typing import Any

_HOMES = {
    "BaseModel": "lookup",
    "Decoder": "decoder",
    "ModelConfig": "config",
    "RopeScaling": "rope",
    "Tokenizer": "tokenizer",
    "base_digest": "lookup",
    "cache_folder": "cache",
    "load_base": "lookup",
    "params_digest": "digest",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # On first use: adapters need the configuration, the decoder needs adapters, and whoever only
    # reads a configuration should not wait for JAX.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
