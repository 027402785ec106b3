"""GGUF files written with the gguf package's own writer, and read back by our reader."""

import dataclasses

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from molora_jax.models.config import ModelConfig
from molora_jax.models.gguf import LAYER_NAMES, TOP_NAMES, load_gguf, read_gguf, unpermuted
from tests.fuzz.mutate_gguf import gguf_bytes
from tests.parity.small_models import small_model


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What converters to GGUF do to q and k of the llama architecture, one row at a time."""
    size = len(rows) // num_heads
    order = [
        head * size + half * (size // 2) + pair
        for head in range(num_heads)
        for pair in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]


def write_model(path, name, quantise=None, extra=()):
    """A small model as llama.cpp's converter lays it out."""
    settings, arrays = small_model(name)
    config = ModelConfig.from_hf(settings)
    arch = settings["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    top = {ours: theirs for theirs, ours in TOP_NAMES.items()}
    layered = {ours: theirs for theirs, ours in LAYER_NAMES.items()}

    def add(tensor_name, value):
        fits = quantise and value.ndim == 2 and value.shape[1] % 32 == 0
        kind = quantise if fits else GGMLQuantizationType.F32
        writer.add_tensor(tensor_name, gguf.quants.quantize(value, kind), raw_dtype=kind)

    for ours, array in arrays.items():
        stem, _, kind = ours.rpartition(".")
        if stem in top:
            add(f"{top[stem]}.{kind}", array)
            continue
        short = stem.removeprefix("layers.")
        heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
        for layer, value in enumerate(array):
            if arch == "llama" and short in heads:
                value = permuted(value, heads[short])
            add(f"blk.{layer}.{layered[short]}.{kind}", np.ascontiguousarray(value))
    for tensor_name, value in extra:
        writer.add_tensor(tensor_name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, arrays


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_tied", "llama_linear_rope_biases"])
def test_weights_come_back(name, tmp_path):
    config, arrays = write_model(tmp_path / "m.gguf", name)
    file = read_gguf(tmp_path / "m.gguf")
    read = file.config()
    for field in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings", "head_dim"):
        assert getattr(read, field) == getattr(config, field), field
    loaded = load_gguf(file, read)
    assert loaded.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(loaded[key], array, err_msg=key)


def test_quantised_rows_are_unpermuted_too(tmp_path):
    kind = GGMLQuantizationType.Q8_0
    _, arrays = write_model(tmp_path / "m.gguf", "llama_llama3_rope", quantise=kind)
    file = read_gguf(tmp_path / "m.gguf")
    assert "Q8_0" in file.quantisation()
    loaded = load_gguf(file, file.config())
    for key in ("layers.self_attn.q_proj.weight", "layers.self_attn.k_proj.weight"):
        rounded = gguf.quants.dequantize(gguf.quants.quantize(arrays[key], kind), kind)
        np.testing.assert_array_equal(loaded[key], rounded, err_msg=key)
        np.testing.assert_allclose(loaded[key], arrays[key], atol=0.02)


def test_unpermuted_is_the_inverse():
    rows = np.arange(24 * 3).reshape(24, 3)
    np.testing.assert_array_equal(unpermuted(permuted(rows, 3), 3), rows)
    assert np.any(permuted(rows, 3) != rows)


def test_every_type_that_the_package_decodes(tmp_path):
    known = [*gguf.quants._type_traits, GGMLQuantizationType.F16, GGMLQuantizationType.F32]
    assert len(known) > 20
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    for kind in known:
        block, size = GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (3, 512 // block * size), dtype=np.uint8)
        if kind == GGMLQuantizationType.F16:
            data = rng.standard_normal((3, 512)).astype(np.float16)
        elif kind == GGMLQuantizationType.F32:
            data = rng.standard_normal((3, 512)).astype(np.float32)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = read_gguf(tmp_path / "all.gguf").tensors
    with np.errstate(all="ignore"):  # random bytes are no sensible scales
        for theirs in gguf.GGUFReader(tmp_path / "all.gguf").tensors:
            expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            actual = ours[theirs.name].decoded()
            assert actual.shape == (3, 512)
            np.testing.assert_array_equal(actual, expected, err_msg=theirs.name)


def test_rope_factors_are_read_and_unknown_tensors_refused(tmp_path):
    factors = np.linspace(1, 2, 8, dtype=np.float32)
    write_model(tmp_path / "m.gguf", "llama_llama3_rope", extra=[("rope_freqs.weight", factors)])
    file = read_gguf(tmp_path / "m.gguf")
    np.testing.assert_allclose(file.config().rope_scaling.factors, factors)
    load_gguf(file, file.config())
    extra = [("blk.0.attn_sinks.weight", factors)]
    write_model(tmp_path / "m.gguf", "llama", extra=extra)
    file = read_gguf(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"1 unexpected: blk\.0\.attn_sinks\.weight"):
        load_gguf(file, file.config())


def test_metadata_values_of_every_kind(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_bool("flag", True)
    writer.add_int8("small", -3)
    writer.add_uint64("large", 1 << 40)
    writer.add_float64("precise", 0.1)
    writer.add_string("text", "grüße")
    writer.add_array("words", ["a", "", "🙂"])
    writer.add_array("numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = read_gguf(tmp_path / "m.gguf").fields
    expected = {
        "flag": True,
        "small": -3,
        "large": 1 << 40,
        "precise": 0.1,
        "text": "grüße",
        "words": ["a", "", "🙂"],
        "numbers": [1, 2, 3],
    }
    assert {name: fields[name] for name in expected} == expected


def test_damaged_files_say_so(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, "llama")
    whole = path.read_bytes()
    for size in (20, 300, len(whole) - 64):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="ends too early"):
            read_gguf(path)
    path.write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match="not a GGUF file"):
        read_gguf(path)


def lies(**changes):
    """A tiny file of which one thing is changed."""
    fields = changes.pop("fields", [("a", 4, 1)])
    tensors = changes.pop("tensors", [("x", (32,), 0, 0)])
    return gguf_bytes(fields, tensors, bytes(changes.pop("size", 128)), **changes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lies(counts=(1, 2**63)), "ends too early|stands twice|unknown type"),
        (lies(counts=(2**63, 1)), "axes|ends too early|unknown type"),
        (lies(fields=[("a", 9, (8, ["x"])), ("a", 4, 1)]), "'a' stands twice"),
        (lies(fields=[("a", 13, 0)]), "unknown type 13"),
        (lies(fields=[("a", 8, b"\xff")]), "no UTF-8"),
        (lies(fields=[("a", 9, (9, [(9, [(9, [(9, [(9, [(4, [1])])])])])]))]), "nested more than"),
        (lies(fields=[("general.alignment", 4, 0)]), "general.alignment is 0"),
        (lies(fields=[("general.alignment", 4, 48)]), "power of two"),
        (lies(fields=[("general.alignment", 8, "32")]), "general.alignment is '32'"),
        (lies(fields=[("general.alignment", 7, 1)]), "general.alignment is True"),
        (lies(tensors=[("x", (), 0, 0)]), "0 axes"),
        (lies(tensors=[("x", (1,) * 5, 0, 0)]), "5 axes"),
        (lies(tensors=[("x", (0,), 0, 0)]), "no weight can have"),
        (lies(tensors=[("x", (2**62, 2**62), 0, 0)]), "no weight can have"),
        (lies(tensors=[("x", (2**40,), 0, 0)]), "ends too early"),
        (lies(tensors=[("x", (32,), 0, 2**62)]), "ends too early"),
        (lies(tensors=[("x", (32,), 99, 0)]), "unknown type 99"),
        (lies(tensors=[("x", (33,), 8, 0)]), "packs 32 together"),
        (lies(tensors=[("x", (8,), 0, 4)]), "no multiple of the alignment"),
        (lies(tensors=[("x", (16,), 0, 0), ("y", (16,), 0, 32)]), "'y' overlaps 'x'"),
        (lies(tensors=[("x", (8,), 0, 0), ("x", (8,), 0, 32)]), "'x' stands twice"),
        (lies(version=9), "version 9"),
    ],
)
def test_lying_headers_are_refused_in_one_line(tmp_path, content, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_string_that_would_reach_behind_the_end_is_not_cut_in_silence(tmp_path):
    path = tmp_path / "m.gguf"
    whole = gguf_bytes([("a", 8, "text")], [], b"")
    path.write_bytes(whole.replace(b"\4\0\0\0\0\0\0\0text", b"\xff\0\0\0\0\0\0\0text"))
    with pytest.raises(ValueError, match="ends too early"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", "2", "block_count is '2'"),
        ("llama.attention.head_count", [4, 4], "head_count is"),
        ("llama.attention.head_count", 0, "head_count is 0"),
        ("llama.rope.freq_base", float("inf"), "freq_base is inf"),
        ("general.architecture", 3, "general.architecture 3 is not supported"),
        ("tokenizer.ggml.eos_token_id", -1, "eos_token_id is -1"),
    ],
)
def test_metadata_of_a_wrong_type_is_named(tmp_path, key, value, words):
    path = tmp_path / "m.gguf"
    write_model(path, "llama")
    file = read_gguf(path)
    changed = dataclasses.replace(file, fields={**file.fields, key: value})
    with pytest.raises(ValueError, match=words):
        changed.config()
