"""Random small decoders for the comparison with transformers, drawn from a seed and not by hand.

Every family with every rope scaling that it is found with; the rest of a configuration is drawn:
sizes, heads per key/value head, a head size that is not hidden / heads, ties, biases, theta, eps,
the spelling of the scaling. The contexts are as short as the texts, so that the scalings act.
"""

import numpy as np

from molora_jax.models.config import ModelConfig
from molora_jax.models.weights import random_arrays

NUM_MODELS = 64
PROMPT, NEW = 24, 32  # tokens of the longest prompt, tokens decoded behind it
# A model of each in turn.
SLOTS = (
    *(("llama", kind) for kind in ("default", "linear", "dynamic", "yarn", "llama3", "longrope")),
    *(("mistral", kind) for kind in ("default", "linear")),
    *(("qwen2", kind) for kind in ("default", "dynamic", "yarn")),
    *(("qwen3", kind) for kind in ("default", "linear", "yarn", "llama3", "longrope")),
)


def random_model(index: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Its config.json and its stacked arrays: the same in every run, logits of order 10."""
    settings = random_settings(index)
    arrays = random_arrays(ModelConfig.from_hf(settings), seed=1000 + index)
    # Sharper attention lets a wrong rotation be seen.
    arrays["norm.weight"] *= 3.5
    arrays["layers.self_attn.q_proj.weight"] *= 2.0
    return settings, arrays


def random_prompts(index: int) -> list[list[int]]:
    """Three of them: one of PROMPT tokens and two that are shorter."""
    rng = np.random.default_rng(2000 + index)
    lengths = (PROMPT, *rng.integers(3, PROMPT, 2))
    vocab = random_settings(index)["vocab_size"]
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def padded(prompts: list[list[int]], side: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (B, PROMPT) int32 and mask."""
    tokens = np.zeros((len(prompts), PROMPT), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, prompt in enumerate(prompts):
        at = slice(PROMPT - len(prompt), None) if side == "left" else slice(len(prompt))
        tokens[row, at], mask[row, at] = prompt, True
    return tokens, mask


def random_settings(index: int) -> dict:
    """The config.json of one model."""
    family, kind = SLOTS[index % len(SLOTS)]
    rng = np.random.default_rng(index)

    def one_of(*values):
        return values[rng.integers(len(values))]

    groups, kv_heads = one_of(1, 2, 3, 4), one_of(1, 2)
    heads, head_dim = groups * kv_heads, 2 * one_of(2, 3, 4, 5, 8)
    settings = {
        "model_type": family,
        "vocab_size": int(rng.integers(40, 90)),
        "hidden_size": heads * head_dim,
        "intermediate_size": int(rng.integers(17, 60)),
        "num_hidden_layers": one_of(1, 2, 2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": PROMPT + NEW + one_of(0, 0, 3, 40),
        "hidden_act": "silu",
        "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": one_of(True, False),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "qwen3" or one_of(True, False):  # transformers' Qwen3 has a default of its own
        settings["head_dim"] = head_dim
        settings["hidden_size"] = heads * int(rng.integers(4, 14))
    if family in ("llama", "qwen3"):
        settings["attention_bias"] = one_of(True, False)
    if family == "llama":
        settings["mlp_bias"] = one_of(True, False)
    if family == "mistral":
        context = settings["max_position_embeddings"]
        settings["sliding_window"] = one_of(None, context, context + 5)
    if family.startswith("qwen"):  # a window that is off, or that begins behind the last layer
        on = one_of(True, False)
        first = settings["num_hidden_layers"] if on else 0
        settings |= {"use_sliding_window": on, "sliding_window": 8, "max_window_layers": first}
    theta = float(np.round(10 ** rng.uniform(1, 6), 3))
    return settings | _rope(
        kind, theta, head_dim, settings["max_position_embeddings"], rng, index + index // len(SLOTS)
    )


def _rope(kind, theta, head_dim, context, rng, variant) -> dict:
    """The scaling, under the older or the newer keys; `variant` says which optional ones it has."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    original = int(rng.integers(8, 40))
    factor = float(np.round(rng.uniform(1.2, 8.0), 3))
    entry = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "llama3": {
            "factor": factor,
            "low_freq_factor": one_of(1.0, 0.5),
            "high_freq_factor": one_of(4.0, 2.0),
            "original_max_position_embeddings": original,
        },
        "yarn": {"factor": factor, "original_max_position_embeddings": original}
        | (
            {},
            {"attention_factor": 1.3, "beta_fast": 8, "beta_slow": 0.5},
            {"mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
            {"factor": None, "beta_fast": 2},
        )[variant % 4],
        "longrope": {
            "short_factor": rng.uniform(0.8, 3.0, head_dim // 2).round(3).tolist(),
            "long_factor": rng.uniform(3.0, 9.0, head_dim // 2).round(3).tolist(),
            # The texts just fit what the numbers for short texts serve.
            "original_max_position_embeddings": one_of(PROMPT + NEW, context),
        }
        | ({}, {"factor": factor}, {"attention_factor": 1.2})[variant % 3],
    }[kind]
    if kind == "longrope":
        context *= 4
    if kind == "default" or one_of(True, False):
        older = {"rope_scaling": {one_of("type", "rope_type"): kind} | entry} if entry else {}
        return {"rope_theta": theta, "max_position_embeddings": context} | older
    newer = {"rope_type": kind, "rope_theta": theta} | entry
    return {"rope_parameters": newer, "max_position_embeddings": context}
