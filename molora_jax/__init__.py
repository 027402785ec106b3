"""Per-token LoRA routing for language models: one frozen base, many adapters, one pass.

    base = molora_jax.load_base("smollm2-135m")
    bank = molora_jax.AdapterBank(base.config, num_slots=4, max_rank=16)
    bank.load("adapters/code")
    out = base.decoder(tokens, mask, adapters=bank.stacks, router=router)

The names below are imported when they are first used, so that importing the package stays quick.
"""

import importlib
from typing import Any

_HOMES = {
    "Adapter": "adapters",
    "AdapterBank": "adapters",
    "AdapterStack": "adapters",
    "BaseModel": "models",
    "Composition": "adapters",
    "ControlTokenRouter": "routing",
    "Decoder": "models",
    "Engine": "generation",
    "FixedRouter": "routing",
    "HotSet": "adapters",
    "LearnedRouter": "routing",
    "Profile": "generation",
    "PrototypeRouter": "routing",
    "Request": "generation",
    "RouterStatistics": "routing",
    "Routing": "routing",
    "SequenceRouter": "routing",
    "StatisticsRouter": "routing",
    "VocabularyRouter": "routing",
    "analyse": "analysis",
    "compose": "adapters",
    "count_compilations": "compilations",
    "gather_statistics": "training",
    "generate": "generation",
    "load_adapter": "adapters",
    "load_base": "models",
    "load_statistics": "routing",
    "save_adapter": "adapters",
    "save_statistics": "routing",
    "train_adapter": "training",
    "train_router": "training",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'molora_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"molora_jax.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(globals() | _HOMES)
