"""What a mutated input means, worked out again by separate code."""

import json
import math
import re
import struct
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Fields of an adapter_config.json that change the result unless they are off.
MUST_BE_OFF = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters",
    "fan_in_fan_out", "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora",
    "arrow_config", "monteclora_config", "kasa_config",
)  # fmt: skip
HARMLESS = (
    "peft_type", "task_type", "base_model_name_or_path", "revision", "r", "lora_alpha",
    "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "inference_mode", "peft_version",
    "auto_mapping", "lora_dropout", "megatron_config", "megatron_core", "loftq_config",
    "runtime_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
    "qalora_group_size", "ensure_weight_tying", "bias",
)  # fmt: skip
_WIDTHS = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip


def tree(content: bytes) -> Any:
    """The JSON in a file; ValueError where a key stands twice."""

    def once(pairs):
        assert len({key for key, _ in pairs}) == len(pairs), "a key stands twice"
        return dict(pairs)

    return json.loads(content.decode("utf-8-sig"), object_pairs_hook=once)


def tensors(content: bytes) -> dict[str, np.ndarray]:
    """{name: array} by a header parser of ten lines, which has to agree with safetensors' own."""
    length = struct.unpack("<Q", content[:8])[0]
    header = tree(content[8 : 8 + length])
    data = content[8 + length :]
    found, covered = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        dtype, shape = np.dtype(_WIDTHS[entry["dtype"]]), tuple(entry["shape"])
        assert 0 <= begin <= end <= len(data) and end - begin == math.prod(shape) * dtype.itemsize
        found[name] = np.frombuffer(data[begin:end], dtype).reshape(shape)
        covered += end - begin
    assert covered == len(data)
    theirs = dict(safetensors.deserialize(content))
    assert set(theirs) == set(found)
    for name, array in found.items():
        each = theirs[name]
        assert tuple(each["shape"]) == array.shape and bytes(each["data"]) == array.tobytes()
    return found


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal in type, shape and every bit."""
    return (found.dtype, found.shape, found.tobytes()) == (
        expected.dtype, expected.shape, expected.tobytes()
    )  # fmt: skip


def check_adapter(adapter: Any, config: bytes, weights: bytes, num_layers: int) -> None:
    """An accepted adapter is just what its two files say, by PEFT's rules."""
    settings, stored = tree(config), tensors(weights)
    for name in MUST_BE_OFF:
        assert settings.get(name) in (None, False, [], {}), f"{name} is on"
        assert settings.get(name) is None or type(settings[name]) is not int, name
    assert settings.get("bias") in (None, "none"), "bias"
    assert settings.get("peft_type") in (None, "LORA"), "peft_type"
    for name in set(settings) - {*MUST_BE_OFF, *HARMLESS}:
        value = settings[name]
        assert value in (None, [], {}, "") or value is False, f"unknown field {name!r} is set"
    seen = {}
    for key, array in stored.items():
        match = re.fullmatch(
            r"base_model\.model\.(.*?)layers\.(\d+)\.(\w+)\.(\w+)\.lora_([AB])(\.[^.]+)?\.weight",
            key,
        )
        assert match, f"{key!r} was ignored"
        module = f"layers.{match[2]}.{match[3]}.{match[4]}"
        assert match[4] in PROJECTIONS and (module, match[5]) not in seen, key
        seen[module, match[5]] = (match[1] + module, array)
    assert {module for module, _ in seen} == set(adapter.modules)
    rslora = settings.get("use_rslora")
    assert rslora is None or type(rslora) is bool, "use_rslora"
    for module, pair in adapter.modules.items():
        (path, a), (_, b) = seen[module, "A"], seen[module, "B"]
        assert same(pair.a, a) and same(pair.b, b), module
        assert np.isfinite(a.astype(np.float64)).all() and np.isfinite(b.astype(np.float64)).all()
        rank = _of_pattern(settings, "rank_pattern", path, settings.get("r"))
        alpha = _of_pattern(settings, "alpha_pattern", path, settings.get("lora_alpha"))
        rank, alpha = 8 if rank is None else rank, 8 if alpha is None else alpha
        assert type(rank) is int and rank == a.shape[0] == b.shape[1] > 0, f"rank {rank!r}"
        assert type(alpha) in (int, float) and math.isfinite(alpha), f"alpha {alpha!r}"
        expected = alpha / (math.sqrt(rank) if rslora else rank)
        assert pair.scale == expected, f"{module}: scale {pair.scale} instead of {expected}"
    narrowed = settings.get("exclude_modules") or settings.get("layers_to_transform")
    targets = settings.get("target_modules")
    if isinstance(targets, list) and not narrowed:
        present = {module.split(".", 1)[1] for module in adapter.modules}
        for name in set(targets) & set(PROJECTIONS):
            for layer in range(num_layers):
                assert any(p.startswith(f"{layer}.") and p.endswith(name) for p in present), name


def _of_pattern(settings: dict, name: str, path: str, default: Any) -> Any:
    for key, value in (settings.get(name) or {}).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a doubtful set, "[[a]"
            if re.match(rf"(.*\.)?({key})$", path):
                return value
    return default


def check_model_config(config: Any, settings: dict, generation: dict) -> None:
    """An accepted config.json means what transformers' documentation says its fields mean."""
    family = settings["model_type"]
    assert config.model_type == family
    plain = {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size", "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
    }  # fmt: skip
    for ours, theirs in plain.items():
        assert type(settings[theirs]) is int and getattr(config, ours) == settings[theirs], theirs
    heads = settings["num_attention_heads"]
    kv_heads = settings.get("num_key_value_heads")
    assert config.num_kv_heads == (heads if kv_heads is None else kv_heads)
    default = 128 if family == "qwen3" and "head_dim" not in settings else None
    size = settings.get("head_dim", default)
    assert config.head_dim == (settings["hidden_size"] // heads if size is None else size)
    eps = settings.get("rms_norm_eps", 1e-6)
    assert type(eps) in (int, float) and config.rms_norm_eps == eps and math.isfinite(eps)
    rope = (settings.get("rope_scaling") or {}) | (settings.get("rope_parameters") or {})
    theta = rope.get("rope_theta", settings.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    assert type(theta) in (int, float) and config.rope_theta == theta and math.isfinite(theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    assert (config.rope_scaling is None) == (kind == "default"), kind
    if config.rope_scaling is not None and "factor" in rope and rope["factor"] is not None:
        assert config.rope_scaling.factor == rope["factor"]
    for name, ours in (("tie_word_embeddings", config.tie_word_embeddings),):
        assert settings.get(name) in (None, True, False) and bool(settings.get(name)) == ours
    assert settings.get("hidden_act", "silu") in ("silu", "swish"), "hidden_act"
    assert set(settings.get("layer_types") or ()) <= {"full_attention"}, "layer_types"
    assert not settings.get("quantization_config"), "quantization_config"
    assert not (settings.get("num_experts") or settings.get("num_local_experts")), "experts"
    ends = []
    for each in (settings.get("eos_token_id", 2 if family == "llama" else None),
                 generation.get("eos_token_id")):  # fmt: skip
        ends += each if isinstance(each, list) else [] if each is None else [each]
    assert list(config.eos_ids) == list(dict.fromkeys(ends)), (config.eos_ids, ends)
    assert all(type(end) is int and end >= 0 for end in ends)


def stacked(stored: dict[str, np.ndarray], config: Any, dtype: type) -> dict[str, np.ndarray]:
    """The arrays of a decoder from Hugging Face's names, a layer after the other."""
    found: dict[str, Any] = {}
    for name, array in stored.items():
        plain = name.removeprefix("model.")
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", plain):
            layers = found.setdefault(f"layers.{match[2]}", {})
            assert int(match[1]) not in layers, name
            layers[int(match[1])] = array
        elif not (plain == "lm_head.weight" and config.tie_word_embeddings):
            assert plain not in found, name
            found[plain] = array
    return {
        name: np.stack([each[layer] for layer in range(config.num_layers)]).astype(dtype)
        if isinstance(each, dict)
        else each.astype(dtype)
        for name, each in found.items()
    }
