"""Adapters for the comparison with peft: two bases, the settings of every case, their weights.

The weights are drawn here by name, so that peft (when the reference is made) and a test without it
have the same ones.
"""

import zlib

import numpy as np

from molora_jax.adapters import PROJECTIONS
from molora_jax.models.config import ModelConfig
from molora_jax.models.weights import random_arrays

_SIZES = {
    "vocab_size": 53,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BASES = {
    "llama": _SIZES | {"model_type": "llama", "hidden_size": 24, "rope_theta": 1e4},
    "qwen3": _SIZES
    | {
        "model_type": "qwen3",
        "hidden_size": 20,
        "head_dim": 6,
        "tie_word_embeddings": True,
        "rope_theta": 1e5,
    },
}
RANK = 6  # the largest of any case

_ALL = list(PROJECTIONS)
_PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": _ALL}
CASES = {
    "plain": _PLAIN,
    "rslora": _PLAIN | {"use_rslora": True},
    "rank one, alpha a fraction": _PLAIN | {"r": 1, "lora_alpha": 1.5},
    "patterns by suffix": _PLAIN
    | {
        "rank_pattern": {"down_proj": 2, "self_attn.q_proj": 6, "layers.1.mlp.up_proj": 1},
        "alpha_pattern": {"o_proj": 3, "mlp.gate_proj": 16},
    },
    "patterns by anchor": _PLAIN
    | {
        "rank_pattern": {"^model.layers.1.self_attn.v_proj": 5, "^model.layers.2.mlp.down_proj": 1},
        "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 20},
    },
    "patterns by regex, rslora": _PLAIN
    | {
        "use_rslora": True,
        "rank_pattern": {r"layers\.[02]\.self_attn\.(q|v)_proj": 5},
        "alpha_pattern": {r".*\.[01]\.mlp\..*": 3},
    },
    "all-linear": _PLAIN | {"target_modules": "all-linear"},
    "all-linear but two": _PLAIN
    | {"target_modules": "all-linear", "exclude_modules": ["k_proj", "gate_proj"]},
    "targets by regex": _PLAIN
    | {"target_modules": r".*layers\.[12]\.(self_attn|mlp)\.(o|up)_proj"},
    "one layer": _PLAIN | {"layers_to_transform": 1},
    "two layers": _PLAIN | {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "bfloat16": _PLAIN,
    "float16": _PLAIN,
    **{f"only {name}": _PLAIN | {"r": 3, "target_modules": [name]} for name in _ALL},
    **{
        f"subset {seed}": _PLAIN
        | {
            "r": 2 + seed % 4,
            "target_modules": sorted(
                np.random.default_rng(seed).choice(_ALL, 2 + seed % 4, replace=False).tolist()
            ),
        }
        for seed in range(6)
    },
}


def base_model(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Its config.json and arrays, with logits of order 10."""
    arrays = random_arrays(ModelConfig.from_hf(BASES[name]), seed=5)
    arrays["norm.weight"] *= 3.5
    return BASES[name], arrays


def base_prompts() -> list[list[int]]:
    """Three rows for any of the bases."""
    rng = np.random.default_rng(11)
    return [rng.integers(0, _SIZES["vocab_size"], length).tolist() for length in (24, 9, 17)]


def lora_values(key: str, shape: tuple[int, ...], *, seed: int = 0) -> np.ndarray:
    """A or B of `layers.0.mlp.up_proj.A`, random and not zero; the update is of order one."""
    rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
    size = shape[1] ** -0.5 if key.endswith("A") else 0.25
    return (size * rng.standard_normal(shape)).astype(np.float32)
