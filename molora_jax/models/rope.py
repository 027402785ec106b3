"""Rotary embedding: the frequency of every pair of channels, with the scalings for long contexts.

Linear is https://arxiv.org/abs/2306.15595, YaRN https://arxiv.org/abs/2309.00071, llama3 the rule
that Llama 3.1 was trained with. A "dynamic" or "longrope" model changes its frequencies with the
length of the text, so one table cannot serve it, and it is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

KINDS = ("linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the frequencies differ from theta^(-2i/Dh).

    `kind` is "linear" (all divided by `factor`), "llama3" and "yarn" (long waves divided by
    `factor`, short ones kept, a ramp between), or "factors" (each divided by its own number, which
    is how GGUF files carry llama3). `attention_factor` multiplies cos and sin; None is the rule of
    the YaRN paper.
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
                f"rope scaling {self.kind!r} is not supported; known are {', '.join(KINDS)}. "
                "Set rope_scaling to null to run the model within its original context."
            )
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor must be positive, got {self.factor}")
        if self.kind in ("llama3", "yarn") and not self.original_max_positions:
            raise ValueError(
                f"rope scaling {self.kind!r} needs original_max_position_embeddings, the context "
                "length before scaling; it is missing from the model's configuration"
            )
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"rope scaling 'llama3' needs high_freq_factor > low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )
        if self.kind == "factors" and not (self.factors and min(self.factors) > 0):
            raise ValueError("rope scaling 'factors' needs one positive number per channel pair")

    @classmethod
    def from_hf(cls, entry: Mapping[str, Any], *, max_positions: int) -> "RopeScaling | None":
        """Reads `rope_scaling` or `rope_parameters` of a config.json; None where nothing scales."""
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind == "default":
            return None
        original = entry.get("original_max_position_embeddings") or 0
        attention = entry.get("attention_factor")
        if kind == "yarn":
            # transformers falls back to the stretched context here; the two mscales are DeepSeek's.
            original = original or max_positions
            mscale, mscale_all = entry.get("mscale"), entry.get("mscale_all_dim")
            if attention is None and mscale and mscale_all:
                ratio = [
                    1 + 0.1 * m * math.log(max(entry["factor"], 1)) for m in (mscale, mscale_all)
                ]
                attention = ratio[0] / ratio[1]
        optional: dict[str, Any] = {
            name: entry[name] if name == "truncate" else float(entry[name])
            for name in (
                "low_freq_factor",
                "high_freq_factor",
                "beta_fast",
                "beta_slow",
                "truncate",
            )
            if entry.get(name) is not None
        }
        return cls(
            kind=kind,
            factor=float(entry.get("factor") or 1.0),
            original_max_positions=original,
            attention_factor=None if attention is None else float(attention),
            **optional,
        )


def rope_frequencies(
    *, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[np.ndarray, "half"], float]:
    """Radians per position of each channel pair (i, i + Dh/2), and the factor on cos and sin.

    freq_i = theta^(-2i/Dh), then scaled as `RopeScaling` says. Computed in float64: at position
    100,000 one unit in the last place of a float32 frequency is already a hundredth of a radian.
    """
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    attention_factor = 1.0
    if scaling is None:
        pass
    elif scaling.kind == "linear":
        freq = freq / scaling.factor
    elif scaling.kind == "factors":
        if len(scaling.factors) != head_dim // 2:
            raise ValueError(
                f"rope factors: {len(scaling.factors)} numbers for head_dim {head_dim}, "
                f"expected {head_dim // 2}"
            )
        freq = freq / np.asarray(scaling.factors)
    elif scaling.kind == "llama3":
        # Turns that a pair makes over the original context: few -> stretch, many -> keep.
        turns = scaling.original_max_positions * freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        freq = freq * keep + freq / scaling.factor * (1 - keep)
    else:
        freq = freq * _yarn_ramp(head_dim, theta, scaling)
        attention_factor = 1.0 + 0.1 * math.log(max(scaling.factor, 1.0))
        if scaling.attention_factor is not None:
            attention_factor = scaling.attention_factor
    return freq.astype(np.float32), attention_factor


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> Float[np.ndarray, "half"]:
    """1 where a pair turns beta_fast times in the original context, 1/factor below beta_slow."""

    def pair_with(turns: float) -> float:
        waves = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretch = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return stretch / scaling.factor + (1 - stretch)
