"""The sorted path in plain XLA: a loop over tiles that adds into the output where it lies.

A batched product over all tiles would copy every routed row and every tile's weights first; on
CPU that costs more than the arithmetic. Here a tile's rows stay in cache, and tiles that are empty
are never run. The loop may follow tiles of any layout; c counts the adapters of a tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.numerics import accumulator_dtype, matmul, rows_in_rank, zeros_varying_like
from pallas_kernels.types import Tiles


@jax.jit
def grouped(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    gates: Float[Array, "N k"],
    base: Float[Array, "N F"],
    *,
    ranks: Int[Array, " K"] | None,
    tiles: Tiles,
) -> Float[Array, "N F"]:
    """Costs R columns per entry; temporary memory is one tile, whatever N, K and k."""
    dtype = accumulator_dtype(x, lora_a, lora_b, base)
    in_rank = rows_in_rank(ranks, lora_a.shape[1], lora_a.shape[0])
    gates = gates.astype(dtype)

    def add_tile(tokens, members, y):
        x_tile = _rows(x, tokens)

        def update(slot, gate):
            h = _shrink(x_tile, lora_a[slot], in_rank[slot], dtype)
            # The gate multiplies R numbers of a row and not its F outputs.
            return matmul(h * gate, lora_b[slot], contract=(1, 0), dtype=dtype)

        (slot, _, gate), *others = members  # a live tile has its first adapter
        out = update(slot, gate)
        for slot, _, gate in others:
            out = lax.cond(
                slot >= 0,
                lambda out, slot, gate: out + update(slot, gate),
                lambda out, slot, gate: out,
                out, slot, gate,
            )  # fmt: skip
        # Tiles follow one another, so the sum over k is in a fixed order. Not declared unique: a
        # token that names an adapter twice may stand twice in its tile.
        return y.at[tokens].add(out, mode="drop")

    y = _over_tiles(add_tile, base.astype(dtype), tiles, gates)
    return y.astype(base.dtype)


@jax.jit
def grouped_gradients(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    gates: Float[Array, "N k"],
    dy: Float[Array, "N F"],
    *,
    ranks: Int[Array, " K"] | None,
    tiles: Tiles,
) -> tuple[Array, Array, Array, Array]:
    """Gradients in x, lora_a, lora_b and the gates, tile by tile through the same indices.

    h is recomputed, being a cheap product. An adapter without a tile is never added to: its
    gradient is exactly zero.
    """
    dtype = accumulator_dtype(x, lora_a, lora_b, dy)
    in_rank = rows_in_rank(ranks, lora_a.shape[1], lora_a.shape[0])
    wide_gates, wide_dy = gates.astype(dtype), dy.astype(dtype)

    def add_tile(tokens, members, gradients):
        x_tile, dy_tile = _rows(x, tokens), _rows(wide_dy, tokens)
        for slot, entries, gate in members:

            def add(gradients, slot=slot, entries=entries, gate=gate):
                dx, d_lora_a, d_lora_b, d_gates = gradients
                h = _shrink(x_tile, lora_a[slot], in_rank[slot], dtype)
                d_gated = matmul(dy_tile, lora_b[slot], contract=(1, 1), dtype=dtype)
                d_gated = jnp.where(in_rank[slot][None, :], d_gated, 0)
                dh = d_gated * gate
                dx_tile = matmul(dh, lora_a[slot], contract=(1, 0), dtype=dtype)
                dx = dx.at[tokens].add(dx_tile, mode="drop")
                d_a = matmul(dh, x_tile, contract=(0, 0), dtype=dtype)
                d_b = matmul(h * gate, dy_tile, contract=(0, 0), dtype=dtype)
                d_lora_a, d_lora_b = d_lora_a.at[slot].add(d_a), d_lora_b.at[slot].add(d_b)
                d_gates = d_gates.at[entries].set(jnp.sum(d_gated * h, axis=1), mode="drop")
                return dx, d_lora_a, d_lora_b, d_gates

            gradients = _if_there(slot, len(members), add, gradients)
        return gradients

    flat = (x.shape, lora_a.shape, lora_b.shape, (gates.size,))
    zeros = tuple(zeros_varying_like(dy, shape, dtype) for shape in flat)
    dx, d_lora_a, d_lora_b, d_gates = _over_tiles(add_tile, zeros, tiles, wide_gates)
    return (
        dx.astype(x.dtype),
        d_lora_a.astype(lora_a.dtype),
        d_lora_b.astype(lora_b.dtype),
        d_gates.reshape(gates.shape).astype(gates.dtype),
    )


def _over_tiles(add_tile, carry, tiles: Tiles, gates: Float[Array, "N k"]):
    """Folds `add_tile(tokens, [(slot, entries, gate), ...], carry)` over the live tiles.

    tokens (block,) are N and entries (block,) M = N·k past a tile's end, where a gather fills in
    zeros and a scatter drops; the gates (block, 1) are zero there.
    """
    num_tokens, top_k = gates.shape
    passes, _, width = tiles.adapters.shape
    if num_tokens == 0:
        return carry  # no tile to index
    lane = jnp.arange(tiles.block, dtype=jnp.int32)[None]
    for p in range(passes):
        entries_of, start, rows, adapters = (
            leaf[p] for leaf in (tiles.entries, tiles.start, tiles.rows, tiles.adapters)
        )
        # Indices of all tiles at once: inside the loop they would be a dozen small operations.
        row = jnp.where(lane < rows[:, None], start[:, None] + lane, entries_of.shape[0])
        entries = entries_of.at[row].get(mode="fill", fill_value=num_tokens * top_k)
        gate = gates.reshape(-1).at[entries].get(mode="fill", fill_value=0)
        tokens = entries[:, :, 0] // top_k

        def body(t, carry, tokens=tokens, entries=entries, gate=gate, adapters=adapters):
            members = [
                (adapters[t, c], entries[t, :, c], gate[t, :, c, None]) for c in range(width)
            ]
            return add_tile(tokens[t], members, carry)

        carry = lax.fori_loop(0, jnp.sum(rows > 0, dtype=jnp.int32), body, carry)
    return carry


def _if_there(slot, width: int, add, carry):
    """`add(carry)` unless the tile's set is smaller; with one adapter a tile always has it."""
    return add(carry) if width == 1 else lax.cond(slot >= 0, add, lambda carry: carry, carry)


def _rows(values: Float[Array, "N C"], tokens: Int[Array, " block"]) -> Float[Array, "block C"]:
    return values.at[tokens].get(mode="fill", fill_value=0)


def _shrink(x_tile, lora_a, in_rank, dtype) -> Float[Array, "block R"]:
    h = matmul(x_tile, lora_a, contract=(1, 1), dtype=dtype)
    return jnp.where(in_rank[None, :], h, 0)
