"""A base model as a folder in Hugging Face's layout, which `load_base` and transformers read."""

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax.files import inside, read_json
from molora_jax.models.config import ModelConfig, rope_frequencies
from molora_jax.models.decoder import Decoder
from molora_jax.models.rope import RopeScaling
from molora_jax.models.tokenizer import Tokenizer
from molora_jax.models.weights import DTYPES, array_shapes

WEIGHTS_FILE = "model.safetensors"
# Taken over as they are where the base is a folder: they say more than a Tokenizer keeps.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
GENERATION_FILE = "generation_config.json"
MODEL_FILES = frozenset({"config.json", WEIGHTS_FILE, GENERATION_FILE, *TOKENIZER_FILES})

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ROW_BYTES = 1 << 24


def to_hf(config: ModelConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The config.json that describes this model; `ModelConfig.from_hf` reads the same one back.

    Raises ValueError where Hugging Face's model type cannot say it (a GGUF file may combine biases
    as no config.json can), naming the fields.
    """
    ends, scaling = list(config.eos_ids), config.rope_scaling
    entry: dict[str, Any] = {
        "architectures": [_CLASSES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling and _rope_entry(scaling, config.max_positions),
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "torch_dtype": dtype,
    }
    if config.model_type == "mistral":
        entry["sliding_window"] = None
    if config.model_type.startswith("qwen"):
        entry["use_sliding_window"] = False
    read = ModelConfig.from_hf(entry)
    differing = [
        f"{name} is {getattr(config, name)!r} and would be read as {getattr(read, name)!r}"
        for name in config.__dataclass_fields__
        if name != "rope_scaling" and getattr(config, name) != getattr(read, name)
    ]
    (ours, factor), (theirs, other_factor) = rope_frequencies(config), rope_frequencies(read)
    if not np.allclose(ours, theirs, rtol=1e-6, atol=0) or factor != other_factor:
        differing.append(f"rope_scaling {scaling} would be read as {read.rope_scaling}")
    if differing:
        raise ValueError(
            f"this {config.model_type} model has no config.json in Hugging Face's layout: "
            + "; ".join(differing)
        )
    return entry


def _rope_entry(scaling: RopeScaling, max_positions: int) -> dict[str, Any]:
    """`rope_scaling` of a config.json."""
    entry: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        entry["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind == "llama3":
        entry |= {n: getattr(scaling, n) for n in ("low_freq_factor", "high_freq_factor")}
    if scaling.kind == "yarn":
        entry |= {n: getattr(scaling, n) for n in ("beta_fast", "beta_slow", "truncate")}
    if scaling.kind in ("factors", "longrope"):
        entry["short_factor"] = entry["long_factor"] = list(scaling.factors)
    if scaling.kind == "factors":
        # What a GGUF file made of llama3's rule. A config.json has a place for single factors only
        # here, and within one context length they are the same function.
        entry |= {"rope_type": "longrope", "attention_factor": 1.0}
        entry["original_max_position_embeddings"] = max_positions
    if scaling.attention_factor is not None:
        entry["attention_factor"] = scaling.attention_factor
    return entry


def decoder_arrays(decoder: Decoder) -> dict[str, np.ndarray]:
    """The stacked arrays that `Decoder(config, arrays)` was made from, by name, on the host."""
    layers = decoder.layers
    homes = {"embed_tokens": decoder.embedding, "norm": decoder.norm, "lm_head": decoder.lm_head}
    arrays = {}
    for name in array_shapes(decoder.config):
        if not name.startswith("layers."):
            variable = homes[name.removesuffix(".weight")]
            assert variable is not None  # array_shapes names an output only where there is one
            arrays[name] = np.asarray(variable[...])
            continue
        *_, module, kind = name.split(".")
        if module in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"):
            variable = getattr(layers, module.replace("layernorm", "norm"))
        else:
            variable = getattr(getattr(layers, module), kind)
        arrays[name] = np.asarray(variable[...])
    return arrays


def hf_tensors(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, tensor) for every layer of every stacked array."""
    for name, array in arrays.items():
        if name.startswith("layers."):
            for layer, value in enumerate(array):
                yield name.replace("layers.", f"model.layers.{layer}.", 1), value
        else:
            yield (name if name.startswith("lm_head") else f"model.{name}"), array


def write_model(
    folder: Path,
    config: ModelConfig,
    arrays: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    *,
    dtype: str = "float32",
    settings_from: Path | None = None,
) -> None:
    """Writes config.json, model.safetensors, tokenizer and generation settings into a folder.

    arrays         stacked, as the loaders return them; a tied output is not written twice
    dtype          of the tensors in the file
    settings_from  the Hugging Face folder of the base: its tokenizer files are copied, its other
                   settings kept, since they say more than is read here; None makes them all

    Raises ValueError, naming the tensor, where a number is not finite or overflows `dtype`.
    """
    if settings_from is None:
        entry = to_hf(config, dtype=dtype)
    else:
        path = settings_from / "config.json"
        entry = read_json(path, where=str(path), root=settings_from)
        entry = {k: v for k, v in entry.items() if k != "dtype"} | {"torch_dtype": dtype}
    _write_json(folder / "config.json", entry)
    write_safetensors(folder / WEIGHTS_FILE, dict(hf_tensors(arrays)), dtype=dtype)
    generation = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
    if settings_from is None:
        (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(pretty=True), "utf-8")
        _write_json(folder / "tokenizer_config.json", _tokenizer_entry(tokenizer, config))
        if tokenizer.special_tokens.get("pad_token"):
            pad = tokenizer.backend.token_to_id(tokenizer.special_tokens["pad_token"])
            generation["pad_token_id"] = pad
    else:
        for name in TOKENIZER_FILES:
            if (settings_from / name).exists():
                shutil.copyfile(inside(settings_from / name, settings_from), folder / name)
        path = settings_from / GENERATION_FILE
        kept = read_json(path, where=str(path), root=settings_from) if path.exists() else {}
        generation = kept | generation
    _write_json(folder / GENERATION_FILE, {k: v for k, v in generation.items() if v is not None})


def _tokenizer_entry(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
        **tokenizer.special_tokens,
        **({} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}),
    }


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], *, dtype: str = "float32"
) -> None:
    """A safetensors file, written tensor by tensor in `dtype`.

    safetensors' own writer holds every tensor once more in memory, and makes a file that only its
    owner can read.
    """
    target = np.dtype(DTYPES[dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # some readers insist on it
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.size * target.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            for part in _parts(tensor):
                with np.errstate(over="ignore"):
                    stored = part.astype(target)
                if not np.isfinite(stored).all():
                    what = "overflows" if np.isfinite(part).all() else "is NaN or infinite, in"
                    raise ValueError(f"{name} {what} {dtype}; nothing was written")
                file.write(np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data)


def _parts(tensor: np.ndarray) -> Iterator[np.ndarray]:
    rows = tensor.reshape(len(tensor), -1)
    step = max(1, _ROW_BYTES // max(rows[:1].nbytes, 1))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _write_json(path: Path, entry: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entry, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
