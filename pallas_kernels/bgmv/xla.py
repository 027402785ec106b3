"""One entry after another: A·x and Bᵀ·h as two products of a matrix and a vector."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.numerics import accumulator_dtype, known_ids, matmul, rows_in_rank


@jax.jit
def bgmv(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    gates: Float[Array, "N k"],
    base: Float[Array, "N F"],
    *,
    adapter_ids: Int[Array, "N k"],
    ranks: Int[Array, " K"] | None,
) -> Float[Array, "N F"]:
    """Reads an adapter's weights once for every entry; no sort, and next to no memory."""
    num_slots, rank, _ = lora_a.shape
    num_tokens, top_k = gates.shape
    dtype = accumulator_dtype(x, lora_a, lora_b, base)
    in_rank = rows_in_rank(ranks, rank, num_slots)
    ids = known_ids(adapter_ids, num_slots).reshape(-1)
    flat_gates = gates.astype(dtype).reshape(-1)

    def add(entry, y):
        slot, token = ids[entry], entry // top_k
        h = matmul(x[token][None], lora_a[slot], contract=(1, 1), dtype=dtype)
        h = jnp.where(in_rank[slot][None], h, 0) * flat_gates[entry]
        return y.at[token].add(matmul(h, lora_b[slot], contract=(1, 0), dtype=dtype)[0])

    def step(entry, y):
        return lax.cond(ids[entry] >= 0, add, lambda entry, y: y, entry, y)

    y = base.astype(dtype)
    if num_tokens:
        y = lax.fori_loop(0, num_tokens * top_k, step, y)
    return y.astype(base.dtype)
