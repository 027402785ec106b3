"""Which group a token belongs to: one adapter, or a set of them, as one small integer."""

import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import Array, Int


def num_sets(num_slots: int, top_k: int) -> int:
    """Multisets of at most k of K slots, the empty one left out."""
    return math.comb(num_slots + top_k, top_k) - 1


@functools.lru_cache(maxsize=64)
def members(num_slots: int, top_k: int) -> np.ndarray:
    """(G, k): the slots of each set in ascending order, −1 behind the last."""
    sets = itertools.combinations_with_replacement(range(num_slots + 1), top_k)
    table = np.array(sorted(sets, key=lambda each: _rank(each, 1)), np.int32)
    return np.where(table == num_slots, -1, table)[:-1]


def set_code(ascending: Int[Array, "N k"], num_slots: int) -> Int[Array, " N"]:
    """The row of `members` for each token's slots, sorted with K for none; G for the empty set.

    The combinatorial number system: i₀ ≤ i₁ ≤ … has rank Σ C(i_j + j, j + 1), without gaps.
    """
    columns = [ascending[:, j] for j in range(ascending.shape[1])]
    return _rank(columns, jnp.int32(1))


def _rank(ascending, one):
    rank = 0
    for j, slot in enumerate(ascending):
        # C(slot + j, j + 1) by its product; every partial product is a binomial coefficient.
        term = one
        for i in range(j + 1):
            term = term * (slot + i) // (i + 1)
        rank = rank + term
    return rank
