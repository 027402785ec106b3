"""The sorted path in plain XLA: a loop over tiles that adds into the output where it lies.

A batched product over all tiles would copy every routed row and every tile's weights first; on
CPU that costs more than the arithmetic. Here a tile's rows stay in cache, and tiles that are empty
are never run. Axes: T tiles, P = T·block rows.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.numerics import (
    accumulator_dtype,
    matmul,
    rows_in_rank,
    vary_together,
    zeros_varying_like,
)
from pallas_kernels.types import DispatchPlan, Routing


@jax.jit
def grouped(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    routing: Routing,
    *,
    base: Float[Array, "N F"] | None,
    ranks: Int[Array, " K"] | None,
    plan: DispatchPlan,
) -> Float[Array, "N F"]:
    """Costs R columns per entry; temporary memory is one tile, whatever N, K and k."""
    num_slots, rank, _ = lora_a.shape
    dtype = accumulator_dtype(x, lora_a, lora_b)
    if base is None:
        base = zeros_varying_like(x, (x.shape[0], lora_b.shape[2]), dtype)
    if x.shape[0] == 0:
        return base.astype(dtype)  # no tile to index
    # Positions are the inverse of the sort, so each row receives the gate of its one entry.
    row_gates = jnp.zeros(plan.order.shape, dtype)
    row_gates = row_gates.at[plan.position].add(routing.gates.astype(dtype), mode="drop")
    in_rank = rows_in_rank(ranks, rank, num_slots)
    tiles = (plan.tile_adapter.shape[0], plan.block)
    operands = vary_together(
        [
            base.astype(dtype),
            x,
            lora_a,
            lora_b,
            row_gates.reshape(tiles),
            in_rank,
            plan.order.reshape(tiles),
            plan.tile_adapter,
        ]
    )
    return _add_tiles(*operands)


@jax.custom_vjp
def _add_tiles(base, x, lora_a, lora_b, gates, in_rank, order, tile_adapter):
    """base with every tile's contribution added to its tokens, in the dtype of base."""

    def add_tile(t, y):
        slot, tokens = tile_adapter[t], order[t]
        h = _shrink(_rows(x, tokens), lora_a[slot], in_rank[slot], y.dtype)
        # The gate multiplies R numbers of a row and not its F outputs.
        out = matmul(h * gates[t][:, None], lora_b[slot], contract=(1, 0), dtype=y.dtype)
        # Tiles follow one another, so the sum over k is in a fixed order. Not declared unique: a
        # token that names an adapter twice stands twice in its tile.
        return y.at[tokens].add(out, mode="drop")

    return lax.fori_loop(0, _live(tile_adapter), add_tile, base)


def _forward(*operands):
    return _add_tiles(*operands), operands[1:]


def _backward(saved, dy):
    """Gradients tile by tile through the same indices; h is recomputed, being a cheap product.

    An adapter without a tile is never added to: its gradient is exactly zero.
    """
    x, lora_a, lora_b, gates, in_rank, order, tile_adapter = saved
    dtype = dy.dtype

    def add_tile(t, gradients):
        dx, d_lora_a, d_lora_b, d_gates = gradients
        slot, tokens = tile_adapter[t], order[t]
        x_tile, dy_tile = _rows(x, tokens), _rows(dy, tokens)
        gate = gates[t][:, None]
        h = _shrink(x_tile, lora_a[slot], in_rank[slot], dtype)
        d_gated = matmul(dy_tile, lora_b[slot], contract=(1, 1), dtype=dtype)
        dh = jnp.where(in_rank[slot][None, :], d_gated * gate, 0)
        dx = dx.at[tokens].add(matmul(dh, lora_a[slot], contract=(1, 0), dtype=dtype), mode="drop")
        d_lora_a = d_lora_a.at[slot].add(matmul(dh, x_tile, contract=(0, 0), dtype=dtype))
        d_lora_b = d_lora_b.at[slot].add(matmul(h * gate, dy_tile, contract=(0, 0), dtype=dtype))
        d_gates = d_gates.at[t].set(jnp.sum(d_gated * h, axis=1))
        return dx, d_lora_a, d_lora_b, d_gates

    zeros = tuple(zeros_varying_like(dy, a.shape, dtype) for a in (x, lora_a, lora_b, gates))
    gradients = lax.fori_loop(0, _live(tile_adapter), add_tile, zeros)
    dx, d_lora_a, d_lora_b, d_gates = gradients
    return (
        dy,
        dx.astype(x.dtype),
        d_lora_a.astype(lora_a.dtype),
        d_lora_b.astype(lora_b.dtype),
        d_gates,
        None,
        None,
        None,
    )


_add_tiles.defvjp(_forward, _backward)


def _live(tile_adapter: Int[Array, " T"]) -> Int[Array, ""]:
    return jnp.sum(tile_adapter >= 0, dtype=jnp.int32)


def _rows(values: Float[Array, "N C"], tokens: Int[Array, " block"]) -> Float[Array, "block C"]:
    """A tile's rows, zero in padding."""
    return values.at[tokens].get(mode="fill", fill_value=0)


def _shrink(x_tile, lora_a, in_rank, dtype) -> Float[Array, "block R"]:
    h = matmul(x_tile, lora_a, contract=(1, 1), dtype=dtype)
    return jnp.where(in_rank[None, :], h, 0)
