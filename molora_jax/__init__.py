"""Per-token LoRA routing for language models: one frozen base, many adapters, one pass.

    base = molora_jax.load_base("smollm2-135m")
    bank = molora_jax.AdapterBank(base.config, num_slots=4, max_rank=16)
    bank.load("adapters/code")
    bank.load("adapters/math")
    router, _ = molora_jax.train_router(base, bank, [code, math], molora_jax.RouterTrainConfig())
    composition = molora_jax.Composition.of(base, bank, router)
    answers = molora_jax.generate(base.decoder, prompts, max_new_tokens=40, **composition.routed)

The docstrings' examples write `mj` for this package, and use a base of random weights, `base`; two
small adapters of it, `code` and `math`; a bank that holds both, `bank`; a `composition` of them;
four `windows` of 16 tokens; and an empty folder, `tmp`.

The names below are imported when they are first used, so that importing the package stays quick.
"""

import importlib
from typing import Any

_HOMES = {
    "Adapter": "adapters",
    "AdapterBank": "adapters",
    "AdapterStack": "adapters",
    "AdapterTrainConfig": "training",
    "Analysis": "analysis",
    "BaseModel": "models",
    "Batch": "training",
    "Composition": "adapters",
    "ControlTokenRouter": "routing",
    "Decoder": "models",
    "Engine": "generation",
    "Evaluation": "training",
    "FixedRouter": "routing",
    "Generated": "generation",
    "HotSet": "adapters",
    "LearnedRouter": "routing",
    "LoadReport": "adapters",
    "ModelConfig": "models",
    "Profile": "generation",
    "PrototypeRouter": "routing",
    "Request": "generation",
    "RouterStatistics": "routing",
    "RouterTrainConfig": "training",
    "Routing": "routing",
    "Sampling": "generation",
    "SequenceRouter": "routing",
    "StatisticsRouter": "routing",
    "VocabularyRouter": "routing",
    "analyse": "analysis",
    "base_arm": "training",
    "compose": "adapters",
    "count_compilations": "compilations",
    "evaluate": "training",
    "gather_statistics": "training",
    "generate": "generation",
    "joined_windows": "training",
    "load_adapter": "adapters",
    "load_base": "models",
    "load_statistics": "routing",
    "oracle_arm": "training",
    "pack": "training",
    "probe": "tools.probe",
    "save_adapter": "adapters",
    "save_statistics": "routing",
    "single_arm": "training",
    "train_adapter": "training",
    "train_router": "training",
    "uniform_arm": "training",
}

_MODULES = ("display",)  # pictures and tables, `molora_jax.display.share_figure(...)`

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"molora_jax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'molora_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"molora_jax.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
