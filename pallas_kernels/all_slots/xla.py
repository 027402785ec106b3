"""Two plain products over all slots and a select between them; for few slots nothing is faster.

h = x · [A₁ … A_K]ᵀ, of which a token keeps its own slots; y = base + (gates ⊙ h) · [B₁; …; B_K].
"""

import functools

import jax.numpy as jnp

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.numerics import (
    accumulator_dtype,
    known_ids,
    matmul,
    rows_in_rank,
    rows_times_weight,
)


def all_slots(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    gates: Float[Array, "N k"],
    base: Float[Array, "N F"],
    *,
    adapter_ids: Int[Array, "N k"],
    ranks: Int[Array, " K"] | None,
) -> Float[Array, "N F"]:
    """Costs K·R columns for every token, and h (N, K·R) of temporary memory."""
    num_slots, rank, d_in = lora_a.shape
    num_tokens, d_out = x.shape[0], lora_b.shape[2]
    dtype = accumulator_dtype(x, lora_a, lora_b, base)

    # (N, k, K) compared with the slots. Projections that share a decision share these few
    # numbers without a plan: the compiler sees the same expression and keeps one.
    ids = known_ids(adapter_ids, num_slots)
    chosen = ids[:, :, None] == jnp.arange(num_slots, dtype=jnp.int32)[None, None, :]
    member = jnp.any(chosen, axis=1)
    # A slot named twice by one token counts twice.
    gates = jnp.sum(jnp.where(chosen, gates.astype(dtype)[:, :, None], 0), axis=1)

    # Both products read the stack as it lies: no transpose, no copy.
    product = functools.partial(matmul, dtype=dtype)
    h = rows_times_weight(x, lora_a.reshape(num_slots * rank, d_in), product)
    h = h.reshape(num_tokens, num_slots, rank)
    # Select, and then the gate multiplies: an overflow that another adapter makes of this token
    # would survive a gate of zero (0·inf is NaN), here and in the gradients.
    keep = member[:, :, None] & rows_in_rank(ranks, rank, num_slots)[None]
    h = jnp.where(keep, h, 0) * gates[:, :, None]
    h = h.reshape(num_tokens, num_slots * rank)
    delta = product(h, lora_b.reshape(num_slots * rank, d_out), contract=(1, 0))
    return (base.astype(dtype) + delta).astype(base.dtype)
