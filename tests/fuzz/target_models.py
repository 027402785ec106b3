"""Targets: base models from Hugging Face folders and GGUF files, and their tokenizers."""

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import tokenizers
from gguf.quants import dequantize
from hypothesis import strategies as st

from molora_jax.files import naming
from molora_jax.models import ModelConfig, Tokenizer, load_base
from molora_jax.models.gguf import LAYER_NAMES, TOP_NAMES, load_gguf, read_gguf
from molora_jax.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from molora_jax.models.weights import load_safetensors, random_arrays
from tests.fuzz import oracle
from tests.fuzz.guard import attempt
from tests.fuzz.mutate import (
    Files,
    damaged,
    dumped,
    folders,
    json_texts,
    safetensors_bytes,
    safetensors_files,
)
from tests.fuzz.mutate_gguf import ARRAY, STRING, gguf_bytes, gguf_files
from tests.fuzz.targets import Target, laid_out, seen_content, workplace
from tests.parity.small_models import hf_tensors

SETTINGS = {
    "model_type": "llama", "vocab_size": 20, "hidden_size": 8, "intermediate_size": 6,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": [2, 3], "tie_word_embeddings": False,
    "attention_bias": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "torch_dtype": "float32",
}  # fmt: skip
FIELDS = (
    "sliding_window", "use_sliding_window", "layer_types", "mlp_bias", "partial_rotary_factor",
    "quantization_config", "num_experts", "num_local_experts", "rope_parameters", "is_causal",
    "pretraining_tp", "max_window_layers", "original_max_position_embeddings", "type", "truncate",
    "low_freq_factor", "attention_factor", "short_factor", "mscale", "beta_fast", "model_type",
)  # fmt: skip
GENERATION = {"eos_token_id": [2, 4], "temperature": 0.6}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_FILE, TOKENIZER, TOKENIZER_CONFIG = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
SAMPLE = "the <|im_end|> cat é🙂 42"


@functools.cache
def _tensors() -> dict[str, np.ndarray]:
    return hf_tensors(random_arrays(ModelConfig.from_hf(SETTINGS), seed=3))


@functools.cache
def _good() -> Files:
    """A whole base folder with a byte-level tokenizer of 260 tokens over 20 rows of embedding."""
    chat = {
        "bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": CHAT_TEMPLATE, "model_max_length": 10**30,
    }  # fmt: skip
    return {
        CONFIG: dumped(SETTINGS),
        GENERATION_FILE: dumped(GENERATION),
        WEIGHTS: safetensors_bytes(_tensors(), {"format": "pt"}),
        TOKENIZER: tiny_tokenizer().backend.to_str().encode(),
        TOKENIZER_CONFIG: dumped(chat),
    }


def _check_config(files: Files, folder: Path) -> bool:
    """The two configuration files alone, as `load_base` reads them."""
    from molora_jax.models import lookup

    laid_out(files, folder)
    outcome = attempt(lambda: lookup.read_model_config(folder), folder=folder, names=(folder.name,))
    if outcome.refusal is not None:
        return False
    generation = files.get(GENERATION_FILE)
    oracle.check_model_config(
        outcome.value,
        oracle.tree(seen_content(folder, CONFIG)),
        {} if generation is None else oracle.tree(seen_content(folder, GENERATION_FILE)),
    )
    return True


def _check_weights(files: Files, folder: Path) -> bool:
    """One weights file, or shards with an index."""
    laid_out(files, folder)
    config = ModelConfig.from_hf(SETTINGS)
    outcome = attempt(lambda: load_safetensors(folder, config), folder=folder, names=(folder.name,))
    if outcome.refusal is not None:
        return False
    if WEIGHTS in files:
        shards = [WEIGHTS]
    else:
        shards = sorted(set(oracle.tree(seen_content(folder, INDEX))["weight_map"].values()))
    stored: dict[str, np.ndarray] = {}
    for shard in shards:
        assert "/" not in shard
        more = oracle.tensors(seen_content(folder, shard))
        assert not set(more) & set(stored)
        stored |= more
    _check_arrays(outcome.value, {n: a for n, a in stored.items() if "rotary_emb" not in n}, config)
    return True


def _check_arrays(found: dict[str, Any], stored: dict[str, np.ndarray], config: Any) -> None:
    expected = oracle.stacked(stored, config, np.float32)
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, array in expected.items():
        assert oracle.same(np.asarray(found[name]), array), name
    assert all(
        array.dtype.kind == "f" or array.dtype.name == "bfloat16" for array in stored.values()
    )


@st.composite
def _shards(draw) -> Files:
    names = sorted(_tensors())
    cut = draw(st.integers(1, len(names) - 1))
    files: Files = {}
    weight_map = {}
    for shard, part in (("a.safetensors", names[:cut]), ("b.safetensors", names[cut:])):
        files[shard] = safetensors_bytes({name: _tensors()[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    files[INDEX] = dumped(index)
    match draw(st.integers(0, 4)):
        case 0:
            return draw(folders(files, (files["a.safetensors"],)))
        case 1:
            paths = ("../secret", "/etc/passwd", "a.safetensors/..", "b.bin", "", "c.safetensors")
            name = draw(st.sampled_from(names))
            weight_map[name] = draw(st.sampled_from((*paths, 1, None, ["a.safetensors"])))
            files[INDEX] = dumped(index)
        case _:
            files[INDEX] = draw(json_texts(index, ("weight_map", "a.safetensors")))
    return files


@functools.cache
def _warmed_up() -> None:
    """JAX starts its threads, whose stacks would count as memory that a case asked for."""
    load_base("tiny-random")


def _check_folder(files: Files, folder: Path) -> bool:
    """All of it through `load_base`."""
    _warmed_up()
    laid_out(files, folder)
    outcome = attempt(
        lambda: load_base(str(folder)),
        folder=folder,
        names=(folder.name,),
        writable=[workplace() / "cache"],
    )
    if outcome.refusal is not None:
        return False
    base = outcome.value
    settings = oracle.tree(seen_content(folder, CONFIG))
    present = (folder / GENERATION_FILE).exists()
    generation = oracle.tree(seen_content(folder, GENERATION_FILE)) if present else {}
    oracle.check_model_config(base.config, settings, generation)
    stored = oracle.tensors(seen_content(folder, WEIGHTS))
    expected = oracle.stacked(stored, base.config, np.float32)
    leaves = {np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(base.decoder)}
    assert {array.tobytes() for array in expected.values()} <= leaves
    return True


# --- tokenizers ----------------------------------------------------------------------------------
@st.composite
def _tokenizer_folders(draw) -> Files:
    files = {name: _good()[name] for name in (TOKENIZER, TOKENIZER_CONFIG)}
    match draw(st.integers(0, 3)):
        case 0:
            keys = ("bos_token", "eos_token", "chat_template", "unk_token", "content", "name")
            files[TOKENIZER_CONFIG] = draw(json_texts(json.loads(files[TOKENIZER_CONFIG]), keys))
        case 1:
            return draw(folders(files))
        case 2:
            templates = ("{% for", "{{ messages[9].x.y }}", "{{ 1/0 }}", "{{ ''.__class__ }}", "ok",
                         "{{ raise_exception('no\nno') }}", "{% include 'x' %}", "{{ x|nofilter }}",
                         "{% import 'os' as os %}", "{{ range(10**9)|list }}")  # fmt: skip
            files["chat_template.jinja"] = draw(st.sampled_from(templates)).encode()
        case 3:
            keys = ("type", "merges", "vocab", "added_tokens", "pattern", "Regex", "special")
            small = json.loads(files[TOKENIZER])
            vocab = small["model"]["vocab"]
            small["model"]["vocab"] = {k: v for k, v in vocab.items() if v < 8 or v > 250}
            small["model"]["merges"] = ["a b"] if draw(st.booleans()) else []
            files[TOKENIZER] = draw(json_texts(small, keys))
    return files


def _check_tokenizer(files: Files, folder: Path) -> bool:
    laid_out(files, folder)
    names = (folder.name, "tokenizer", "template")
    outcome = attempt(lambda: Tokenizer.from_folder(folder), folder=folder, names=names)
    if outcome.refusal is not None:
        return False
    found: Tokenizer = outcome.value
    encoded = attempt(lambda: found.encode(SAMPLE), folder=folder, names=names)
    settings = {}
    if (folder / TOKENIZER_CONFIG).exists():
        settings = oracle.tree(seen_content(folder, TOKENIZER_CONFIG))
    if encoded.refusal is None:
        theirs = tokenizers.Tokenizer.from_str(seen_content(folder, TOKENIZER).decode("utf-8-sig"))
        theirs.no_truncation(), theirs.no_padding()
        assert encoded.value == theirs.encode(SAMPLE).ids
        for name, expected in (("bos_token", [found.bos_id]), ("eos_token", found.eos_ids)):
            token = settings.get(name)
            token = token["content"] if isinstance(token, dict) else token
            known = None if token is None else theirs.token_to_id(token)
            assert [each for each in expected if each is not None] == (
                [] if known is None else [known]
            )
        attempt(lambda: found.decode(encoded.value), folder=folder, names=names)
    if found.chat_template is not None:
        messages = [{"role": "user", "content": "x"}]
        attempt(lambda: found.render_chat(messages), folder=folder, names=names)
    return True


# --- GGUF ----------------------------------------------------------------------------------------
@functools.cache
def _gguf() -> tuple[tuple, tuple, bytes]:
    """Fields, tensors and data of a good file of the qwen2 family, whose rows are not permuted."""
    settings = SETTINGS | {"model_type": "qwen2", "rope_scaling": None, "hidden_size": 32}
    settings |= {"intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    arrays = random_arrays(ModelConfig.from_hf(settings), seed=5)
    tokens = [f"t{index}" for index in range(18)] + ["t0t1", "<|end|>"]
    prefix = "qwen2."
    fields: list[tuple[str, int, Any]] = [
        ("general.architecture", STRING, "qwen2"),
        ("general.alignment", 4, 32),
        (prefix + "context_length", 4, 64),
        (prefix + "embedding_length", 4, 32),
        (prefix + "block_count", 4, 1),
        (prefix + "feed_forward_length", 4, 32),
        (prefix + "attention.head_count", 4, 2),
        (prefix + "attention.head_count_kv", 4, 1),
        (prefix + "attention.key_length", 4, 16),
        (prefix + "attention.layer_norm_rms_epsilon", 6, 1e-5),
        (prefix + "rope.freq_base", 6, 500.0),
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "qwen2"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (5, [1] * 19 + [3])),
        ("tokenizer.ggml.merges", ARRAY, (STRING, ["t0 t1"])),
        ("tokenizer.ggml.bos_token_id", 4, 1),
        ("tokenizer.ggml.eos_token_id", 4, 19),
        ("tokenizer.ggml.add_bos_token", 7, 0),
        ("tokenizer.chat_template", STRING, "{{ messages }}"),
    ]
    top = {ours: theirs for theirs, ours in TOP_NAMES.items()}
    layered = {ours: theirs for theirs, ours in LAYER_NAMES.items()}
    tensors, data = [], b""
    for name, array in arrays.items():
        stem, _, kind = name.rpartition(".")
        value = array[0] if name.startswith("layers.") else array
        stem = layered.get(stem.removeprefix("layers."), "") if "layers." in stem else top[stem]
        full = f"blk.0.{stem}.{kind}" if name.startswith("layers.") else f"{stem}.{kind}"
        packs = "ffn" in full and value.ndim == 2
        kind_id = gguf.GGMLQuantizationType.Q8_0 if packs else gguf.GGMLQuantizationType.F32
        raw = gguf.quants.quantize(np.ascontiguousarray(value), kind_id).tobytes()
        tensors.append((full, value.shape[::-1], int(kind_id), len(data)))
        data += raw.ljust(-(-len(raw) // 32) * 32, b"\0")
    return tuple(fields), tuple(tensors), data


def _nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, list) for each in value)


@st.composite
def _gguf_inputs(draw) -> bytes:
    fields, tensors, data = _gguf()
    if draw(st.integers(0, 9)) == 0:
        return draw(damaged(gguf_bytes(fields, tensors, data)))
    return draw(gguf_files(fields, tensors, data))


def _check_gguf(content: bytes, folder: Path) -> bool:
    path = folder / "model.gguf"
    path.write_bytes(content)

    def call():
        file = read_gguf(path)
        config = file.config()
        with naming(path):
            return file, config, load_gguf(file, config), Tokenizer.from_gguf(file.fields)

    outcome = attempt(call, folder=folder, names=(path.name,))
    if outcome.refusal is not None:
        return False
    file, config, arrays, tokenizer = outcome.value
    theirs = gguf.GGUFReader(path)
    fields = {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(file.fields) == list(fields)
    for key, value in fields.items():
        if not _nested(file.fields[key]):  # the package's reader flattens those
            assert repr(file.fields[key]) == repr(value), key
    assert [each.name for each in theirs.tensors] == list(file.tensors)
    values = {}
    for each in theirs.tensors:
        with np.errstate(all="ignore"):
            decoded = dequantize(each.data, each.tensor_type)
        values[each.name] = decoded.reshape(tuple(each.shape[::-1].tolist()))
    arch = fields["general.architecture"]
    assert config.num_layers == fields[f"{arch}.block_count"]
    assert config.num_heads == fields[f"{arch}.attention.head_count"]
    assert config.rms_norm_eps == fields[f"{arch}.attention.layer_norm_rms_epsilon"] > 0
    assert config.rope_theta == fields.get(f"{arch}.rope.freq_base", 10000.0)
    assert (config.vocab_size, config.hidden_size) == values["token_embd.weight"].shape
    used = {"rope_freqs.weight"} if "rope_freqs.weight" in values else set()
    for name, array in arrays.items():
        stem, _, kind = name.rpartition(".")
        for layer in range(config.num_layers if name.startswith("layers.") else 1):
            if name.startswith("layers."):
                (theirs_stem,) = (t for t, o in LAYER_NAMES.items() if f"layers.{o}" == stem)
                key, found = f"blk.{layer}.{theirs_stem}.{kind}", array[layer]
            else:
                (theirs_stem,) = (t for t, o in TOP_NAMES.items() if o == stem)
                key, found = f"{theirs_stem}.{kind}", array
            used.add(key)
            permuted = arch == "llama" and ("attn_q" in key or "attn_k" in key)
            order = np.sort if permuted else np.asarray
            assert np.array_equal(
                order(found.ravel()), order(values[key].ravel()), equal_nan=True
            ), key
    assert set(values) - used <= {"output.weight"}
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokenizer.vocab_size == len(tokens)
    end, begin = (fields.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "bos"))
    assert tokenizer.eos_ids == (() if end is None else (end,)) and tokenizer.bos_id == begin
    if end is not None:
        assert tokenizer.special_tokens["eos_token"] == tokens[end]
    return True


def targets() -> list[Target]:
    configs = st.one_of(
        st.builds(lambda text: {CONFIG: text}, json_texts(SETTINGS, FIELDS)),
        st.builds(
            lambda text, other: {CONFIG: text, GENERATION_FILE: other},
            json_texts(SETTINGS | {"model_type": "qwen3", "use_sliding_window": False}, FIELDS),
            st.just(dumped(GENERATION)) | json_texts(GENERATION, ("eos_token_id",)),
        ),
    )
    good = _good()
    keys = (
        *sorted(_tensors())[:4],
        "norm.weight",
        "model.layers.00.mlp.up_proj.weight",
        "lm_head.x",
    )
    weights = st.builds(lambda content: {WEIGHTS: content}, safetensors_files(good[WEIGHTS], keys))
    return [
        Target("base_config", configs, _check_config, 12),
        Target("base_weights", weights, _check_weights, 8),
        Target("base_index", _shards(), _check_weights, 5),
        Target("base_folder", folders(good, (b"{}", good[WEIGHTS][:99])), _check_folder, 2),
        Target("tokenizer", _tokenizer_folders(), _check_tokenizer, 5),
        Target("gguf", _gguf_inputs(), _check_gguf, 12),
    ]
