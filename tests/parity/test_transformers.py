"""Live against transformers: logits, rope tables, chat templates, and folders that it saved."""

import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.models import load_base
from molora_jax.models.config import ModelConfig, rope_frequencies
from molora_jax.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from molora_jax.models.tokenizer import Tokenizer
from tests.parity.small_models import (
    SMALL_MODELS,
    hf_tensors,
    small_model,
    small_tokens,
    write_folder,
)

pytestmark = [
    pytest.mark.parity,
    # Other people's packages, imported here alone.
    pytest.mark.filterwarnings("ignore"),
]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": (1 + 0.03 * np.arange(64)).tolist(),
    "long_factor": (1.5 + 0.5 * np.arange(64)).tolist(),
}
# As the models on the hub have them: Llama 3.1, Llama 3.2, Qwen2.5 and Qwen3 stretched by YaRN.
ROPES = {
    "llama-3.1": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama-3.2": {
        "rope_theta": 500000.0,
        "head_dim": 64,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    },
    "yarn, all of its options": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24,
            "beta_slow": 2,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    },
    "yarn, the factor that of the contexts": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": None,
            "original_max_position_embeddings": 4096,
        },
    },
    "yarn, its original context beside it": {
        "rope_theta": 1e6,
        "original_max_position_embeddings": 8192,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "yarn, no original context": {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "yarn, zeros and nulls": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 0,
            "beta_slow": None,
            "mscale": 0,
            "mscale_all_dim": 1.0,
            "truncate": None,
        },
    },
    "yarn, the ramp before the first pair": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_slow": 6,
        },
    },
    "yarn, the ramp behind the last pair": {
        "rope_theta": 1.5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 65536,
        },
    },
    "dynamic": {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 3.7}},
    "longrope": {
        "rope_theta": 1e4,
        "rope_scaling": LONGROPE | {"original_max_position_embeddings": 4096},
    },
    "longrope, its factors given": {
        "rope_theta": 1e4,
        "rope_scaling": LONGROPE
        | {"original_max_position_embeddings": 4096, "factor": 8.0, "attention_factor": 1.1},
    },
    "longrope, its original context beside it": {
        "rope_theta": 1e4,
        "original_max_position_embeddings": 4096,
        "rope_scaling": LONGROPE | {"factor": 0.5},
    },
    "linear": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "none": {"rope_theta": 1e6},
}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_logits_of_a_folder_that_transformers_saved(name, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    settings, arrays = small_model(name)
    write_folder(tmp_path / "ours", settings, hf_tensors(arrays))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "theirs")
    tiny_tokenizer().backend.save(str(tmp_path / "theirs" / "tokenizer.json"))
    base = load_base(str(tmp_path / "theirs"))
    tokens = small_tokens()
    with torch.no_grad():
        expected = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    actual = base.decoder.logits(base.decoder(jnp.asarray(tokens)).hidden)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert base.config == ModelConfig.from_hf(settings)


@pytest.mark.parametrize("name", ROPES)
def test_rope_tables(name):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = LLAMA | ROPES[name]
    rotary = LlamaRotaryEmbedding(LlamaConfig(**settings))
    frequencies, factor = rope_frequencies(ModelConfig.from_hf(settings))
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=1e-5)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in ROPES if name.startswith(("dyn", "long"))])
def test_context_that_one_rope_table_serves(name):
    """One position more, and transformers takes other frequencies: there the decoder refuses."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = LLAMA | ROPES[name]
    rotary = LlamaRotaryEmbedding(LlamaConfig(**settings))
    config = ModelConfig.from_hf(settings)
    frequencies, _ = rope_frequencies(config)
    x = torch.zeros(1)
    rotary(x, torch.tensor([[0, config.max_positions - 1]]))
    np.testing.assert_allclose(rotary.inv_freq.numpy(), frequencies, rtol=1e-5)
    rotary(x, torch.tensor([[0, config.max_positions]]))
    assert not np.allclose(rotary.inv_freq.numpy(), frequencies, rtol=1e-5)


TEMPLATES = {
    "ours": CHAT_TEMPLATE,
    "whitespace": """{% for message in messages %}
    {% if message.role == 'user' %}
  [{{ message.content | trim }}]
    {% else %}
{{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}
>> {% endif %}""",
    "json, loops, spans": """{% for message in messages %}
{% if loop.index > 2 %}{% break %}{% endif %}
{{ message | tojson(indent=2) }}{% generation %}x{% endgeneration %}{% endfor %}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_templates(name, prompt):
    from transformers import PreTrainedTokenizerFast

    backend = tiny_tokenizer().backend
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    theirs.chat_template = TEMPLATES[name]
    ours = Tokenizer(backend, chat_template=TEMPLATES[name], special_tokens=special)
    messages = [
        {"role": "user", "content": "  <Grüße> & 'words'  "},
        {"role": "assistant", "content": "And\nlines."},
        {"role": "user", "content": "Last."},
    ]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.render_chat(messages, add_generation_prompt=prompt) == expected
