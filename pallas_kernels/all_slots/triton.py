"""Every slot for every block of tokens, without a sort: two launches, tokens where they lie.

  shrink   h[n, u] = gate·A[u]·x[n] for a block of tokens and each slot u, zero where n did not
           choose u: selected and not multiplied, as 0·∞ is NaN
  expand   y[n] = base[n] + Σ_u h[n, u]·B[u], the slots one after another in registers

The products of slots that a token does not use are made for nothing: on tensor cores they are free
as long as reading the weights takes longer.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.grouped_gemm.blocks import all_slots_rows, choose_blocks
from pallas_kernels.grouped_gemm.triton import Rows, load_rows, load_weight, shrink_rows, wide_dot
from pallas_kernels.numerics import shape_varying_like


def all_slots(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "LK R D"],
    lora_b: Float[Array, "LK R F"],
    gates: Float[Array, "N k"],
    base: Float[Array, "N F"],
    *,
    ids: Int[Array, "N k"],
    ranks: Int[Array, " LK"],
    first_slot: Int[Array, " 1"],
    num_slots: int,
    interpret: bool,
) -> Float[Array, "N F"]:
    """Slot u of layer l lies at l·K + u, with first_slot = l·K; ids outside [0, K) are none."""
    num_tokens, top_k = ids.shape
    rank, d_out = lora_b.shape[1:]
    block = all_slots_rows(num_tokens)
    blocks_for = functools.partial(
        choose_blocks,
        block=block,
        rank=rank,
        d_in=x.shape[1],
        d_out=d_out,
        itemsize=max(x.dtype.itemsize, lora_a.dtype.itemsize, lora_b.dtype.itemsize),
        float16=lora_b.dtype == jnp.float16,
        reload=True,
    )
    blocks = blocks_for(num_tiles=pl.cdiv(num_tokens, block))
    num_tiles = pl.cdiv(num_tokens, blocks.rows)
    planes = blocks_for(num_tiles=num_tiles * num_slots).planes
    column_blocks = pl.cdiv(rank, blocks.rank)
    # A warp multiplies 16 × 8 at least: four would do the work of two where h has 16 columns.
    warps = 2 if blocks.rank == 16 and blocks.rows <= 32 else blocks.warps
    in_steps = pl.cdiv(pl.cdiv(x.shape[1], blocks.inner), planes)
    out_steps = pl.cdiv(pl.cdiv(d_out, blocks.outer), blocks.parts)

    def rows_of(tile):
        token = tile * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
        return Rows(token, token < num_tokens, blocks)

    def choice(ids_ref, rows, j):
        return plgpu.load(ids_ref.at[rows.token, j], mask=rows.inside, other=-1)

    def shrink(first_ref, ids_ref, ranks_ref, gates_ref, x_ref, a_ref, h_ref):
        tile, slot, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        plane, column = part // column_blocks, part % column_blocks * blocks.rank
        rows, at = rows_of(tile), first_ref[0] + slot
        weights = [(a_ref, at, ranks_ref[at])]
        (h,) = shrink_rows(x_ref, weights, rows, column, plane * in_steps, in_steps)
        keep, gate = jnp.zeros(blocks.rows, jnp.bool_), jnp.zeros(blocks.rows, jnp.float32)
        for j in range(top_k):
            chosen = rows.inside & (choice(ids_ref, rows, j) == slot)
            keep = keep | chosen
            # A slot named twice by one token counts twice.
            gate = gate + plgpu.load(gates_ref.at[rows.token, j], mask=chosen, other=0)
        columns = column + jnp.arange(blocks.rank, dtype=jnp.int32)
        plgpu.store(
            h_ref.at[plane, rows.token[:, None], slot, columns[None, :]],
            jnp.where(keep[:, None], h * gate[:, None], 0),
            mask=rows.inside[:, None],
        )

    def expand(first_ref, ids_ref, ranks_ref, h_ref, b_ref, base_ref, y_ref):
        rows, first = rows_of(pl.program_id(0)), pl.program_id(1) * out_steps

        def write(step, carry):
            wide = (first + step) * blocks.outer + jnp.arange(blocks.outer, dtype=jnp.int32)

            def add_slot(slot, total):
                at = first_ref[0] + slot
                own = ranks_ref[at]

                def add(block, total):
                    column = block * blocks.rank + jnp.arange(blocks.rank, dtype=jnp.int32)
                    mask = rows.inside[:, None] & (column < own)[None, :]
                    h = jnp.zeros(mask.shape, jnp.float32)
                    for plane in range(planes):
                        each = h_ref.at[plane, rows.token[:, None], slot, column[None, :]]
                        h = h + plgpu.load(each, mask=mask, other=0)
                    return total + wide_dot(h, load_weight(b_ref, at, column, wide, own))

                if column_blocks == 1:
                    return add(0, total)
                return lax.fori_loop(0, pl.cdiv(own, blocks.rank), add, total)

            zeros = jnp.zeros((blocks.rows, blocks.outer), jnp.float32)
            total = lax.fori_loop(0, num_slots, add_slot, zeros)
            y = load_rows(base_ref, rows, wide).astype(jnp.float32) + total
            # Found anew for every step: kept, it would take registers from the products.
            some = jnp.zeros(blocks.rows, jnp.bool_)
            for j in range(top_k):
                chosen = choice(ids_ref, rows, j)
                some = some | ((chosen >= 0) & (chosen < num_slots))
            plgpu.store(
                y_ref.at[rows.token[:, None], wide[None, :]],
                y.astype(y_ref.dtype),
                # What has no adapter keeps its base to the bit.
                mask=some[:, None] & (wide < d_out)[None, :],
            )
            return carry

        lax.fori_loop(0, out_steps, write, 0)

    h = pl.pallas_call(
        shrink,
        grid=(num_tiles, num_slots, planes * column_blocks),
        out_shape=shape_varying_like(
            x, (planes, num_tokens, num_slots, column_blocks * blocks.rank), jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=blocks.stages),
        interpret=interpret,
        name="all_slots_shrink",
    )(first_slot, ids, ranks, gates.astype(jnp.float32), x, lora_a)
    return pl.pallas_call(
        expand,
        grid=(num_tiles, blocks.parts),
        out_shape=shape_varying_like(base, base.shape, base.dtype),
        input_output_aliases={5: 0},
        # Pipelined, each plane of h would stand in shared memory twice; two warps spill at 16 rows.
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if blocks.rows == 16 else warps, num_stages=1
        ),
        interpret=interpret,
        name="all_slots_expand",
    )(first_slot, ids, ranks, h, lora_b, base)
