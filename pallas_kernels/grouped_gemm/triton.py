"""The sorted path in Pallas Triton kernels: gather on load, scatter on store, base added in place.

  shrink   h[e] = A[u]·x[token of e] for the rows of a tile, one adapter u and one part of D a
           program; the parts stay apart as float32 planes (split-K without atomics)
  expand   y[token] = base[token] + Σ_c gate_c · h_c·B[u_c]: sums the planes, loops over the tile's
           set of adapters in registers and writes every row once
  fused    both for a whole tile, h never leaving registers
  outer    d weights[u] = Σ gate·hᵀ·x over the rows of adapter u, for the backward pass

Weights arrive as (L·K, R, ·) with the slot of layer l at l·K + u, so that no layer is sliced off.
Axes beyond the table: M = N·k entries, S planes, W projections that share x, T tiles, c adapters in
a tile's set.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.numerics import shape_varying_like, zeros_varying_like
from pallas_kernels.types import Tiles


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What a program of each kernel works on. Powers of two; a product needs 16 of everything."""

    rows: int  # of a tile
    rank: int  # columns of h
    inner: int  # of D, a step of the shrink
    outer: int  # of F, a step of the expand
    planes: int  # parts of D that are summed apart
    parts: int  # parts of F that different programs write
    warps: int
    stages: int = 2


def choose_blocks(
    *, block: int, num_tiles: int, rank: int, d_in: int, d_out: int, itemsize: int
) -> Blocks:
    """Blocks for an H200: 132 processors, and 227 KiB of shared memory each.

    Planes and parts multiply the programs until there are about two for each processor, as long as
    a plane costs little beside x and y (its R numbers are written and read once in float32).
    """
    rows = max(16, _power_of_two(block))
    columns = max(16, min(64, _power_of_two(rank)))
    inner = 64 if itemsize > 2 else 128 if rows <= 64 else 64
    outer = 64 if itemsize > 2 else 128 if rows <= 64 else 64
    programs = max(1, num_tiles)
    steps = pl.cdiv(d_in, inner)
    planes = 1
    while planes < 32 and programs * planes < 160 and 2 * planes <= steps and planes * rows < 512:
        planes *= 2
    parts = 1
    while programs * parts < 264 and 2 * parts <= pl.cdiv(d_out, outer):
        parts *= 2
    return Blocks(
        rows=rows, rank=columns, inner=inner, outer=outer, planes=planes, parts=parts,
        warps=8 if rows >= 128 else 4,
    )  # fmt: skip


def forward(
    x: Float[Array, "N D"],
    lora_a: Sequence[Float[Array, "LK R D"]],
    lora_b: Sequence[Float[Array, "LK R F"]],
    gates: Float[Array, "N k"],
    base: Sequence[Float[Array, "N F"]],
    *,
    ranks: Sequence[Int[Array, " LK"]],
    first_slot: Int[Array, " 1"],
    tiles: Tiles,
    interpret: bool,
) -> tuple[Float[Array, "N F"], ...]:
    """y of every projection; slot u of layer l lies at l·K + u, with first_slot = l·K."""
    num_tokens, top_k = gates.shape
    flat_gates = gates.astype(jnp.float32).reshape(-1)
    how = functools.partial(dict, top_k=top_k, interpret=interpret)
    if len(lora_a) == 1 and is_fused(num_tokens=num_tokens, rank=lora_a[0].shape[1]):
        blocks = _blocks_for(x, lora_a[0], lora_b[0], tiles)
        y = fused(
            x, lora_a[0], lora_b[0], ranks[0], first_slot, flat_gates, base[0], tiles, blocks,
            **how(),
        )  # fmt: skip
        return (y,)
    found = []
    for group in _of_equal_rank(lora_a):
        blocks = [_blocks_for(x, lora_a[w], lora_b[w], tiles) for w in group]
        h = shrink(
            x, [lora_a[w] for w in group], [ranks[w] for w in group], first_slot, tiles, blocks[0],
            **how(),
        )  # fmt: skip
        for i, w in enumerate(group):
            y = expand(
                h, i, lora_b[w], ranks[w], first_slot, flat_gates, base[w], tiles, blocks[i],
                **how(),
            )  # fmt: skip
            found.append((w, y))
    return tuple(y for _, y in sorted(found, key=lambda each: each[0]))


def gradients(
    x: Float[Array, "N D"],
    lora_a: Sequence[Float[Array, "LK R D"]],
    lora_b: Sequence[Float[Array, "LK R F"]],
    gates: Float[Array, "N k"],
    dy: Sequence[Float[Array, "N F"]],
    *,
    ranks: Sequence[Int[Array, " LK"]],
    first_slot: Int[Array, " 1"],
    tiles: Tiles,
    ids: Int[Array, "N k"],
    by_adapter: tuple[Int[Array, " M"], Int[Array, " K_and_end"]],
    interpret: bool,
) -> list[tuple[Array, Array, Array, Array]]:
    """(dx, d lora_a, d lora_b, d gates) of every projection, weights' of one layer (K, R, ·).

    dx is the same update with the roles of A and B exchanged: both lie contraction last.
    """
    top_k = gates.shape[1]
    flat_gates = gates.astype(jnp.float32).reshape(-1)
    how = functools.partial(dict, top_k=top_k, interpret=interpret)
    found = []
    for a, b, rank, dy_w in zip(lora_a, lora_b, ranks, dy, strict=True):
        there, back = _blocks_for(x, a, b, tiles), _blocks_for(dy_w, b, a, tiles)
        h = shrink(x, [a], [rank], first_slot, tiles, there, **how())
        dh = shrink(dy_w, [b], [rank], first_slot, tiles, back, **how())
        zeros = zeros_varying_like(x, x.shape, x.dtype if len(dy) == 1 else jnp.float32)
        dx = expand(dh, 0, a, rank, first_slot, flat_gates, zeros, tiles, back, **how())
        into_a, into_b = (
            outer(
                left,
                0,
                right,
                flat_gates,
                rank,
                first_slot,
                *by_adapter,
                blocks,
                rank=weight.shape[1],
                dtype=weight.dtype,
                **how(),
            )  # fmt: skip
            for left, right, blocks, weight in ((dh, x, there, a), (h, dy_w, back, b))
        )
        # What is not in a tile was never written.
        product = jnp.sum(h, axis=0)[:, 0] * jnp.sum(dh, axis=0)[:, 0]
        product = jnp.where((ids >= 0).reshape(-1, 1), product[:, : a.shape[1]], 0)
        d_gates = jnp.sum(product, axis=1).reshape(gates.shape).astype(gates.dtype)
        found.append((dx, into_a, into_b, d_gates))
    return found


def is_fused(*, num_tokens: int, rank: int) -> bool:
    """Whether h stays in registers: there are tiles enough without planes, and h is one block."""
    return num_tokens >= 4096 and rank <= 64


def _blocks_for(x, lora_a, lora_b, tiles: Tiles) -> Blocks:
    return choose_blocks(
        block=tiles.block, num_tiles=tiles.start.size, rank=lora_a.shape[1], d_in=x.shape[1],
        d_out=lora_b.shape[2], itemsize=max(x.dtype.itemsize, lora_b.dtype.itemsize),
    )  # fmt: skip


def _of_equal_rank(weights) -> list[list[int]]:
    """Projections that one shrink can serve."""
    groups: dict = {}
    for w, each in enumerate(weights):
        groups.setdefault((each.shape, each.dtype), []).append(w)
    return list(groups.values())


def shrink(
    x: Float[Array, "N D"],
    weights: Sequence[Float[Array, "LK R D"]],
    ranks: Sequence[Int[Array, " LK"]],
    first_slot: Int[Array, " 1"],
    tiles: Tiles,
    blocks: Blocks,
    *,
    top_k: int,
    interpret: bool,
) -> Float[Array, "S M W Rp"]:
    """h of every entry for every projection, x read once; entries without a tile are not written.

    Rp is R rounded up to whole blocks of columns; what is past an adapter's rank is zero.
    """
    num_tokens, d_in = x.shape
    passes, num_tiles, width = tiles.adapters.shape
    column_blocks = pl.cdiv(weights[0].shape[1], blocks.rank)
    shape = (blocks.planes, num_tokens * top_k, len(weights), column_blocks * blocks.rank)
    steps = pl.cdiv(pl.cdiv(d_in, blocks.inner), blocks.planes)

    def kernel(first_ref, entries_ref, start_ref, rows_ref, adapters_ref, x_ref, *rest):
        weight_refs, rank_refs, (h_ref,) = _split(rest, len(weights), len(weights), 1)
        tile, member, rest_id = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        plane, column_block = rest_id // column_blocks, rest_id % column_blocks
        p, t = tile // num_tiles, tile % num_tiles
        slot = adapters_ref[p, t, member]

        @pl.when(slot >= 0)
        def _():
            entry, token = _rows_of(
                entries_ref, p, start_ref[p, t], rows_ref[p, t], member, blocks, shape[1], top_k
            )
            at = first_ref[0] + slot
            first_column = column_block * blocks.rank
            column = first_column + jnp.arange(blocks.rank, dtype=jnp.int32)
            h = _shrink_rows(
                x_ref, weight_refs, [ref[at] for ref in rank_refs], at, token, first_column,
                num_tokens, plane * steps, steps, blocks,
            )  # fmt: skip
            for w, each in enumerate(h):
                plgpu.store(
                    h_ref.at[plane, entry[:, None], w, column[None, :]],
                    each,
                    mask=(entry < shape[1])[:, None],
                )

    return pl.pallas_call(
        kernel,
        grid=(passes * num_tiles, width, blocks.planes * column_blocks),
        out_shape=shape_varying_like(x, shape, jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="lora_shrink",
    )(first_slot, *_indices(tiles), x, *weights, *ranks)


def expand(
    h: Float[Array, "S M W Rp"],
    projection: int,
    weight: Float[Array, "LK R F"],
    ranks: Int[Array, " LK"],
    first_slot: Int[Array, " 1"],
    gates: Float[Array, " M"],
    base: Float[Array, "N F"],
    tiles: Tiles,
    blocks: Blocks,
    *,
    top_k: int,
    interpret: bool,
) -> Float[Array, "N F"]:
    """base with gate·h·B added in place, one launch a pass; tokens without a tile are not touched."""
    passes, num_tiles, width = tiles.adapters.shape
    num_entries = gates.shape[0]
    num_tokens, d_out = base.shape
    steps = pl.cdiv(pl.cdiv(d_out, blocks.outer), blocks.parts)

    def run(base, p):
        def kernel(
            first_ref,
            entries_ref,
            start_ref,
            rows_ref,
            adapters_ref,
            h_ref,
            weight_ref,
            ranks_ref,
            gates_ref,
            base_ref,
            y_ref,
        ):
            t, part = pl.program_id(0), pl.program_id(1)
            first = first_ref[0]

            @pl.when(rows_ref[p, t] > 0)
            def _():
                members = []
                for c in range(width):
                    slot = adapters_ref[p, t, c]
                    entry, token = _rows_of(
                        entries_ref,
                        p,
                        start_ref[p, t],
                        rows_ref[p, t],
                        c,
                        blocks,
                        num_entries,
                        top_k,
                    )
                    if c == 0:
                        tokens = token
                    at = first + jnp.maximum(slot, 0)
                    rank = jnp.where(slot >= 0, ranks_ref[at], 0)
                    load = functools.partial(
                        _load_h, h_ref, gates_ref, entry, projection, rank, num_entries, blocks
                    )
                    members.append((at, rank, load))
                _expand_rows(
                    members,
                    weight_ref,
                    base_ref,
                    y_ref,
                    tokens,
                    num_tokens,
                    part * steps,
                    steps,
                    blocks,
                )

        return pl.pallas_call(
            kernel,
            grid=(num_tiles, blocks.parts),
            out_shape=shape_varying_like(base, base.shape, base.dtype),
            input_output_aliases={9: 0},
            compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=interpret,
            name="lora_expand",
        )(first_slot, *_indices(tiles), h, weight, ranks, gates, base)

    for p in range(passes):
        base = run(base, p)
    return base


def fused(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "LK R D"],
    lora_b: Float[Array, "LK R F"],
    ranks: Int[Array, " LK"],
    first_slot: Int[Array, " 1"],
    gates: Float[Array, " M"],
    base: Float[Array, "N F"],
    tiles: Tiles,
    blocks: Blocks,
    *,
    top_k: int,
    interpret: bool,
) -> Float[Array, "N F"]:
    """`expand` of `shrink` in one launch a pass, for many tokens and ranks of one block."""
    passes, num_tiles, width = tiles.adapters.shape
    num_entries = gates.shape[0]
    num_tokens, d_out = base.shape
    in_steps, out_steps = pl.cdiv(x.shape[1], blocks.inner), pl.cdiv(d_out, blocks.outer)
    assert lora_a.shape[1] <= blocks.rank

    def run(base, p):
        def kernel(
            first_ref,
            entries_ref,
            start_ref,
            rows_ref,
            adapters_ref,
            x_ref,
            a_ref,
            b_ref,
            ranks_ref,
            gates_ref,
            base_ref,
            y_ref,
        ):
            t = pl.program_id(0)

            @pl.when(rows_ref[p, t] > 0)
            def _():
                members = []
                for c in range(width):
                    slot = adapters_ref[p, t, c]
                    entry, token = _rows_of(
                        entries_ref,
                        p,
                        start_ref[p, t],
                        rows_ref[p, t],
                        c,
                        blocks,
                        num_entries,
                        top_k,
                    )
                    if c == 0:
                        tokens = token
                    at = first_ref[0] + jnp.maximum(slot, 0)
                    rank = jnp.where(slot >= 0, ranks_ref[at], 0)
                    (h,) = _shrink_rows(
                        x_ref,
                        [a_ref],
                        [rank],
                        at,
                        token,
                        jnp.int32(0),
                        num_tokens,
                        0,
                        in_steps,
                        blocks,
                    )
                    gate = plgpu.load(gates_ref.at[entry], mask=entry < num_entries, other=0)
                    members.append((at, rank, lambda _, gated=h * gate[:, None]: gated))
                _expand_rows(
                    members, b_ref, base_ref, y_ref, tokens, num_tokens, 0, out_steps, blocks
                )

        return pl.pallas_call(
            kernel,
            grid=(num_tiles,),
            out_shape=shape_varying_like(base, base.shape, base.dtype),
            input_output_aliases={10: 0},
            compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=interpret,
            name="lora_fused",
        )(first_slot, *_indices(tiles), x, lora_a, lora_b, ranks, gates, base)

    for p in range(passes):
        base = run(base, p)
    return base


def outer(
    h: Float[Array, "S M W Rp"],
    projection: int,
    x: Float[Array, "N D"],
    gates: Float[Array, " M"],
    ranks: Int[Array, " LK"],
    first_slot: Int[Array, " 1"],
    order: Int[Array, " M"],
    offsets: Int[Array, " K_and_end"],
    blocks: Blocks,
    *,
    rank: int,
    top_k: int,
    dtype: jnp.dtype,
    interpret: bool,
) -> Float[Array, "K R D"]:
    """Σ gate·h[e]ᵀ·x[token of e] over the entries of each adapter; zeros where it has none.

    `order` holds the entries sorted by adapter, `offsets` where each adapter's begin.
    """
    num_tokens, d_in = x.shape
    num_entries, num_slots = gates.shape[0], offsets.shape[0] - 1
    column_blocks = pl.cdiv(rank, blocks.rank)
    rows = 32 if blocks.rank >= 64 else 64

    def kernel(first_ref, order_ref, offsets_ref, h_ref, x_ref, gates_ref, ranks_ref, out_ref):
        slot, part, column_block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        begin, end = offsets_ref[slot], offsets_ref[slot + 1]
        column = column_block * blocks.rank + jnp.arange(blocks.rank, dtype=jnp.int32)
        inner = part * blocks.inner + jnp.arange(blocks.inner, dtype=jnp.int32)
        own_rank = ranks_ref[first_ref[0] + slot]

        def add(step, total):
            row = begin + step * rows + jnp.arange(rows, dtype=jnp.int32)
            entry = plgpu.load(order_ref.at[row], mask=row < end, other=num_entries)
            token = entry // top_k
            left = _load_h(
                h_ref, gates_ref, entry, projection, own_rank, num_entries,
                blocks, column_block,
            )  # fmt: skip
            right = plgpu.load(
                x_ref.at[token[:, None], inner[None, :]],
                mask=(token < num_tokens)[:, None] & (inner < d_in)[None, :],
                other=0,
            )
            return total + _wide_dot(left.T, right)

        zeros = jnp.zeros((blocks.rank, blocks.inner), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(end - begin, rows), add, zeros)
        plgpu.store(
            out_ref.at[slot, column[:, None], inner[None, :]],
            total.astype(dtype),
            mask=(column < rank)[:, None] & (inner < d_in)[None, :],
        )

    return pl.pallas_call(
        kernel,
        grid=(num_slots, pl.cdiv(d_in, blocks.inner), column_blocks),
        out_shape=shape_varying_like(x, (num_slots, rank, d_in), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=blocks.stages),
        interpret=interpret,
        name="lora_outer",
    )(first_slot, order, offsets, h, x, gates, ranks)


def _rows_of(entries_ref, p, start, rows, member, blocks: Blocks, num_entries: int, top_k: int):
    """The entries of a tile's rows for one of its adapters, and their tokens; M and N past its end."""
    lane = jnp.arange(blocks.rows, dtype=jnp.int32)
    entry = plgpu.load(entries_ref.at[p, start + lane, member], mask=lane < rows, other=num_entries)
    return entry, entry // top_k


def _shrink_rows(
    x_ref, weight_refs, ranks, at, token, first_column, num_tokens, first, steps, blocks
):
    """x[token]·A[at]ᵀ over `steps` blocks of D from block `first`, for every projection."""
    d_in = x_ref.shape[1]
    live = (token < num_tokens)[:, None]
    column = first_column + jnp.arange(blocks.rank, dtype=jnp.int32)

    def add(step, sums):
        inner = (first + step) * blocks.inner + jnp.arange(blocks.inner, dtype=jnp.int32)
        inside = (inner < d_in)[None, :]
        x = plgpu.load(x_ref.at[token[:, None], inner[None, :]], mask=live & inside, other=0)
        new = []
        for weight_ref, rank, total in zip(weight_refs, ranks, sums, strict=True):
            a = plgpu.load(
                weight_ref.at[at, column[:, None], inner[None, :]],
                mask=(column < rank)[:, None] & inside,
                other=0,
            )
            new.append(total + _exact_dot(x, a.T))
        return tuple(new)

    zeros = jnp.zeros((blocks.rows, blocks.rank), jnp.float32)
    # No adapter has columns past its rank, so blocks of them cost neither bytes nor products.
    widest = functools.reduce(jnp.maximum, ranks)
    used = steps * (first_column < widest).astype(jnp.int32)
    sums = lax.fori_loop(0, used, add, (zeros,) * len(weight_refs))
    # Selected, as an x that is not finite times a masked zero is NaN.
    return [
        jnp.where((column < rank)[None, :], total, 0)
        for rank, total in zip(ranks, sums, strict=True)
    ]


def _load_h(h_ref, gates_ref, entry, projection, rank, num_entries, blocks, column_block):
    """gate·h of one block of columns, the planes summed."""
    column = column_block * blocks.rank + jnp.arange(blocks.rank, dtype=jnp.int32)
    live = (entry < num_entries)[:, None] & (column < rank)[None, :]
    h = jnp.zeros(live.shape, jnp.float32)
    for plane in range(h_ref.shape[0]):
        h = h + plgpu.load(
            h_ref.at[plane, entry[:, None], projection, column[None, :]], mask=live, other=0
        )
    gate = plgpu.load(gates_ref.at[entry], mask=entry < num_entries, other=0)
    return h * gate[:, None]


def _expand_rows(members, weight_ref, base_ref, y_ref, token, num_tokens, first, steps, blocks):
    """y[token] = base[token] + Σ h·B over `steps` blocks of F from block `first`."""
    rank, d_out = weight_ref.shape[1:]
    column_blocks = pl.cdiv(rank, blocks.rank)
    live = (token < num_tokens)[:, None]
    if column_blocks == 1:  # h is loaded once and stays
        members = [(at, own, lambda _, h=load(0): h) for at, own, load in members]

    def write(step, _):
        wide = (first + step) * blocks.outer + jnp.arange(blocks.outer, dtype=jnp.int32)
        inside = (wide < d_out)[None, :]
        total = jnp.zeros((blocks.rows, blocks.outer), jnp.float32)
        for at, own, load in members:

            def add(block, total, at=at, own=own, load=load):
                column = block * blocks.rank + jnp.arange(blocks.rank, dtype=jnp.int32)
                b = plgpu.load(
                    weight_ref.at[at, column[:, None], wide[None, :]],
                    mask=(column < own)[:, None] & inside,
                    other=0,
                )
                return total + _wide_dot(load(block), b)

            if column_blocks == 1:
                total = add(0, total)
            else:
                total = lax.fori_loop(0, pl.cdiv(own, blocks.rank), add, total)
        base = plgpu.load(base_ref.at[token[:, None], wide[None, :]], mask=live & inside, other=0)
        y = base.astype(jnp.float32) + total
        plgpu.store(
            y_ref.at[token[:, None], wide[None, :]], y.astype(y_ref.dtype), mask=live & inside
        )
        return _

    lax.fori_loop(0, steps, write, 0)


def _exact_dot(a, b):
    """a·b in float32 from exact products: halves on tensor cores, the rest in full float32."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return _dot(a, b)


def _wide_dot(a, b):
    """a·b for float32 a: with a half b as two or three products of bfloat16 on tensor cores.

    A float32 is the sum of two bfloat16 to one part in 2¹⁷, a float16 exactly.
    """
    if b.dtype == jnp.float32:
        return _dot(a, b)
    high, low = _halves(a)
    if b.dtype == jnp.bfloat16:
        return _dot(high, b) + _dot(low, b)
    b_high, b_low = _halves(b.astype(jnp.float32))
    return _dot(high, b_high) + _dot(low, b_high) + _dot(high, b_low)


def _halves(a):
    high = a.astype(jnp.bfloat16)
    rest = a - high.astype(jnp.float32)
    # What overflows stays infinite: ∞ − ∞ would make it NaN.
    finite = jnp.abs(a) < jnp.float32(jnp.inf)
    return high, jnp.where(finite, rest, 0).astype(jnp.bfloat16)


def _dot(a, b):
    return lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _indices(tiles: Tiles):
    return tiles.entries, tiles.start, tiles.rows, tiles.adapters


def _split(refs, *counts):
    at = 0
    for count in counts:
        yield refs[at : at + count]
        at += count


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
