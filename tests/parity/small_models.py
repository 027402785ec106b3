"""Small models with random weights: one for each thing that a family or a rope scaling does.

`write_folder` lays one out as Hugging Face does, so that our loader and transformers read the same
files.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from molora_jax.models.config import ModelConfig
from molora_jax.models.weights import random_arrays

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The original contexts are short, so that 40 tokens reach where a scaling acts.
SMALL_MODELS = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama_llama3_rope": {
        "model_type": "llama",
        "head_dim": 16,  # not hidden_size / heads
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama_linear_rope_biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},  # the older name of the key
    },
    "llama_yarn_rope": {
        "model_type": "llama",
        "head_dim": 16,
        "rope_parameters": {  # the newer place of both
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-5},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
    "qwen3_tied": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    "qwen3_untied": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
}


def small_model(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Its config.json, and stacked random arrays, the same in every run."""
    settings = _SIZES | SMALL_MODELS[name]
    seed = sorted(SMALL_MODELS).index(name)
    return settings, random_arrays(ModelConfig.from_hf(settings), seed=seed)


def small_tokens() -> np.ndarray:
    """Two rows of 40 token ids."""
    return np.random.default_rng(7).integers(0, _SIZES["vocab_size"], (2, 40)).astype(np.int32)


def hf_tensors(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacked arrays under Hugging Face's names, a tensor per layer."""
    tensors = {}
    for name, array in arrays.items():
        if name.startswith("layers."):
            for layer, value in enumerate(array):
                full = name.replace("layers.", f"model.layers.{layer}.", 1)
                tensors[full] = np.ascontiguousarray(value)
        else:
            tensors[name if name.startswith("lm_head") else f"model.{name}"] = array
    return tensors


def write_folder(folder: Path, settings: dict, tensors: dict[str, np.ndarray]) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
