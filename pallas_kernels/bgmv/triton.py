"""One adapter per row as Punica and S-LoRA do it: vector products, no sort, no tensor cores.

  shrink   h[e] = A[u]·x[token of e], one entry e and one part of D a program
  expand   y[n] = base[n] + Σ_j gate·h[n·k + j]·B[u_j], one token and one part of F a program

An adapter's weights are read once for every token that uses it, which is least where tokens are few
and hardly share one. Products are exact in float32.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.numerics import shape_varying_like

_INNER = 128  # of D a step
_OUTER = 128  # of F a program
_PARAMS = plgpu.CompilerParams(num_warps=4, num_stages=2)


def bgmv(
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
    num_tokens, d_in = x.shape
    rank, d_out = lora_b.shape[1:]
    top_k = ids.shape[1]
    columns = max(16, 1 << (rank - 1).bit_length()) if rank <= 64 else 64
    column_blocks = pl.cdiv(rank, columns)
    steps = pl.cdiv(d_in, _INNER)
    planes = min(32, max(1, 264 // (num_tokens * top_k)))
    planes = 1 << (min(planes, steps).bit_length() - 1)
    steps = pl.cdiv(steps, planes)

    def known(slot):
        return (slot >= 0) & (slot < num_slots)

    def shrink(first_ref, ids_ref, ranks_ref, x_ref, a_ref, h_ref):
        entry, plane, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        token, slot = entry // top_k, ids_ref[entry // top_k, entry % top_k]

        @pl.when(known(slot))
        def _():
            at = first_ref[0] + slot
            column = block * columns + jnp.arange(columns, dtype=jnp.int32)
            own = ranks_ref[at]

            def add(step, total):
                inner = (plane * steps + step) * _INNER + jnp.arange(_INNER, dtype=jnp.int32)
                inside = inner < d_in
                values = plgpu.load(x_ref.at[token, inner], mask=inside, other=0)
                a = plgpu.load(
                    a_ref.at[at, column[:, None], inner[None, :]],
                    mask=(column < own)[:, None] & inside[None, :],
                    other=0,
                )
                product = a.astype(jnp.float32) * values.astype(jnp.float32)[None, :]
                return total + jnp.sum(product, axis=1)

            used = steps * (block * columns < own).astype(jnp.int32)
            h = lax.fori_loop(0, used, add, jnp.zeros(columns, jnp.float32))
            plgpu.store(h_ref.at[plane, entry, column], h)

    h = pl.pallas_call(
        shrink,
        grid=(num_tokens * top_k, planes, column_blocks),
        out_shape=shape_varying_like(
            x, (planes, num_tokens * top_k, column_blocks * columns), jnp.float32
        ),
        compiler_params=_PARAMS,
        interpret=interpret,
        name="bgmv_shrink",
    )(first_slot, ids, ranks, x, lora_a)

    def expand(first_ref, ids_ref, ranks_ref, h_ref, b_ref, gates_ref, base_ref, y_ref):
        token, part = pl.program_id(0), pl.program_id(1)
        wide = part * _OUTER + jnp.arange(_OUTER, dtype=jnp.int32)
        inside = wide < d_out
        some = known(ids_ref[token, 0])
        for j in range(1, top_k):
            some = some | known(ids_ref[token, j])

        @pl.when(some)
        def _():
            total = jnp.zeros(_OUTER, jnp.float32)
            for j in range(top_k):
                slot = ids_ref[token, j]
                at = first_ref[0] + jnp.where(known(slot), slot, 0)
                own = jnp.where(known(slot), ranks_ref[at], 0)
                gate = gates_ref[token, j]

                def add(block, total, j=j, at=at, own=own, gate=gate):
                    column = block * columns + jnp.arange(columns, dtype=jnp.int32)
                    live = column < own
                    h = jnp.zeros(columns, jnp.float32)
                    for plane in range(planes):
                        h = h + plgpu.load(
                            h_ref.at[plane, token * top_k + j, column], mask=live, other=0
                        )
                    b = plgpu.load(
                        b_ref.at[at, column[:, None], wide[None, :]],
                        mask=live[:, None] & inside[None, :],
                        other=0,
                    )
                    # A gate that is not finite belongs to a slot or to nothing.
                    h = jnp.where(live, h * gate, 0)
                    return total + jnp.sum(h[:, None] * b.astype(jnp.float32), axis=0)

                total = lax.fori_loop(0, pl.cdiv(own, columns), add, total)
            base = plgpu.load(base_ref.at[token, wide], mask=inside, other=0)
            y = base.astype(jnp.float32) + total
            plgpu.store(y_ref.at[token, wide], y.astype(y_ref.dtype), mask=inside)

    return pl.pallas_call(
        expand,
        grid=(num_tokens, pl.cdiv(d_out, _OUTER)),
        out_shape=shape_varying_like(base, base.shape, base.dtype),
        input_output_aliases={6: 0},
        compiler_params=_PARAMS,
        interpret=interpret,
        name="bgmv_expand",
    )(first_slot, ids, ranks, h, lora_b, gates.astype(jnp.float32), base)
