"""The definition of the routed low-rank update: short, right for every shape, differentiable.

y[n] = base[n] + Σ_j gates[n, j] · B[id[n, j]]ᵀ · (A[id[n, j]] · x[n])   (arXiv 2603.15965)
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.numerics import accumulator_dtype, known_ids, rows_in_rank


def reference(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    gates: Float[Array, "N k"],
    base: Float[Array, "N F"],
    *,
    adapter_ids: Int[Array, "N k"],
    ranks: Int[Array, " K"] | None,
) -> Float[Array, "N F"]:
    """Every token gathers the weights it is routed to: N·k·R·(D + F) numbers of memory."""
    num_slots, rank, _ = lora_a.shape
    dtype = accumulator_dtype(x, lora_a, lora_b, base)
    ids = known_ids(adapter_ids, num_slots)
    slots = jnp.where(ids >= 0, ids, num_slots)  # out of bounds, where a gather fills in zeros
    in_rank = rows_in_rank(ranks, rank, num_slots)

    # Widened first, so that the gradient of the gather is summed wide as well.
    a = lora_a.astype(dtype).at[slots].get(mode="fill", fill_value=0)
    b = lora_b.astype(dtype).at[slots].get(mode="fill", fill_value=0)
    used = in_rank.at[slots].get(mode="fill", fill_value=False)  # (N, k, R)
    gates = jnp.where(ids >= 0, gates.astype(dtype), 0)

    exact = lax.Precision.HIGHEST
    h = jnp.einsum("nd,njrd->njr", x.astype(dtype), a, precision=exact)
    h = jnp.where(used, h, 0) * gates[:, :, None]
    y = base.astype(dtype) + jnp.einsum("njr,njrf->nf", h, b, precision=exact)
    return y.astype(base.dtype)
