"""Stacked weights from safetensors folders: shards, dtypes, names that do not fit, pickle."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from molora_jax.models.config import ModelConfig
from molora_jax.models.weights import array_shapes, load_safetensors, random_arrays
from tests.parity.small_models import hf_tensors, small_model, write_folder


@pytest.fixture
def model(tmp_path):
    settings, arrays = small_model("qwen3_untied")
    tensors = hf_tensors(arrays)
    return write_folder(tmp_path, settings, tensors), ModelConfig.from_hf(settings), arrays, tensors


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def test_one_file(model):
    folder, config, arrays, _ = model
    loaded = load_safetensors(folder, config)
    assert_same(loaded, arrays)
    assert {name: array.shape for name, array in loaded.items()} == array_shapes(config)


def test_index_with_shards(model):
    folder, config, arrays, tensors = model
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(load_safetensors(folder, config), arrays)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 shards are missing \(b\.safetensors\)"):
        load_safetensors(folder, config)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_become_float32(model, stored):
    folder, config, arrays, tensors = model
    save_file({k: v.astype(stored) for k, v in tensors.items()}, folder / "model.safetensors")
    loaded = load_safetensors(folder, config)
    for name, array in arrays.items():
        assert loaded[name].dtype == np.float32
        np.testing.assert_array_equal(loaded[name], array.astype(stored).astype(np.float32))


def test_weights_can_be_kept_in_bfloat16(model):
    folder, config, arrays, _ = model
    loaded = load_safetensors(folder, config, dtype="bfloat16")
    for name, array in arrays.items():
        assert loaded[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(loaded[name], array.astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="int8"):
        load_safetensors(folder, config, dtype="int8")


def test_names_and_shapes_that_do_not_fit_are_listed(model):
    folder, config, _, tensors = model
    tensors["model.layers.1.self_attn.surprise.weight"] = np.zeros((2, 2), np.float32)
    tensors["visual.patch.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((3, 3), np.float32)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="qwen3") as caught:
        load_safetensors(folder, config)
    message = str(caught.value)
    assert "1 missing: layers.2.mlp.up_proj.weight" in message
    assert "2 unexpected: visual.patch.weight, layers.1.self_attn.surprise.weight" in message
    assert "layers.0.self_attn.q_proj.weight (3, 3) instead of (32, 32)" in message


def test_buffers_and_a_tied_output_in_the_file_are_no_mistake(tmp_path):
    settings, arrays = small_model("qwen3_tied")
    tensors = hf_tensors(arrays)
    tensors["lm_head.weight"] = arrays["embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    write_folder(tmp_path, settings, tensors)
    assert_same(load_safetensors(tmp_path, ModelConfig.from_hf(settings)), arrays)


def test_a_tied_model_with_another_output_is_refused(tmp_path):
    # transformers unties it since its version 5, and older ones do not.
    settings, arrays = small_model("qwen3_tied")
    tensors = hf_tensors(arrays)
    tensors["lm_head.weight"] = arrays["embed_tokens.weight"].copy()
    tensors["lm_head.weight"][3, 1] += 1e-3
    write_folder(tmp_path, settings, tensors)
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, and yet lm_head\.weight"):
        load_safetensors(tmp_path, ModelConfig.from_hf(settings))


def test_pickle_is_not_read(model):
    folder, config, _, _ = model
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*safe_serialization=True"):
        load_safetensors(folder, config)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_that_are_not_finite_are_refused(model, value, dtype):
    folder, config, _, tensors = model
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has 1 values"):
        load_safetensors(folder, config, dtype=dtype)


def test_a_weight_that_float16_cannot_hold_is_refused_and_not_made_infinite(model):
    folder, config, _, tensors = model
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight has 1 values .* too large for float16"):
        load_safetensors(folder, config, dtype="float16")
    assert load_safetensors(folder, config, dtype="bfloat16")["norm.weight"][0] > 9e5


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, ml_dtypes.float8_e4m3fn])
def test_whole_numbers_and_fp8_without_scales_are_no_weights(model, dtype):
    folder, config, _, tensors = model
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is stored as .* GGUF alone"):
        load_safetensors(folder, config)


@pytest.mark.parametrize("again", ["norm.weight", "model.norm.weight"])
def test_a_tensor_that_is_there_twice_is_refused(model, again):
    folder, config, _, tensors = model
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({again: tensors["model.norm.weight"]}, folder / "b.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="a second time"):
        load_safetensors(folder, config)


@pytest.mark.parametrize("spelling", ["00", "²", "+1", "1_0", "1000000000"])
def test_a_layer_is_spelt_one_way(model, spelling):
    folder, config, _, tensors = model
    tensors[f"model.layers.{spelling}.mlp.up_proj.weight"] = np.zeros(1, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="1 unexpected"):
        load_safetensors(folder, config)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../secret.safetensors"}, "name no .safetensors file of the folder"),
        ({"a": "/etc/passwd"}, "'/etc/passwd'"),
        ({"a": "pytorch_model.bin"}, "pytorch_model.bin"),
        ({"a": 1}, "name no .safetensors file"),
        ({"a": ["x.safetensors"]}, "name no .safetensors file"),
        ({}, "expected 'weight_map'"),
        (["a"], "expected 'weight_map'"),
    ],
)
def test_an_index_names_files_of_its_own_folder(model, weight_map, words):
    folder, config, _, _ = model
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=words):
        load_safetensors(folder, config)


def test_stand_ins_and_links_out_of_the_folder_are_refused(model, tmp_path):
    folder, config, _, _ = model
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content, words in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"", "empty"),
        (whole[:-4], "cut short"),
        (whole[:99], "cut short"),
        (b"{}" * 99, "no safetensors file"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            load_safetensors(folder, config)
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "model.safetensors").write_bytes(whole)
    file.unlink()
    file.symlink_to(other / "model.safetensors")
    inner = folder / "sub"
    inner.mkdir()
    (inner / "model.safetensors").symlink_to("../elsewhere/model.safetensors")
    with pytest.raises(ValueError, match="leads out of"):
        load_safetensors(inner, config)


def test_random_arrays_repeat_and_leave_nothing_out():
    _, arrays = small_model("llama_linear_rope_biases")
    config = ModelConfig.from_hf(small_model("llama_linear_rope_biases")[0])
    again, other = random_arrays(config, seed=3), random_arrays(config, seed=4)
    assert_same(random_arrays(config, seed=3), again)
    for name, array in arrays.items():
        assert np.abs(array).min() > 0 or array.size > 1000, name
        assert np.any(again[name] != other[name]), name
