"""Configurations: what config.json and GGUF metadata say, and what is refused."""

import numpy as np
import pytest

from molora_jax.models.config import ModelConfig, RopeScaling, rope_frequencies

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_defaults_of_the_family_apply():
    llama = ModelConfig.from_hf(LLAMA)
    assert (llama.num_kv_heads, llama.head_dim, llama.max_positions) == (4, 8, 2048)
    assert (llama.bos_id, llama.eos_ids) == (1, (2,))
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm) == (False, False, False)
    assert not llama.tie_word_embeddings
    qwen3 = ModelConfig.from_hf(QWEN3)
    assert qwen3.qk_norm
    assert qwen3.head_dim == 128
    qwen2 = ModelConfig.from_hf(QWEN3 | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)


def test_projection_sizes_follow_the_heads():
    config = ModelConfig.from_hf(QWEN3 | {"head_dim": 16})
    assert config.projection_sizes() == {
        "q_proj": (32, 64),
        "k_proj": (32, 32),
        "v_proj": (32, 32),
        "o_proj": (64, 32),
        "gate_proj": (32, 48),
        "up_proj": (32, 48),
        "down_proj": (48, 32),
    }


def test_end_tokens_of_both_files_are_joined():
    config = ModelConfig.from_hf(LLAMA | {"eos_token_id": 7}, generation={"eos_token_id": [9, 7]})
    assert config.eos_ids == (7, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_local_experts": 8}, "num_experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "multiple of num_kv_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"head_dim": 7}, "even"),
    ],
)
def test_other_functions_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_hf(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32'; expected a whole number"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": True}, "head_dim is True"),
        ({"head_dim": 2**40}, "head_dim is 1099511627776"),
        ({"head_dim": 2**20}, "head_dim must be at most"),
        ({"num_hidden_layers": 10**9}, "num_layers must be at most"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be positive"),
        ({"rope_theta": [1e4]}, "rope_theta is"),
        ({"rope_theta": 1e300}, "rope_theta must be positive"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2}}, r"rope_scaling\.rope_type is"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings is 'false'; expected true or false",
        ),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id is"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"bos_token_id": [1]}, "bos_token_id is"),
        ({"layer_types": "full_attention"}, "layer_types is"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_hf(LLAMA | change)


def test_missing_sizes_are_named():
    with pytest.raises(ValueError, match="'intermediate_size' is missing"):
        ModelConfig.from_hf({k: v for k, v in LLAMA.items() if k != "intermediate_size"})
    with pytest.raises(ValueError, match="num_key_value_heads"):  # its default is not ours to guess
        ModelConfig.from_hf(LLAMA | {"model_type": "qwen2"})


def test_sliding_windows_are_refused_only_where_they_act():
    mistral = QWEN3 | {"model_type": "mistral", "max_position_embeddings": 8192}
    with pytest.raises(ValueError, match="sliding_window = 4096"):  # mistral's default
        ModelConfig.from_hf(mistral)
    ModelConfig.from_hf(mistral | {"sliding_window": None})
    ModelConfig.from_hf(mistral | {"sliding_window": 8192})
    windowed = QWEN3 | {"sliding_window": 16}
    ModelConfig.from_hf(windowed | {"use_sliding_window": False})
    ModelConfig.from_hf(windowed | {"use_sliding_window": True, "max_window_layers": 2})
    with pytest.raises(ValueError, match="sliding_window"):
        ModelConfig.from_hf(windowed | {"use_sliding_window": True, "max_window_layers": 1})
    with pytest.raises(ValueError, match="layer_types"):
        ModelConfig.from_hf(QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]})


def test_gguf_tells_ties_and_biases_by_its_tensors():
    tensors = {"token_embd.weight": (100, 32), "output.weight": (100, 32)}
    plain = ModelConfig.from_gguf(GGUF, tensors)
    assert (plain.vocab_size, plain.head_dim, plain.num_kv_heads) == (100, 8, 4)
    assert (plain.tie_word_embeddings, plain.qkv_bias) == (False, False)
    tensors = {"token_embd.weight": (100, 32), "blk.0.attn_q.bias": (32,)}
    other = ModelConfig.from_gguf(GGUF, tensors)
    assert other.tie_word_embeddings
    assert other.qkv_bias


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llama.expert_count": 8}, "expert"),
        ({"llama.attention.sliding_window": 16}, "sliding window"),
        ({"llama.rope.dimension_count": 4}, "rotary"),
        ({"general.architecture": "gemma2"}, "gemma2"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_gguf_refusals(change, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_gguf(GGUF | change, {"token_embd.weight": (100, 32)})


def test_rope_factors_of_gguf_divide_the_frequencies():
    factors = (1.0, 1.0, 2.0, 8.0)
    config = ModelConfig.from_gguf(GGUF, {"token_embd.weight": (100, 32)}, rope_factors=factors)
    plain, _ = rope_frequencies(ModelConfig.from_gguf(GGUF, {"token_embd.weight": (100, 32)}))
    scaled, factor = rope_frequencies(config)
    np.testing.assert_allclose(scaled, plain / np.array(factors), rtol=1e-6)
    assert factor == 1.0
    with pytest.raises(ValueError, match="expected 4"):
        ModelConfig.from_gguf(GGUF, {"token_embd.weight": (100, 32)}, rope_factors=factors[:3])


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_positions=8192)
    config = ModelConfig.from_hf(LLAMA | {"head_dim": 128, "rope_theta": 5e5})
    plain, _ = rope_frequencies(config)
    scaled, _ = rope_frequencies(
        ModelConfig.from_hf(
            LLAMA
            | {
                "head_dim": 128,
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": scaling.factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": scaling.original_max_positions,
                },
            }
        )
    )
    ratio = scaled / plain
    assert ratio[0] == 1.0
    np.testing.assert_allclose(ratio[-1], 1 / 8, rtol=1e-6)
    assert np.all(np.diff(ratio) <= 1e-6)
    assert np.any((ratio > 0.2) & (ratio < 0.9))  # the ramp between


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_a_null_rope_theta_is_named(place):
    change = {"rope_theta": None}
    if place != "top":
        change = {place: {"rope_type": "default", "rope_theta": None}}
    with pytest.raises(ValueError, match=r"config\.json: (rope_parameters\.)?rope_theta is None"):
        ModelConfig.from_hf(LLAMA | change)
