"""Small adapters and raw PEFT folders for the tests of this package."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from molora_jax.adapters import PROJECTIONS, Adapter
from molora_jax.adapters.names import module_name
from molora_jax.models import ModelConfig

# Odd sizes, no two projections alike but for gate and up: q is (10, 12), k (10, 6), o (12, 10).
BASE = ModelConfig(
    model_type="llama", vocab_size=19, hidden_size=10, intermediate_size=7, num_layers=3,
    num_heads=2, num_kv_heads=1, head_dim=6,
)  # fmt: skip


def modules_of(config=BASE, projections=PROJECTIONS):
    return [module_name(layer, p) for layer in range(config.num_layers) for p in projections]


def arrays_for(modules, rank=3, *, seed=0, config=BASE, dtype=np.float32):
    """{module: (A, B)}, both random and not zero; `rank` is one number or one per module."""
    rng = np.random.default_rng(seed)
    sizes, arrays = config.projection_sizes(), {}
    for module in modules:
        D, F = sizes[module.rsplit(".", 1)[1]]
        r = rank if isinstance(rank, int) else rank[module]
        arrays[module] = (
            rng.normal(size=(r, D)).astype(dtype),
            rng.normal(size=(F, r)).astype(dtype),
        )
    return arrays


def make_adapter(name="sql", *, projections=PROJECTIONS, rank=3, seed=0, alpha=6.0, **settings):
    arrays = arrays_for(modules_of(projections=projections), rank, seed=seed)
    return Adapter.from_arrays(name, arrays, alpha=alpha, num_layers=BASE.num_layers, **settings)


def peft_tensors(arrays):
    """Under PEFT's names, spelt out here once more on purpose."""
    tensors = {}
    for module, (a, b) in arrays.items():
        tensors[f"base_model.model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.model.{module}.lora_B.weight"] = b
    return tensors


def write_peft(folder, tensors, *, r=3, lora_alpha=6, target_modules=PROJECTIONS, **fields) -> Path:
    """A PEFT folder made without the package's own writer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": r, "lora_alpha": lora_alpha}
    targets = list(target_modules) if isinstance(target_modules, tuple) else target_modules
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "target_modules": targets, **fields})
    )
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def dense_delta(a, b, scale):
    """ΔW (F, D) in float64."""
    return scale * np.asarray(b, np.float64) @ np.asarray(a, np.float64)


def bank_delta(bank, slot, module):
    """ΔW (F, D) that a slot of the bank makes, all R rows of it."""
    _, layer, _, projection = module.split(".")
    stack = bank.stacks[projection]
    a = np.asarray(stack.lora_a[int(layer), slot], np.float64)
    b = np.asarray(stack.lora_b[int(layer), slot], np.float64)
    return b.T @ a
