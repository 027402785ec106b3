"""A model written in Hugging Face's layout reads back as itself, here and in transformers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.models import ModelConfig, RopeScaling, load_base
from molora_jax.models.config import rope_frequencies
from molora_jax.models.decoder import Decoder
from molora_jax.models.export import decoder_arrays, to_hf, write_model
from molora_jax.models.tiny import tiny_tokenizer
from molora_jax.models.weights import load_safetensors, random_arrays
from tests.parity.small_models import SMALL_MODELS, small_model, small_tokens

MESSAGES = [{"role": "user", "content": "How many? 12"}]


def written(folder, name, **settings):
    """A small model in a folder, and its config and arrays."""
    folder.mkdir(exist_ok=True)
    entry, arrays = small_model(name)
    config = ModelConfig.from_hf(entry)
    write_model(folder, config, arrays, tiny_tokenizer(), **settings)
    return config, arrays


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_every_family_and_rope_scaling_reads_back_as_itself(tmp_path, name):
    config, arrays = written(tmp_path / "model", name)
    assert ModelConfig.from_hf(json.loads((tmp_path / "model/config.json").read_text())) == config
    read = load_safetensors(tmp_path / "model", config)
    assert read.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(read[key], array)


@pytest.mark.parametrize("name", ["qwen3_tied", "llama_linear_rope_biases"])
def test_the_arrays_of_a_decoder_are_those_it_was_made_from(name):
    entry, arrays = small_model(name)
    found = decoder_arrays(Decoder(ModelConfig.from_hf(entry), arrays))
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)


def test_tokenizer_template_and_ends_travel_along(tmp_path):
    base = load_base("tiny-random")
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, base.config, decoder_arrays(base.decoder), base.tokenizer)
    read = load_base(str(folder))
    assert read.config == base.config
    text = "def f(x): # 12 é\n<|im_end|>"
    assert read.tokenizer.encode(text) == base.tokenizer.encode(text)
    assert read.tokenizer.special_tokens == base.tokenizer.special_tokens
    assert read.tokenizer.eos_ids == base.tokenizer.eos_ids == (256, 258)
    rendered = [each.tokenizer.render_chat(MESSAGES, add_generation_prompt=True)
                for each in (read, base)]  # fmt: skip
    assert rendered[0] == rendered[1]
    tokens = jnp.asarray([base.tokenizer.encode(text)])
    logits = [np.asarray(each.decoder.logits(each.decoder(tokens).hidden)) for each in (read, base)]
    np.testing.assert_array_equal(*logits)


def test_a_folder_keeps_its_own_files_but_for_the_dtype(tmp_path):
    config, arrays = written(tmp_path / "base", "mistral")
    base = tmp_path / "base"
    entry = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(entry | {"dtype": "float16", "mine": 7}))
    (base / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 2}')
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "new").mkdir()
    settings = {"dtype": "bfloat16", "settings_from": base}
    write_model(tmp_path / "new", config, arrays, tiny_tokenizer(), **settings)
    kept = json.loads((tmp_path / "new/config.json").read_text())
    assert (kept["mine"], kept["torch_dtype"], "dtype" in kept) == (7, "bfloat16", False)
    generation = json.loads((tmp_path / "new/generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "eos_token_id": [2], "bos_token_id": 1}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "new" / name).read_bytes() == (base / name).read_bytes()


def test_no_file_from_outside_the_base_is_copied(tmp_path):
    config, arrays = written(tmp_path / "base", "llama")
    (tmp_path / "private").write_text("key")
    (tmp_path / "base" / "special_tokens_map.json").symlink_to(tmp_path / "private")
    (tmp_path / "new").mkdir()
    with pytest.raises(ValueError, match=r"special_tokens_map\.json leads out of"):
        write_model(
            tmp_path / "new", config, arrays, tiny_tokenizer(), settings_from=tmp_path / "base"
        )


def test_numbers_are_rounded_to_the_dtype_or_refused(tmp_path):
    config, arrays = written(tmp_path / "half", "llama", dtype="float16")
    read = load_safetensors(tmp_path / "half", config)
    for key, array in arrays.items():
        np.testing.assert_array_equal(read[key], array.astype(np.float16).astype(np.float32))
    for value, words in ((1e6, "overflows float16"), (np.nan, "is NaN or infinite")):
        bad = dict(arrays)
        bad["layers.mlp.up_proj.weight"] = bad["layers.mlp.up_proj.weight"].copy()
        bad["layers.mlp.up_proj.weight"][1, 2, 3] = value
        with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.up_proj\.weight {words}"):
            write_model(tmp_path / "half", config, bad, tiny_tokenizer(), dtype="float16")


def test_llama3_factors_of_a_gguf_file_find_a_place():
    entry, _ = small_model("llama")
    config = ModelConfig.from_hf(entry)
    factors = tuple(1.0 + i for i in range(config.head_dim // 2))
    config = dataclasses.replace(config, rope_scaling=RopeScaling(kind="factors", factors=factors))
    read = ModelConfig.from_hf(to_hf(config))
    (ours, one), (theirs, other) = rope_frequencies(config), rope_frequencies(read)
    np.testing.assert_array_equal(ours, theirs)
    assert one == other == 1.0
    assert read.max_positions == config.max_positions


def test_what_no_config_json_can_say_is_refused():
    entry, _ = small_model("llama")
    config = dataclasses.replace(ModelConfig.from_hf(entry), qkv_bias=True)
    with pytest.raises(ValueError, match="qkv_bias is True and would be read as False"):
        to_hf(config)


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", ["llama_llama3_rope", "llama_yarn_rope", "llama_factors", "qwen2", "qwen3_tied"]
)
def test_transformers_reads_the_folder_and_gives_the_same_logits(tmp_path, name):
    import torch
    import transformers

    entry, arrays = small_model("llama" if name == "llama_factors" else name)
    config = ModelConfig.from_hf(entry)
    if name == "llama_factors":
        factors = tuple(1.0 + i for i in range(config.head_dim // 2))
        scaling = RopeScaling(kind="factors", factors=factors)
        config = dataclasses.replace(config, rope_scaling=scaling)
        arrays = random_arrays(config)
    write_model(tmp_path, config, arrays, tiny_tokenizer())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = small_tokens()
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    decoder = Decoder(config, arrays)
    actual = jax.jit(lambda d, t: d.logits(d(t).hidden))(decoder, jnp.asarray(tokens))
    np.testing.assert_allclose(np.asarray(actual), expected, atol=2e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a 12 é")["input_ids"] == tiny_tokenizer().encode("a 12 é")
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered == tiny_tokenizer().render_chat(MESSAGES, add_generation_prompt=True)
    ends = model.generation_config.eos_token_id
    assert set(ends if isinstance(ends, list) else [ends]) == set(config.eos_ids)
