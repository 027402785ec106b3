"""What a router must know of an adapter's data: second moments of layer inputs, small to ship.

While an adapter is trained its owner sums, for every layer, over the adapter's own tokens,

    G = Σ_n [φ_n, 1]ᵀ[φ_n, 1]    (m+1, m+1),   φ = x̂·P,   x̂ = hidden / rms(hidden),

with one projection P (D, m) for everybody, drawn from a fixed seed, so that it need not be shipped.
The last row of G is Σφ and its corner the number of tokens. That is all that a ridge regression on
those tokens needs: whoever loads several adapters adds up what came with them and solves for the
router that all the data together would give (`closed_form.solve_ridge`), without seeing any of it.

Sums keep no order of tokens. But layer 0 reads bare embeddings, so that of fewer distinct tokens
than features one could tell which they were: gather over much text, or over text that may be known.

Letters beyond the table of design.md: m features, E = m + 1.
"""

import functools
import hashlib
from pathlib import Path

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float
from safetensors.numpy import save as safetensors_bytes

from molora_jax.files import read_safetensors

STATISTICS_FILE = "router_statistics.safetensors"
_FORMAT = "1"


class RouterStatistics:
    """G (L, E, E) in float64 of one adapter; it adds up over batches and over adapters alike.

    num_features  m; None: all D channels, P is the identity
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


def save_statistics(
    statistics: RouterStatistics, folder: Path | str, *, base_digest: str, adapter_digest: str
) -> Path:
    """Writes STATISTICS_FILE into an adapter's folder, where PEFT's readers pass over it.

    Means and standard deviations in float32, correlations in float16: L·m²/2 numbers of 2 bytes,
    which are all between −1 and 1 and so lose no more than 5e-4 each.

    Raises ValueError for statistics without a token.
    """
    if not statistics.count:
        raise ValueError("these statistics hold no token: gather them before saving")
    mean = statistics.moments / statistics.count
    center, second = mean[:, -1, :-1], mean[:, :-1, :-1]
    covariance = second - center[:, :, None] * center[:, None, :]
    deviation = np.sqrt(np.maximum(np.diagonal(covariance, axis1=1, axis2=2), 0.0))
    scale = np.where(deviation > 0, deviation, 1.0)
    correlation = covariance / (scale[:, :, None] * scale[:, None, :])
    below = np.tril_indices(correlation.shape[1], k=-1)
    arrays = {
        "mean": center.astype(np.float32),
        "deviation": deviation.astype(np.float32),
        "correlation": correlation[:, below[0], below[1]].astype(np.float16),
    }
    metadata = {
        "format": _FORMAT,
        "count": str(statistics.count),
        "d_model": str(statistics.d_model),
        "num_features": str(statistics.num_features or 0),
        "base": base_digest,
        "adapter": adapter_digest,
    }
    path = Path(folder) / STATISTICS_FILE
    # safetensors writes buffers as they lie, whatever the strides, and picking leaves odd ones.
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    path.write_bytes(safetensors_bytes(arrays, metadata=metadata))
    return path


def load_statistics(
    folder: Path | str, *, base_digest: str, adapter_digest: str
) -> RouterStatistics:
    """Reads what `save_statistics` wrote.

    Raises FileNotFoundError where there is none, and ValueError where it is damaged, of another
    base (its features mean something else there) or of another adapter.
    """
    path = Path(folder) / STATISTICS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {STATISTICS_FILE}: this adapter came without statistics. Gather them "
            "with gather_statistics on some of its own data"
        )
    stored = read_safetensors(path, where=str(path), root=folder)
    about = stored.metadata or {}
    for field, expected in {
        "format": _FORMAT,
        "base": base_digest,
        "adapter": adapter_digest,
    }.items():
        if about.get(field) != expected:
            raise ValueError(
                f"{path}: {field} is {str(about.get(field))[:12]!r}, expected {expected[:12]!r}: "
                f"these statistics belong to another {field}. Gather them anew"
            )
    try:
        count, D, m = (int(about[name]) for name in ("count", "d_model", "num_features"))
        mean, deviation, correlation = (
            stored.get(name).astype(np.float64) for name in ("mean", "deviation", "correlation")
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): copy it again") from None
    size = m or D
    shapes = (len(mean), size), (len(mean), size), (len(mean), size * (size - 1) // 2)
    if count < 1 or (mean.shape, deviation.shape, correlation.shape) != shapes:
        raise ValueError(
            f"{path} is damaged: arrays of shapes {mean.shape}, {deviation.shape} and "
            f"{correlation.shape} over {count} tokens; expected {shapes}. Copy it again"
        )
    sound = np.isfinite(mean).all() and (deviation >= 0).all() and np.isfinite(deviation).all()
    if not (sound and (np.abs(correlation) <= 1.001).all()):
        raise ValueError(
            f"{path} has numbers that no data give (NaN, a correlation over 1 or a negative "
            "deviation): gather the statistics anew"
        )
    found = RouterStatistics(len(mean), D, num_features=m or None)
    below = np.tril_indices(size, k=-1)
    matrix = np.zeros((len(mean), size, size))
    matrix[:, below[0], below[1]] = correlation
    matrix += np.swapaxes(matrix, 1, 2) + np.eye(size)
    second = matrix * deviation[:, :, None] * deviation[:, None, :]
    found.moments[:, :-1, :-1] = second + mean[:, :, None] * mean[:, None, :]
    found.moments[:, -1, :-1] = found.moments[:, :-1, -1] = mean
    found.moments[:, -1, -1] = 1.0
    found.moments *= count
    return found


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
