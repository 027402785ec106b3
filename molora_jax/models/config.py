"""The numbers that define a decoder, read from a Hugging Face config.json or from GGUF metadata.

One decoder serves Llama, Mistral, Qwen2 and Qwen3, which differ in biases, q/k norms and head
size. A configuration that asks for another function (a sliding window in use, another activation,
experts) is refused here by name, because wrong numbers would still look like text.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from molora_jax.files import one_line
from molora_jax.models import rope
from molora_jax.models.fields import check_gguf_fields, check_hf_fields
from molora_jax.models.rope import RopeScaling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Values that a config.json may leave out, as the model type's own defaults in transformers.
_HF_DEFAULTS = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
}
_REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder. Hashable, so it can be a static argument of `jax.jit`.

    `qkv_bias`, `o_bias`, `mlp_bias` say which projections add a bias; `qk_norm` whether each head's
    query and key are RMS-normalised (Qwen3); `max_positions` is the context length in tokens.

        >>> base.config.projection_sizes()["down_proj"]  # (D, F)
        (128, 64)
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.model_type not in FAMILIES:
            raise ValueError(
                f"model_type {self.model_type!r} is not supported: this decoder computes "
                f"{', '.join(FAMILIES)}. Convert the model to one of them or choose another base."
            )
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_positions"):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ValueError(f"ModelConfig.{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig.num_heads {self.num_heads} must be a multiple of num_kv_heads "
                f"{self.num_kv_heads}: every key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                "ModelConfig.head_dim must be even (rotary embedding turns pairs), "
                f"got {self.head_dim}"
            )
        for name in ("rms_norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < 1e30:  # what float32 holds
                raise ValueError(
                    f"ModelConfig.{name} must be positive, got {getattr(self, name)!r}"
                )
        # Far above any model's, so that a damaged number asks for no tables of gigabytes.
        for name, most in (("num_layers", 4096), ("head_dim", 65536), ("num_heads", 65536)):
            if getattr(self, name) > most:
                raise ValueError(
                    f"ModelConfig.{name} must be at most {most}, got {getattr(self, name)}"
                )
        frequencies, factor = rope_frequencies(self)  # refuses factors that do not fit head_dim
        if not (np.isfinite(frequencies).all() and np.isfinite(factor)):
            raise ValueError(
                f"ModelConfig: rope_theta {self.rope_theta} and its scaling give frequencies that "
                "are not finite"
            )

    def projection_sizes(self) -> dict[str, tuple[int, int]]:
        """Input and output width (D, F) of the seven adaptable projections."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden_size, query),
            "k_proj": (self.hidden_size, key),
            "v_proj": (self.hidden_size, key),
            "o_proj": (query, self.hidden_size),
            "gate_proj": (self.hidden_size, self.intermediate_size),
            "up_proj": (self.hidden_size, self.intermediate_size),
            "down_proj": (self.intermediate_size, self.hidden_size),
        }

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Reads a config.json; `generation` is generation_config.json: its end tokens are added."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(
                f"config.json: model_type {one_line(repr(family))} is not supported; "
                f"known are {', '.join(FAMILIES)}"
            )
        check_hf_fields(config, generation or {})

        def read(key: str, default: Any = _REQUIRED) -> Any:
            value = config.get(key, _HF_DEFAULTS[family].get(key, default))
            if value is _REQUIRED:
                raise ValueError(
                    f"config.json: {key!r} is missing and {family} has no default for it"
                )
            return value

        heads, layers = read("num_attention_heads"), read("num_hidden_layers")
        max_positions = read("max_position_embeddings")
        _refuse_other_functions(config, family, read("sliding_window", None), layers, max_positions)
        rope_entry = _rope_entry(config)
        scaling = RopeScaling.from_hf(rope_entry, max_positions=max_positions)
        bias = bool(read("attention_bias", False)) and family in ("llama", "qwen3")
        ends = [read("eos_token_id", None), (generation or {}).get("eos_token_id")]
        return cls(
            model_type=family,
            vocab_size=read("vocab_size"),
            hidden_size=read("hidden_size"),
            intermediate_size=read("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read("num_key_value_heads", heads if family == "llama" else _REQUIRED)
            or heads,
            head_dim=read("head_dim", None) or read("hidden_size") // heads,
            rms_norm_eps=float(read("rms_norm_eps", 1e-6)),
            rope_theta=float(rope_entry.get("rope_theta", read("rope_theta", 10000.0))),
            rope_scaling=scaling,
            tie_word_embeddings=bool(read("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=bool(read("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            # Beyond, a longrope model has other frequencies: the decoder refuses longer texts.
            max_positions=min(max_positions, scaling.original_max_positions)
            if scaling is not None and scaling.kind == "longrope"
            else max_positions,
            bos_id=read("bos_token_id", None),
            eos_ids=_unique_ids(ends),
        )

    @classmethod
    def from_gguf(
        cls,
        fields: Mapping[str, Any],
        tensors: Mapping[str, Iterable[int]],
        *,
        rope_factors: tuple[float, ...] = (),
    ) -> "ModelConfig":
        """Reads GGUF metadata.

        `tensors` maps tensor names to shapes (out, in): what the metadata leaves unsaid (tied
        output, biases, vocabulary) is there to see. `rope_factors` is the tensor rope_freqs.weight.
        """
        arch = fields.get("general.architecture")
        if arch not in FAMILIES:
            raise ValueError(
                f"GGUF: general.architecture {one_line(repr(arch))} is not supported; "
                f"known are {', '.join(FAMILIES)}"
            )
        check_gguf_fields(fields, arch)

        def read(key: str, default: Any = _REQUIRED) -> Any:
            value = fields.get(f"{arch}.{key}", default)
            if value is _REQUIRED:
                raise ValueError(f"GGUF: the metadata key '{arch}.{key}' is missing")
            return value

        max_positions, heads = read("context_length"), read("attention.head_count")
        embedding = tuple(tensors.get("token_embd.weight", ()))
        if len(embedding) != 2:
            raise ValueError("GGUF: the tensor 'token_embd.weight' (vocabulary, width) is missing")
        vocab_size, hidden_size = embedding
        head_dim = read("attention.key_length", hidden_size // heads)
        window = read("attention.sliding_window", 0)
        for problem, found in {
            "experts (expert_count)": read("expert_count", 0),
            f"a sliding window of {window} tokens": 0 < window < max_positions,
            "rotary embedding on a part of the head": read("rope.dimension_count", head_dim)
            != head_dim,
            "values of another size than keys": read("attention.value_length", head_dim)
            != head_dim,
        }.items():
            if found:
                raise ValueError(f"GGUF: this {arch} model has {problem}, which is not supported")
        end = fields.get("tokenizer.ggml.eos_token_id")
        turn_end = fields.get("tokenizer.ggml.eot_token_id")
        return cls(
            model_type=arch,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=read("feed_forward_length"),
            num_layers=read("block_count"),
            num_heads=heads,
            num_kv_heads=read("attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=float(read("attention.layer_norm_rms_epsilon")),
            rope_theta=float(read("rope.freq_base", 10000.0)),
            rope_scaling=_gguf_rope(read, max_positions, rope_factors),
            tie_word_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            max_positions=max_positions,
            bos_id=fields.get("tokenizer.ggml.bos_token_id"),
            eos_ids=_unique_ids([end, turn_end]),
        )


def rope_frequencies(config: ModelConfig) -> tuple[Float[np.ndarray, "half"], float]:
    """`rope.rope_frequencies` of the model: radians per position, and the factor on cos and sin."""
    return rope.rope_frequencies(
        head_dim=config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling
    )


def _unique_ids(entries: Iterable[int | list[int] | None]) -> tuple[int, ...]:
    flat = []
    for entry in entries:
        flat += entry if isinstance(entry, list | tuple) else [entry]
    return tuple(dict.fromkeys(int(token) for token in flat if token is not None))


def _rope_entry(config: Mapping[str, Any]) -> dict[str, Any]:
    """The older `rope_scaling` or the newer `rope_parameters`; both, only where they agree."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(
                f"config.json: {key} is {one_line(repr(value))}; expected an object or null"
            )
    if old and new:
        kinds = [each.get("rope_type", each.get("type", "default")) for each in (old, new)]
        other = [key for key in {*old} & {*new} - {"rope_type", "type"} if old[key] != new[key]]
        if kinds[0] != kinds[1] or other:
            raise ValueError(
                f"config.json: rope_scaling {one_line(repr(old))} and rope_parameters "
                f"{one_line(repr(new))} contradict each other; readers differ in which of them "
                "counts. Keep the one that is right"
            )
    entry = {**(old or {}), **(new or {})}
    # Phi's place for it, which transformers prefers.
    if (original := config.get("original_max_position_embeddings")) is not None:
        entry["original_max_position_embeddings"] = original
    return entry


def _gguf_rope(read, max_positions: int, factors: tuple[float, ...]) -> RopeScaling | None:
    kind = read("rope.scaling.type", "none")
    if factors:
        if kind not in ("none", "linear"):
            raise ValueError(f"GGUF: rope scaling {kind!r} together with rope_freqs.weight")
        return RopeScaling(kind="factors", factors=factors)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"GGUF: rope scaling {kind!r} is not supported; known are none, linear and yarn"
        )
    if read("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ValueError("GGUF: rope.scaling.attn_factor other than 1 is not supported")
    return RopeScaling(
        kind=kind,
        factor=float(read("rope.scaling.factor", 1.0)),
        original_max_positions=read("rope.scaling.original_context_length", max_positions),
    )


def _refuse_other_functions(
    config: Mapping[str, Any], family: str, window: int | None, layers: int, max_positions: int
) -> None:
    """Raises where the configuration asks for something else than this decoder computes."""
    # Qwen files carry a window that is off, or that begins behind the last layer.
    slides = config.get("use_sliding_window") and config.get("max_window_layers", 28) < layers
    if family != "mistral" and not (family.startswith("qwen") and slides):
        window = None
    kinds = set(config.get("layer_types") or ())
    scaling = _rope_entry(config)
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    problems = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "sliding_window": window is not None and window < max_positions,
        "layer_types": bool(kinds - {"full_attention"}),
        "partial_rotary_factor": partial not in (None, 1, 1.0),
        "is_causal": config.get("is_causal") is False,
        "quantization_config": bool(config.get("quantization_config")),
        "num_experts": bool(config.get("num_experts") or config.get("num_local_experts")),
        "pretraining_tp": config.get("pretraining_tp", 1) != 1,
    }
    for key, wrong in problems.items():
        if wrong:
            seen = {"sliding_window": window, "partial_rotary_factor": partial}
            raise ValueError(
                f"config.json: {key} = {seen.get(key, config.get(key))!r} makes this {family} "
                "model compute something that the decoder does not: it has full causal attention, "
                "SiLU and full rotary embedding, in unquantised weights. Choose a base without it "
                "(for quantised weights, a GGUF file)."
            )
