"""Rotary embedding: the frequency of every pair of channels, with the scalings for long contexts.

Linear is https://arxiv.org/abs/2306.15595, YaRN https://arxiv.org/abs/2309.00071, LongRoPE
https://arxiv.org/abs/2402.13753, llama3 the rule that Llama 3.1 was trained with. A "dynamic" or
"longrope" model changes its frequencies with the length of the text; it runs here within the
context that its first table serves, and the decoder refuses longer texts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float

from molora_jax.files import one_line

KINDS = ("linear", "llama3", "yarn", "factors", "dynamic", "longrope")
# What transformers requires of each `rope_type` too; the original context falls back to the whole.
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor",),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the frequencies differ from theta^(-2i/Dh).

    `kind` is "linear" (all divided by `factor`), "llama3" and "yarn" (long waves divided by
    `factor`, short ones kept, a ramp between), "factors" (each divided by its own number, which is
    how GGUF files carry llama3), "longrope" (the same with the numbers for short texts, those of up
    to `original_max_positions` tokens), or "dynamic" (not at all, up to the model's context).
    `attention_factor` multiplies cos and sin; None is the rule of the YaRN or LongRoPE paper.
    """

    kind: str
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"rope scaling {one_line(repr(self.kind))} is not supported; known are "
                f"{', '.join(KINDS)}. Set rope_scaling to null to run the model within its "
                "original context."
            )
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor must be positive, got {self.factor}")
        if self.kind in ("llama3", "yarn", "longrope") and not self.original_max_positions > 1:
            raise ValueError(
                f"rope scaling {self.kind!r} needs original_max_position_embeddings, the context "
                "length before scaling; it is missing from the model's configuration"
            )
        if not (self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError(
                "rope scaling: beta_fast and beta_slow must be positive, got "
                f"{self.beta_fast} and {self.beta_slow}"
            )
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"rope scaling 'llama3' needs high_freq_factor > low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )
        if self.kind in ("factors", "longrope") and not (self.factors and min(self.factors) > 0):
            raise ValueError(
                f"rope scaling {self.kind!r} needs one positive number per channel pair"
            )

    @classmethod
    def from_hf(cls, entry: Mapping[str, Any], *, max_positions: int) -> "RopeScaling | None":
        """Reads `rope_scaling` or `rope_parameters` of a config.json; None where nothing scales.

        `max_positions` is the model's context. Of a "longrope" entry the numbers for short texts
        are read: the caller holds the context to `original_max_positions`.
        """
        nested = [key for key, value in entry.items() if isinstance(value, Mapping)]
        if nested:
            raise ValueError(
                f"config.json: rope_parameters has entries of their own for {', '.join(nested)}; "
                "only one scaling for all layers is supported. Choose a base without it"
            )
        kind = entry.get("rope_type", entry.get("type", "default"))
        if not isinstance(kind, str):
            raise ValueError(f"config.json: rope_type is {one_line(repr(kind))}; expected a name")
        if kind == "default":
            return None
        # YaRN takes its factor from the two contexts where it is null.
        missing = [
            key
            for key in _REQUIRED.get(kind, ())
            if (key not in entry if kind == "yarn" else entry.get(key) is None)
        ]
        if missing:
            raise ValueError(
                f"config.json: the rope scaling {kind!r} lacks {', '.join(missing)}; take the "
                "model's own config.json, complete"
            )
        original = int(_number(entry, "original_max_position_embeddings", max_positions))
        factor = _number(entry, "factor", 1.0)
        attention = None
        if kind in ("yarn", "longrope"):  # the others have none in transformers either
            attention = _number(entry, "attention_factor", None)
            if entry.get("factor") is None:
                factor = max_positions / max(original, 1)
        if kind == "yarn" and attention is None:
            mscales = [_number(entry, key, 0.0) for key in ("mscale", "mscale_all_dim")]  # DeepSeek
            if all(mscales):
                high, low = (1 + 0.1 * m * math.log(max(factor, 1.0)) for m in mscales)
                attention = high / low
        if kind in ("dynamic", "longrope"):
            logging.info(
                "config.json: rope scaling %r: texts of up to %d tokens, which need no scaling; "
                "longer ones, for which the model would change its frequencies, are refused",
                kind,
                min(original, max_positions) if kind == "longrope" else max_positions,
            )
        return cls(
            kind=kind,
            factor=factor,
            original_max_positions=original,
            low_freq_factor=_number(entry, "low_freq_factor", 1.0),
            high_freq_factor=_number(entry, "high_freq_factor", 4.0),
            # As transformers: 0 is the default too, and null is a "no" to truncation.
            beta_fast=_number(entry, "beta_fast", 32.0) or 32.0,
            beta_slow=_number(entry, "beta_slow", 1.0) or 1.0,
            truncate=bool(entry.get("truncate", True)),
            attention_factor=attention,
            factors=_numbers(entry, "short_factor") if kind == "longrope" else (),
        )


def _number(entry: Mapping[str, Any], key: str, default: Any) -> Any:
    """A number of the entry as a float; the default where it is absent or null."""
    value = entry.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"config.json: {key} of the rope scaling is {one_line(repr(value))}; expected a number"
        )
    return float(value)


def _numbers(entry: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = entry[key]
    if not isinstance(values, list | tuple):
        raise ValueError(
            f"config.json: {key} of the rope scaling is {one_line(repr(values))}; expected a list "
            "of numbers, one per channel pair"
        )
    return tuple(_number({key: value}, key, 0.0) for value in values)


def rope_frequencies(
    *, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[np.ndarray, "half"], float]:
    """Radians per position of each channel pair (i, i + Dh/2), and the factor on cos and sin.

    freq_i = theta^(-2i/Dh), then scaled as `RopeScaling` says. Computed in float64: at position
    100,000 one unit in the last place of a float32 frequency is already a hundredth of a radian.
    """
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    attention_factor = 1.0
    if scaling is None or scaling.kind == "dynamic":
        pass
    elif scaling.kind == "linear":
        freq = freq / scaling.factor
    elif scaling.kind in ("factors", "longrope"):
        if len(scaling.factors) != head_dim // 2:
            raise ValueError(
                f"rope factors: {len(scaling.factors)} numbers for head_dim {head_dim}, "
                f"expected {head_dim // 2}"
            )
        freq = freq / np.asarray(scaling.factors)
        if scaling.kind == "longrope" and scaling.factor > 1.0:
            ratio = math.log(scaling.factor) / math.log(scaling.original_max_positions)
            attention_factor = math.sqrt(1.0 + ratio)
    elif scaling.kind == "llama3":
        # Turns that a pair makes over the original context: few -> stretch, many -> keep.
        turns = scaling.original_max_positions * freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        freq = freq * keep + freq / scaling.factor * (1 - keep)
    else:
        freq = freq * _yarn_ramp(head_dim, theta, scaling)
        attention_factor = 1.0 + 0.1 * math.log(max(scaling.factor, 1.0))
    if scaling is not None and scaling.attention_factor is not None:
        attention_factor = scaling.attention_factor
    return freq.astype(np.float32), attention_factor


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> Float[np.ndarray, "half"]:
    """1 where a pair turns beta_fast times in the original context, 1/factor below beta_slow."""

    if theta == 1.0:
        raise ValueError("rope scaling 'yarn' needs a rope_theta other than 1, which turns nothing")

    def pair_with(turns: float) -> float:
        waves = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # In extreme settings high < low and the ramp turns round; transformers computes it the same.
    width = high - low or 1e-3
    stretch = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return stretch / scaling.factor + (1 - stretch)
