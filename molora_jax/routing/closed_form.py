"""A router without gradients: ridge regression on layer inputs, from sums that travel and add up.

For every adapter c and layer l the statistics are the second moments of its own tokens,

    G[c, l] = Σ_n [x̂_n, 1]ᵀ[x̂_n, 1]    (D+1, D+1),   x̂ = hidden / rms(hidden),

which hold all that the regression needs: the last column of G[c] is XᵀY for the one-hot target c,
and its corner the number of tokens. They add over batches, and adapters gathered apart are joined,
so a router for any set of adapters is solved without seeing their data again.

The target is the adapter whose own data a token came from: whoever uses a router made here says
so beside the result.
"""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

_TEMPERATURES = (1e-2, 1e2)


class RidgeStatistics:
    """G (C, L, D+1, D+1) in float64: 8·C·L·(D+1)² bytes, 320 MB for four adapters of SmolLM2."""

    def __init__(self, num_columns: int, num_layers: int, d_model: int):
        self.gram = np.zeros((num_columns, num_layers, d_model + 1, d_model + 1))

    @property
    def counts(self) -> Float[np.ndarray, " C"]:
        """Tokens of each column."""
        return self.gram[:, 0, -1, -1]

    def add(
        self,
        layer_inputs: Float[ArrayLike, "L B S D"],
        labels: Int[ArrayLike, "B S"],
        mask: Bool[ArrayLike, "B S"],
    ) -> None:
        """Adds the real tokens that have a label (≥ 0) and are finite in every layer."""
        features, labels = select_tokens(layer_inputs, labels, mask)
        C, L, E, _ = self.gram.shape
        if features.shape[0] != L or features.shape[2] != E - 1:
            raise ValueError(
                f"layer_inputs has shape {np.shape(layer_inputs)}, but these statistics are of "
                f"{L} layers and width {E - 1}: expected (L, B, S, D)"
            )
        if labels.size and labels.max() >= C:
            raise ValueError(f"label {labels.max()} has no column: the statistics have {C} columns")
        for column in np.unique(labels):
            own = features[:, labels == column]
            for layer, x in enumerate(own):
                extended = np.concatenate([x, np.ones((len(x), 1), x.dtype)], axis=1)
                # The same buffer on both sides: BLAS then computes one triangle only.
                self.gram[column, layer] += extended.T @ extended

    def __add__(self, other: "RidgeStatistics") -> "RidgeStatistics":
        """The same columns over the tokens of both."""
        return _from_gram(self.gram + other.gram)

    @staticmethod
    def join(parts: Sequence["RidgeStatistics"]) -> "RidgeStatistics":
        """The columns of all parts, one after the other: adapters whose data was read apart."""
        return _from_gram(np.concatenate([part.gram for part in parts]))


def _from_gram(gram: np.ndarray) -> RidgeStatistics:
    statistics = RidgeStatistics(0, 0, 0)
    statistics.gram = gram
    return statistics


def solve_ridge(
    statistics: RidgeStatistics, *, ridge: float = 1e-2, balance: bool = True
) -> tuple[Float[np.ndarray, "L D C"], Float[np.ndarray, "L C"]]:
    """argmin_W Σ_n w_n ‖x̂_n·W + b − onehot_n‖² + λ‖W‖² for each layer, in float64.

    λ is `ridge` times the mean square of a feature, so it has no unit; the bias is not penalised.
    With `balance` every adapter weighs the same however many tokens it brought; without it every
    token does. The scores are estimates of a probability, not logits: see `calibrate`.
    """
    counts = statistics.counts
    if not (counts > 0).all():
        column = int(np.flatnonzero(counts <= 0)[0])
        raise ValueError(
            f"column {column} has no token in the statistics: every adapter needs some of its own "
            "data before a router can be solved"
        )
    C, L, E, _ = statistics.gram.shape
    share = 1.0 / (C * counts) if balance else np.full(C, 1.0 / counts.sum())
    weights, bias = np.empty((L, E - 1, C)), np.empty((L, C))
    for layer in range(L):
        own = statistics.gram[:, layer] * share[:, None, None]
        total = own.sum(axis=0)
        penalty = np.full(E, ridge * np.diag(total)[:-1].mean())
        penalty[-1] = 0.0
        solution = np.linalg.solve(total + np.diag(penalty), own[:, :, -1].T)
        weights[layer], bias[layer] = solution[:-1], solution[-1]
    return weights, bias


def calibrate(
    weights: Float[np.ndarray, "L D C"],
    bias: Float[np.ndarray, "L C"],
    features: Float[ArrayLike, "L M D"],
    labels: Int[ArrayLike, " M"],
) -> tuple[Float[np.ndarray, "L D C"], Float[np.ndarray, "L C"], Float[np.ndarray, " L"]]:
    """Turns scores into logits: weights·T and bias·T, with one temperature T per layer.

    Ridge scores lie mostly within 0..1, and softmax of such numbers is nearly uniform whatever the
    evidence. One factor per layer leaves every order of adapters, and so every top-k, as it was,
    and sets only how sharp the gates are; it is the T with the least cross-entropy against labels.
    That is convex in T, so bisection on its slope finds it, within 0.01..100.

    features, labels  from `select_tokens`; best of data that the statistics have not seen
    """
    x, labels = normalize(features), np.asarray(labels)
    scores = np.matmul(x, weights) + bias[:, None, :]
    at_label = np.take_along_axis(scores, labels[None, :, None], axis=2)[..., 0]
    low, high = (np.full(len(scores), np.log(t)) for t in _TEMPERATURES)
    for _ in range(30):
        middle = (low + high) / 2
        logits = np.exp(middle)[:, None, None] * scores
        p = np.exp(logits - logits.max(axis=2, keepdims=True))
        p /= p.sum(axis=2, keepdims=True)
        too_sharp = ((p * scores).sum(axis=2) - at_label).mean(axis=1) > 0
        low, high = np.where(too_sharp, low, middle), np.where(too_sharp, middle, high)
    temperature = np.exp((low + high) / 2)
    return weights * temperature[:, None, None], bias * temperature[:, None], temperature


def select_tokens(
    layer_inputs: Float[ArrayLike, "L B S D"],
    labels: Int[ArrayLike, "B S"],
    mask: Bool[ArrayLike, "B S"],
) -> tuple[Float[np.ndarray, "L M D"], Int[np.ndarray, " M"]]:
    """Normalised features and labels of the real tokens with a label, finite in every layer."""
    inputs = np.asarray(layer_inputs)
    flat = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
    labels = np.ravel(labels)
    kept = np.ravel(mask).astype(bool) & (labels >= 0)
    features, labels = normalize(flat[:, kept]), labels[kept]
    finite = np.isfinite(features).all(axis=(0, 2))
    return (features, labels) if finite.all() else (features[:, finite], labels[finite])


def normalize(features: Float[ArrayLike, "*n D"]) -> Float[np.ndarray, "*n D"]:
    """`rms_normalize` on the host."""
    x = np.asarray(features, np.float32)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
