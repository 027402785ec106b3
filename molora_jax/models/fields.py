"""Types of the fields that a config.json and GGUF metadata give a decoder, checked before use.

Without the check "64" for 64 would end in an error from inside numpy, and "false" would be true.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from molora_jax.files import one_line

MAX_SIZE = 2**31 - 1  # token ids and positions are int32


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_SIZE


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_ids(value: Any) -> bool:
    return _is_id(value) or (isinstance(value, list) and all(map(_is_id, value)))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "size": (lambda value: _is_id(value) and value > 0, f"a whole number from 1 to {MAX_SIZE}"),
    "count": (_is_id, f"a whole number from 0 to {MAX_SIZE}"),
    "number": (_is_number, "a finite number"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "ids": (_is_ids, "a token id or a list of them"),
    "id": (_is_id, "a token id"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "texts": (_is_texts, "a list of texts"),
}
_HF = {
    "size": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings",
    "count": "sliding_window max_window_layers",
    "number": "rms_norm_eps rope_theta partial_rotary_factor",
    "flag": "attention_bias mlp_bias tie_word_embeddings use_sliding_window is_causal",
    "id": "bos_token_id",
    "ids": "eos_token_id",
    "text": "hidden_act",
    "texts": "layer_types",
}
_HF_ROPE = {
    "number": "rope_theta partial_rotary_factor",
    "flag": "truncate",
    "text": "type rope_type",
}
# A null stands for the default in every other field.
_HF_NOT_NULL = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "max_position_embeddings rms_norm_eps rope_theta"
)
_GGUF = {
    "size": "context_length attention.head_count attention.head_count_kv attention.key_length "
    "attention.value_length rope.dimension_count feed_forward_length block_count "
    "rope.scaling.original_context_length",
    "count": "attention.sliding_window expert_count",
    "number": "attention.layer_norm_rms_epsilon rope.freq_base rope.scaling.factor "
    "rope.scaling.attn_factor",
    "text": "rope.scaling.type",
}
_GGUF_TOKENIZER = {"id": "bos_token_id eos_token_id eot_token_id"}


def check_hf_fields(config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """ValueError for a field of config.json (or generation_config.json) with a wrong type."""
    _check(config, _HF, "config.json: ", not_null=_HF_NOT_NULL)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(entry := config.get(name), Mapping):
            _check(entry, _HF_ROPE, f"config.json: {name}.", not_null="rope_theta")
    _check(generation, {"ids": "eos_token_id"}, "generation_config.json: ")


def check_gguf_fields(fields: Mapping[str, Any], arch: str) -> None:
    """ValueError for a metadata key of the architecture with a wrong type."""
    _check(fields, _GGUF, "GGUF: ", prefix=f"{arch}.")
    _check(fields, _GGUF_TOKENIZER, "GGUF: ", prefix="tokenizer.ggml.")


def _check(
    fields: Mapping[str, Any],
    kinds: Mapping[str, str],
    where: str,
    *,
    prefix: str = "",
    not_null: str = "",
) -> None:
    for kind, names in kinds.items():
        fits, expected = _KINDS[kind]
        for name in names.split():
            key = prefix + name
            if key not in fields or (fields[key] is None and name not in not_null.split()):
                continue
            if not fits(fields[key]):
                found = one_line(repr(fields[key]))
                raise ValueError(f"{where}{key} is {found}; expected {expected}")
