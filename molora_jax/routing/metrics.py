"""What the routing did, on the host: shares, entropies, agreement with domains, follow lag.

G is the number of domains. A token's domain is −1 where it is unknown or padding: such tokens are
left out everywhere. A token's *main adapter* is the argmax of its top-1 gates summed over the later
half of the layers; where a share of tokens "to an adapter" is reported, it is by that.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

FOLLOW_RUN = 4  # a token and the next three
COLLAPSE_SHARE = 0.9


def main_adapter(
    adapter_ids: Int[ArrayLike, "*L N k"], gates: Float[ArrayLike, "*L N k"]
) -> Int[np.ndarray, " N"]:
    """argmax over slots of Σ top-1 gate over layers L//2 … L−1; lowest in a tie, −1 if none."""
    ids, weight = _layers(adapter_ids, gates)
    later = slice(ids.shape[0] // 2, None)
    ids, weight = top_1(ids[later], weight[later])
    num_slots = max(int(ids.max(initial=-1)) + 1, 1)
    scores = _scatter(ids[..., None], weight[..., None], num_slots).sum(axis=0)
    return np.where((ids >= 0).any(axis=0), scores.argmax(axis=1), -1)


def mean_gates(
    adapter_ids: Int[ArrayLike, "*L N k"],
    gates: Float[ArrayLike, "*L N k"],
    *,
    num_slots: int,
) -> Float[np.ndarray, "N K"]:
    """Each token's gate of every slot, averaged over the later half of the layers."""
    ids, weight = _layers(adapter_ids, gates)
    later = slice(ids.shape[0] // 2, None)
    return _scatter(ids[later], weight[later], num_slots).mean(axis=0)


def top_1(
    adapter_ids: Int[ArrayLike, "*L N k"], gates: Float[ArrayLike, "*L N k"]
) -> tuple[Int[np.ndarray, "*L N"], Float[np.ndarray, "*L N"]]:
    """The slot with the largest gate and that gate, of each token; −1 and 0 where it has none."""
    ids, weight = np.asarray(adapter_ids), np.asarray(gates, np.float64)
    weight = np.where(ids >= 0, weight, -np.inf)
    best = weight.argmax(axis=-1)[..., None]
    ids = np.take_along_axis(ids, best, axis=-1)[..., 0]
    weight = np.take_along_axis(weight, best, axis=-1)[..., 0]
    return ids, np.where(ids >= 0, weight, 0.0)


def layer_shares(
    adapter_ids: Int[ArrayLike, "*L N k"],
    gates: Float[ArrayLike, "*L N k"],
    domains: Int[ArrayLike, " N"],
    *,
    num_domains: int,
    num_slots: int,
) -> Float[np.ndarray, "L G K"]:
    """Share of each domain's tokens whose top-1 adapter is each slot, by layer.

    A row sums to less than 1 by the share of tokens without an adapter; a domain without tokens
    is NaN.
    """
    ids, _ = top_1(*_layers(adapter_ids, gates))
    return np.stack([token_shares(of_layer, domains, num_domains, num_slots) for of_layer in ids])


def token_shares(
    adapters: Int[ArrayLike, "*n"],
    domains: Int[ArrayLike, "*n"],
    num_domains: int,
    num_slots: int,
) -> Float[np.ndarray, "G K"]:
    """Share of each domain's tokens that have each adapter, from one adapter per token."""
    adapters, domains = np.ravel(adapters), np.ravel(domains)
    counts = np.zeros((num_domains, num_slots))
    both = (adapters >= 0) & (domains >= 0)
    np.add.at(counts, (domains[both], adapters[both]), 1.0)
    totals = np.bincount(domains[domains >= 0], minlength=num_domains).astype(np.float64)
    return _ratio(counts, totals[:, None])


def entropies(
    logits: Float[ArrayLike, "*L N C"], mask: Bool[ArrayLike, "*n"]
) -> dict[str, Float[np.ndarray, " L"]]:
    """Of the dense softmax, in nats, by layer: how sure a router is, and how evenly it spreads.

    "token": mean over tokens of the entropy of one token's softmax; 0 is a hard choice.
    "usage": entropy of the softmax averaged over tokens; ln C is even use, 0 is collapse.
    Padding and tokens with non-finite logits are left out; NaN where no token is left.
    """
    logits = np.asarray(logits, np.float64)
    logits = logits[None] if logits.ndim == 2 else logits
    token: list[float] = []
    usage: list[float] = []
    for of_layer in logits:
        kept = of_layer[np.ravel(mask).astype(bool) & np.isfinite(of_layer).all(axis=-1)]
        if not len(kept):
            token.append(np.nan)
            usage.append(np.nan)
            continue
        p = np.exp(kept - kept.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        token.append(float(_entropy(p).mean()))
        usage.append(float(_entropy(p.mean(axis=0, keepdims=True))[0]))
    return {"token": np.array(token), "usage": np.array(usage)}


def agreement(adapters: Int[ArrayLike, "*n"], domains: Int[ArrayLike, "*n"]) -> dict[str, float]:
    """Adjusted Rand index and normalised mutual information of adapters and domains as clusterings.

    Both are 1 for the same partition under any naming. Tokens without an adapter are a cluster of
    their own; NaN where no token has a domain.
    """
    # Imported here: scikit-learn takes a second, and the routers do not need it.
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    adapters, domains = np.ravel(adapters), np.ravel(domains)
    known = domains >= 0
    if not known.any():
        return {"ari": float("nan"), "nmi": float("nan")}
    return {
        "ari": float(adjusted_rand_score(domains[known], adapters[known])),
        "nmi": float(normalized_mutual_info_score(domains[known], adapters[known])),
    }


def follow_lag(
    adapters: Int[ArrayLike, "B S"],
    domains: Int[ArrayLike, "B S"],
    *,
    domain_adapters: Sequence[int] | None = None,
    within: Sequence[int] = (8, 16, 32),
) -> dict[str, Any]:
    """How many tokens after a change of domain inside a sequence the routing follows.

    A change is a token whose domain differs from that of the token before it, both known. Its lag
    is the first i ≥ 0 for which token change + i and the next three, all still of the new domain,
    go to the new domain's adapter. A change with fewer than four tokens of the new domain cannot be
    judged and is left out.

    adapters         (B, S) one adapter per token, by `main_adapter`
    domain_adapters  the adapter that belongs to each domain; None: domain g has adapter g

    Returns "changes" (how many were judged), "unjudged", "lags" (list, inf where it never
    follows), "median" (inf if half never follow, NaN without a change) and "within": {w: share of
    the judged changes with lag ≤ w}, so that at most w tokens passed before the routing followed.
    """
    adapters, domains = np.atleast_2d(adapters), np.atleast_2d(domains)
    if adapters.shape != domains.shape:
        raise ValueError(
            f"adapters has shape {adapters.shape} and domains {domains.shape}: expected one (B, S)"
        )
    lags: list[float] = []
    unjudged = 0
    for row_adapters, row_domains in zip(adapters, domains, strict=True):
        before, after = row_domains[:-1], row_domains[1:]
        for start in 1 + np.flatnonzero((before != after) & (before >= 0) & (after >= 0)):
            domain = row_domains[start]
            left = np.flatnonzero(row_domains[start:] != domain)
            stop = start + left[0] if len(left) else len(row_domains)
            if stop - start < FOLLOW_RUN:
                unjudged += 1
                continue
            target = domain if domain_adapters is None else domain_adapters[domain]
            right = row_adapters[start:stop] == target
            runs = np.lib.stride_tricks.sliding_window_view(right, FOLLOW_RUN).all(axis=1)
            lags.append(float(runs.argmax()) if runs.any() else float("inf"))
    found = np.array(lags)
    return {
        "changes": len(lags),
        "unjudged": unjudged,
        "lags": lags,
        "median": float(statistics.median(lags)) if lags else float("nan"),
        "within": {w: float((found <= w).mean()) if lags else float("nan") for w in within},
    }


def usage(
    adapter_ids: Int[ArrayLike, "*L N k"],
    gates: Float[ArrayLike, "*L N k"],
    mask: Bool[ArrayLike, "*n"],
    *,
    num_slots: int,
) -> Float[np.ndarray, "L K"]:
    """Share of the real tokens whose top-1 adapter is each slot, by layer."""
    domains = np.where(np.ravel(mask), 0, -1)
    return layer_shares(adapter_ids, gates, domains, num_domains=1, num_slots=num_slots)[:, 0]


def collapse_warning(
    usage: Float[ArrayLike, "L K"],
    *,
    adapter_names: Sequence[str] | Mapping[int, str] | None = None,
    threshold: float = COLLAPSE_SHARE,
) -> str | None:
    """A sentence if one of several adapters takes more than `threshold` of the tokens of a layer.

    Give it the usage over a mix of domains: on one domain, one adapter is as it should be.
    """
    usage = np.atleast_2d(usage)
    if usage.shape[1] < 2 or np.isnan(usage).all():
        return None
    over = np.nan_to_num(usage) > threshold
    if not over.any():
        return None
    layer, slot = np.unravel_index(np.nanargmax(usage), usage.shape)
    name = str(slot) if adapter_names is None else adapter_names[int(slot)]
    return (
        f"the router collapses: in {int(over.any(axis=1).sum())} of {len(usage)} layers one "
        f"adapter takes more than {threshold:.0%} of the tokens, most of all {name!r} with "
        f"{usage[layer, slot]:.1%} in layer {layer}; raise the balance coefficient, train densely "
        "for longer, or check that the batch mixes the domains"
    )


def _layers(adapter_ids: Any, gates: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both with a layer axis, (L, N, k)."""
    ids, weight = np.asarray(adapter_ids), np.asarray(gates, np.float64)
    if ids.shape != weight.shape or ids.ndim not in (2, 3):
        raise ValueError(
            f"adapter_ids has shape {ids.shape} and gates {weight.shape}: expected one shape, "
            "(N, k) or (L, N, k), as in a Routing"
        )
    return (ids[None], weight[None]) if ids.ndim == 2 else (ids, weight)


def _scatter(ids: np.ndarray, weight: np.ndarray, num_slots: int) -> np.ndarray:
    """(L, N, k) ids and gates → (L, N, K) gate of every slot."""
    dense = np.zeros((*ids.shape[:-1], num_slots))
    layer, token, j = np.nonzero(ids >= 0)
    np.add.at(dense, (layer, token, ids[layer, token, j]), weight[layer, token, j])
    return dense


def _entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)


def _ratio(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    return np.where(totals > 0, counts / np.where(totals > 0, totals, 1.0), np.nan)
