"""Problem sizes and routing workloads by name, read by tests and benchmarks alike."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from pallas_kernels.types import Routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProblemSize:
    """One routed projection, in the symbols N, D, F, R, K, k.

    >>> ProblemSize(num_tokens=64, d_in=8, d_out=6, rank=2, num_slots=4, top_k=2).top_k
    2
    """

    num_tokens: int
    d_in: int
    d_out: int
    rank: int
    num_slots: int
    top_k: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.name != "num_tokens")
            if value < least:
                raise ValueError(f"{field.name} is {value}; expected {least} or more")
        if self.top_k > self.num_slots:
            raise ValueError(
                f"top_k is {self.top_k} and num_slots {self.num_slots}; expected k ≤ K"
            )


def _size(*numbers: int) -> ProblemSize:
    names = [field.name for field in dataclasses.fields(ProblemSize)]
    return ProblemSize(**dict(zip(names, numbers, strict=True)))


# Small, and in most no number is a multiple of anything. N, D, F, R, K, k.
SMALL = {
    "odd": _size(37, 24, 20, 5, 3, 2),
    "one_token": _size(1, 9, 6, 4, 5, 2),
    "no_token": _size(0, 8, 6, 4, 3, 2),
    "one_slot": _size(17, 8, 6, 3, 1, 1),
    "rank_one": _size(33, 13, 7, 1, 6, 1),
    "many_slots": _size(19, 11, 5, 3, 40, 2),
    "dense": _size(21, 10, 14, 2, 4, 4),
    "every_slot": _size(23, 7, 9, 3, 3, 3),
    "past_a_tile": _size(129, 6, 11, 2, 2, 1),
}

# SmolLM2-135M's projections with 2 × 256 tokens: the shapes that the demo runs.
SMOLLM2 = {
    "k_proj": _size(512, 576, 192, 8, 4, 2),
    "q_proj": _size(512, 576, 576, 8, 4, 2),
    "up_proj": _size(512, 576, 1536, 8, 4, 2),
    "down_proj": _size(512, 1536, 576, 8, 4, 2),
}


def _random(shares: np.ndarray, num_tokens: int, top_k: int, rng: np.random.Generator):
    """k slots a token without repetition while there are enough, drawn by share (Gumbel top-k)."""
    num_slots = len(shares)
    noise = rng.gumbel(size=(num_tokens, num_slots))
    # A share of zero is still drawn once the others are used up.
    ranked = np.argsort(-(np.log(np.maximum(shares, 1e-9))[None] + noise), axis=1)
    return ranked[:, np.arange(top_k) % num_slots]


def _runs(first: np.ndarray, num_slots: int, top_k: int) -> np.ndarray:
    """The given first choice of each token; its further choices are the slots that follow."""
    return (first[:, None] + np.arange(top_k)[None]) % num_slots


def _shares(head: tuple[float, ...]) -> Callable[[int], np.ndarray]:
    def shares(num_slots: int) -> np.ndarray:
        padded = np.zeros(max(num_slots, len(head)))
        padded[: len(head)] = head
        return padded[:num_slots] / padded[:num_slots].sum()

    return shares


def _zipf(num_slots: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, num_slots + 1)
    return weights / weights.sum()


# The share of each slot, for workloads whose tokens are drawn independently.
SHARES = {
    "uniform": lambda num_slots: np.full(num_slots, 1.0 / num_slots),
    "zipf": _zipf,
    "skewed": _shares((0.80, 0.10, 0.05, 0.05)),
    "extreme": _shares((0.95, 0.02, 0.02, 0.01)),
}
# The first choice of each of n tokens, for workloads with an order.
ORDERED = {
    "identical": lambda n, num_slots: np.full(n, num_slots - 1),
    "distinct": lambda n, num_slots: np.arange(n) % num_slots,
    "interleaved": lambda n, num_slots: np.arange(n) // 8 % num_slots,
    "separated": lambda n, num_slots: np.arange(n) * num_slots // max(n, 1),
}
WORKLOADS = (*ORDERED, *SHARES)


def workload(name: str, size: ProblemSize, *, seed: int = 0) -> Routing:
    """A routing of `size.num_tokens` tokens with positive gates that add up to one a token.

    `identical`: every token to one adapter (the last); `distinct`: neighbours never share one;
    `interleaved`: spans of eight tokens in turn; `separated`: one span per adapter. `uniform`,
    `zipf`, `skewed` (80/10/5/5 %) and `extreme` (95/2/2/1 %) are drawn token by token.
    """
    rng = np.random.default_rng(seed)
    n, num_slots, top_k = size.num_tokens, size.num_slots, size.top_k
    if name in ORDERED:
        ids = _runs(ORDERED[name](n, num_slots), num_slots, top_k)
    elif name in SHARES:
        ids = _random(SHARES[name](num_slots), n, top_k, rng)
    else:
        raise ValueError(f"workload is {name!r}; expected one of {', '.join(WORKLOADS)}")
    gates = rng.dirichlet(np.full(top_k, 2.0), size=n).reshape(n, top_k)
    return Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(gates, jnp.float32))
