"""What a router must know of an adapter's data: second moments of layer inputs, small to ship.

While an adapter is trained its owner sums, for every layer, over the adapter's own tokens,

    G = Σ_n [φ_n, 1]ᵀ[φ_n, 1]    (m+1, m+1),   φ = x̂·P,   x̂ = hidden / rms(hidden),

with one projection P (D, m) for everybody, drawn from a fixed seed, so that it need not be shipped.
The last row of G is Σφ and its corner the number of tokens. That is all that a ridge regression on
those tokens needs: whoever loads several adapters adds up what came with them and solves for the
router that all the data together would give (`closed_form.solve_ridge`), without seeing any of it.
`statistics_file` is how they travel.

Sums keep no order of tokens. But layer 0 reads bare embeddings, so that of fewer distinct tokens
than features one could tell which they were: gather over much text, or over text that may be known.

Letters beyond the table of design.md: m features, E = m + 1.
"""

import functools
import hashlib

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float


class RouterStatistics:
    """G (L, E, E) in float64 of one adapter; it adds up over batches and over adapters alike.

    num_features  m; None: all D channels, P is the identity

        >>> statistics = mj.RouterStatistics(4, 64, num_features=8)
        >>> statistics.add(np.ones((4, 2, 16, 64)), np.ones((2, 16), bool))  # (L, B, S, D), (B, S)
        >>> statistics.count, statistics.moments.shape
        (32, (4, 9, 9))
    """

    def __init__(self, num_layers: int, d_model: int, *, num_features: int | None = None):
        if num_features is not None and not 0 < num_features < d_model:
            raise ValueError(
                f"num_features {num_features} is not a number from 1 to {d_model - 1}; None keeps "
                f"all {d_model} channels"
            )
        self.d_model, self.num_features = d_model, num_features
        E = 1 + (d_model if num_features is None else num_features)
        self.moments = np.zeros((num_layers, E, E))

    @property
    def count(self) -> int:
        """Tokens that were added."""
        return round(float(self.moments[0, -1, -1]))

    @property
    def projection(self) -> Float[np.ndarray, "D m"]:
        """P."""
        return feature_projection(self.d_model, self.num_features)

    @property
    def digest(self) -> str:
        """sha256 of what was summed: by it parts are put in order, whoever hands them over."""
        return hashlib.sha256(self.moments.tobytes()).hexdigest()

    def add(
        self, layer_inputs: Float[ArrayLike, "L B S D"], counted: Bool[ArrayLike, "B S"]
    ) -> None:
        """Adds the counted tokens that are finite in every layer."""
        shape, L = np.shape(layer_inputs), len(self.moments)
        if len(shape) != 4 or (shape[0], shape[3]) != (L, self.d_model):
            raise ValueError(
                f"layer_inputs has shape {shape}, but these statistics are of {L} layers and width "
                f"{self.d_model}: expected (L, B, S, D)"
            )
        if np.shape(counted) != shape[1:3]:
            raise ValueError(
                f"counted has shape {np.shape(counted)}, expected (B, S) = {shape[1:3]} from "
                "layer_inputs"
            )
        features, _ = finite_tokens(layer_inputs, counted)
        for layer, x in enumerate(features):
            if self.num_features is not None:
                x = x @ self.projection
            extended = np.concatenate([x, np.ones((len(x), 1), x.dtype)], axis=1)
            # The same buffer on both sides: BLAS then computes one triangle only.
            self.moments[layer] += extended.T @ extended

    def __add__(self, other: "RouterStatistics") -> "RouterStatistics":
        """Of the tokens of both."""
        self.check_like(other)
        return _of(self, self.moments + other.moments)

    def check_like(self, other: "RouterStatistics") -> None:
        """ValueError where the two are of other layers, widths or features."""
        for what in ("d_model", "num_features"):
            if getattr(self, what) != getattr(other, what):
                raise ValueError(
                    f"statistics with {what} {getattr(self, what)} and {getattr(other, what)} do "
                    "not add up: gather both with the same setting on the same base"
                )
        if len(self.moments) != len(other.moments):
            raise ValueError(
                f"statistics of {len(self.moments)} and {len(other.moments)} layers do not add "
                "up: they are of other bases"
            )


def few_tokens(count: int, size: int) -> str | None:
    """A warning where these are too few tokens for so many features (m, or D)."""
    if count >= 2 * size:
        return None
    return (
        f"router statistics of {count} tokens for {size} features: a router solved from them may "
        "be no better than chance. Gather more text (rows, seq_len), or fewer features"
    )


@functools.lru_cache(maxsize=8)
def feature_projection(d_model: int, num_features: int | None) -> Float[np.ndarray, "D m"]:
    """P: N(0, 1/m), the same for the same sizes on every machine; the identity for None."""
    if num_features is None:
        return np.eye(d_model, dtype=np.float32)
    rng = np.random.default_rng([2603, 15965, d_model, num_features])
    drawn = rng.standard_normal((d_model, num_features)) / np.sqrt(num_features)
    return drawn.astype(np.float32)


def finite_tokens(
    layer_inputs: Float[ArrayLike, "L B S D"], counted: Bool[ArrayLike, "B S"]
) -> tuple[Float[np.ndarray, "L M D"], Bool[np.ndarray, " n"]]:
    """Normalised inputs of the counted tokens that are finite in every layer, and which those are.

    Of the n counted ones, M are.
    """
    inputs = np.asarray(layer_inputs)
    flat = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
    features = normalize(flat[:, np.ravel(counted).astype(bool)])
    finite = np.isfinite(features).all(axis=(0, 2))
    return (features if finite.all() else features[:, finite]), finite


def normalize(features: Float[ArrayLike, "*n D"]) -> Float[np.ndarray, "*n D"]:
    """`rms_normalize` on the host: NaN where x² overflows."""
    x = np.asarray(features, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.where(np.isfinite(square), np.sqrt(square + 1e-6), np.nan)


def _of(like: RouterStatistics, moments: np.ndarray) -> RouterStatistics:
    found = RouterStatistics(len(moments), like.d_model, num_features=like.num_features)
    found.moments = moments
    return found
