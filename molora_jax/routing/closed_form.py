"""A router without gradients: ridge regression on layer inputs, from statistics that add up.

The target is the adapter whose own data a token came from: whoever uses a router made here says
so beside the result.
"""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from molora_jax.routing.statistics import RouterStatistics, finite_tokens, normalize

_TEMPERATURES = (1e-2, 1e2)
_DRAWS = 1000
# A share of tokens that fits another adapter as well: without it, scores that the normal law says
# never overlap would be made as sharp as can be.
_DOUBT = 0.005


def solve_ridge(
    statistics: Sequence[RouterStatistics], *, ridge: float = 1e-2, balance: bool = True
) -> tuple[Float[np.ndarray, "L D C"], Float[np.ndarray, "L C"]]:
    """argmin_W Σ_n w_n ‖φ_n·W + b − onehot_n‖² + λ‖W‖² for each layer, in float64, as P·W and b.

    statistics  of one adapter each, in the order of the columns. They are summed in an order of
                their own, by content, so that the result does not depend on who came first, bit
                for bit
    ridge       λ in units of a feature's mean square; the bias is not penalised
    balance     every adapter weighs the same however many tokens it brought; without it every token
                does

    The scores are estimates of a probability, not logits: see `calibrate`, and `solve_logits`
    where no data is at hand.
    """
    order = _order(statistics, ridge)
    small, bias = _solve([statistics[column] for column in order], ridge=ridge, balance=balance)
    return _columns(statistics[0], small, order), _columns(None, bias, order)


def solve_logits(
    statistics: Sequence[RouterStatistics], *, ridge: float = 1e-2
) -> tuple[Float[np.ndarray, "L D C"], Float[np.ndarray, "L C"]]:
    """`solve_ridge`, and scores made logits without any data (as `calibrate` does with some).

    Of adapter c's tokens the statistics tell mean and covariance of the features, and so those of
    the C scores. The temperature is set on draws from the normal law with these moments.
    """
    order = _order(statistics, ridge)
    ordered = [statistics[column] for column in order]
    small, bias = _solve(ordered, ridge=ridge, balance=True)
    C = len(ordered)
    noise = np.random.default_rng(0).standard_normal((C, _DRAWS, C))
    labels = np.repeat(np.arange(C), _DRAWS)
    temperature = np.empty(len(small))
    for layer, w in enumerate(small):
        scores = np.empty((C, _DRAWS, C))
        for column, own in enumerate(ordered):
            moments = own.moments[layer] / own.count
            mean, second = moments[-1, :-1], moments[:-1, :-1]
            spread = w.T @ (second - np.outer(mean, mean)) @ w
            values, vectors = np.linalg.eigh(spread)
            root = vectors * np.sqrt(np.maximum(values, 0.0))
            scores[column] = mean @ w + bias[layer] + noise[column] @ root.T
        drawn = scores.reshape(1, C * _DRAWS, C)
        temperature[layer] = _temperature(drawn, labels, doubt=_DOUBT)[0]
    weights = _columns(statistics[0], small * temperature[:, None, None], order)
    return weights, _columns(None, bias * temperature[:, None], order)


def _order(statistics: Sequence[RouterStatistics], ridge: float) -> list[int]:
    """The columns by content; ValueError where they do not make one regression."""
    if not 0 < ridge < np.inf:
        raise ValueError(
            f"ridge is {ridge!r}: expected a positive number, in units of a feature's mean square"
        )
    if not statistics:
        raise ValueError("no statistics: a router needs those of one adapter or more")
    for column, each in enumerate(statistics):
        statistics[0].check_like(each)
        if each.count <= 0:
            raise ValueError(
                f"column {column} has no token in the statistics: every adapter needs some of its "
                "own data before a router can be solved"
            )
    digests = [each.digest for each in statistics]
    for column, digest in enumerate(digests):
        if (first := digests.index(digest)) != column:
            raise ValueError(
                f"columns {first} and {column} have the same statistics, so no router could tell "
                "them apart: leave one of the two adapters out"
            )
    return sorted(range(len(statistics)), key=digests.__getitem__)


def _solve(
    ordered: Sequence[RouterStatistics], *, ridge: float, balance: bool
) -> tuple[Float[np.ndarray, "L m C"], Float[np.ndarray, "L C"]]:
    C = len(ordered)
    counts = np.array([each.count for each in ordered])
    share = 1.0 / (C * counts) if balance else np.full(C, 1.0 / counts.sum())
    L, E, _ = ordered[0].moments.shape
    small, bias = np.empty((L, E - 1, C)), np.empty((L, C))
    for layer in range(L):
        own = np.stack([each.moments[layer] * w for each, w in zip(ordered, share, strict=True)])
        total = own.sum(axis=0)
        penalty = np.full(E, ridge * np.diag(total)[:-1].mean())
        penalty[-1] = 0.0
        solution = np.linalg.solve(total + np.diag(penalty), own[:, :, -1].T)
        small[layer], bias[layer] = solution[:-1], solution[-1]
    return small, bias


def _columns(like: RouterStatistics | None, ordered: np.ndarray, order: list[int]) -> np.ndarray:
    """Columns back in the caller's order; weights of features as weights of channels."""
    if like is not None and like.num_features is not None:
        ordered = like.projection.astype(np.float64) @ ordered
    back = np.empty_like(ordered)
    back[..., order] = ordered
    return back


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
    if not labels.size:
        raise ValueError(
            "no labelled token to set the temperature on: give rows that the regression has not "
            "seen, with labels and finite in every layer"
        )
    scores = np.matmul(x, weights) + bias[:, None, :]
    temperature = _temperature(scores, labels)
    return weights * temperature[:, None, None], bias * temperature[:, None], temperature


def _temperature(
    scores: Float[np.ndarray, "L M C"], labels: Int[np.ndarray, " M"], *, doubt: float = 0.0
) -> Float[np.ndarray, " L"]:
    """T of each layer with the least cross-entropy of softmax(T · scores) against labels.

    A share `doubt` of every label is spread over all columns.
    """
    at_label = np.take_along_axis(scores, labels[None, :, None], axis=2)[..., 0]
    at_label = (1 - doubt) * at_label + doubt * scores.mean(axis=2)
    low, high = (np.full(len(scores), np.log(t)) for t in _TEMPERATURES)
    for _ in range(30):
        middle = (low + high) / 2
        logits = np.exp(middle)[:, None, None] * scores
        p = np.exp(logits - logits.max(axis=2, keepdims=True))
        p /= p.sum(axis=2, keepdims=True)
        too_sharp = ((p * scores).sum(axis=2) - at_label).mean(axis=1) > 0
        low, high = np.where(too_sharp, low, middle), np.where(too_sharp, middle, high)
    return np.exp((low + high) / 2)


def select_tokens(
    layer_inputs: Float[ArrayLike, "L B S D"],
    labels: Int[ArrayLike, "B S"],
    mask: Bool[ArrayLike, "B S"],
) -> tuple[Float[np.ndarray, "L M D"], Int[np.ndarray, " M"]]:
    """Normalised features and labels of the real tokens with a label, finite in every layer."""
    counted = np.asarray(mask, bool) & (np.asarray(labels) >= 0)
    features, finite = finite_tokens(layer_inputs, counted)
    return features, np.asarray(labels)[counted][finite]
