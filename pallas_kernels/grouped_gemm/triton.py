"""The sorted path in Pallas Triton kernels: gather on load, scatter on store, base added in place.

  shrink   h[e] = A[u]·x[token of e] for the rows of a tile, one adapter u and one part of D a
           program; the parts stay apart as float32 planes (split-K without atomics)
  expand   y[token] = base[token] + Σ_c gate_c · h_c·B[u_c]: sums the planes, adds up the tile's set
           of adapters in registers and writes every row once
  fused    both for a whole tile, h never leaving registers
  outer    d weights[u] = Σ gate·hᵀ·x over the entries of adapter u, for the backward pass

Weights arrive as (L·K, R, ·) with slot u of layer l at l·K + u, so that no layer is sliced off.
Axes beyond the table: M = N·k entries, S planes, W projections that share x, T tiles, c adapters in
a tile's set, Rp = R rounded up to whole blocks of columns.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.grouped_gemm.blocks import Blocks, choose_blocks, is_fused
from pallas_kernels.numerics import shape_varying_like, zeros_varying_like
from pallas_kernels.types import Tiles


@dataclasses.dataclass(frozen=True)
class Update:
    """What the kernels of one routed update share."""

    tiles: Tiles
    first_slot: Int[Array, " 1"]  # l·K
    gates: Float[Array, "N k"]
    interpret: bool

    @property
    def num_tokens(self) -> int:
        return self.gates.shape[0]

    @property
    def num_entries(self) -> int:
        return self.gates.size

    def flat_gates(self) -> Float[Array, " M"]:
        return self.gates.astype(jnp.float32).reshape(-1)

    def blocks(self, x: Array, lora_a: Array, lora_b: Array) -> Blocks:
        return choose_blocks(
            block=self.tiles.block,
            num_tiles=self.tiles.start.size,
            rank=lora_a.shape[1],
            d_in=x.shape[1],
            d_out=lora_b.shape[2],
            itemsize=_itemsize(x, lora_a, lora_b),
            width=self.tiles.adapters.shape[2],
            float16=lora_b.dtype == jnp.float16,
        )

    def programs(self, blocks: Blocks) -> int:
        """Programs of one pass: a tile of more rows than a program takes has several."""
        return self.tiles.start.shape[1] * pl.cdiv(self.tiles.block, blocks.rows)

    def launch(self, name, kernel, grid, out, blocks: Blocks, *operands, in_place=None):
        """Runs `kernel(tile_refs, *operand_refs, out_ref)`; out takes over operand `in_place`."""
        tiles = self.tiles
        indices = (self.first_slot, tiles.entries, tiles.start, tiles.rows, tiles.adapters)
        count = len(indices)
        return pl.pallas_call(
            lambda *refs: kernel(refs[:count], *refs[count:]),
            grid=grid,
            out_shape=out,
            input_output_aliases={} if in_place is None else {count + in_place: 0},
            compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=self.interpret,
            name=name,
        )(*indices, *operands)


def forward(
    update: Update,
    x: Float[Array, "N D"],
    lora_a: Sequence[Array],
    lora_b: Sequence[Array],
    base: Sequence[Array],
    ranks: Sequence[Int[Array, " LK"]],
) -> list[Array]:
    """y (N, F) of every projection, R and F its own: one launch for every h, one for each y."""
    if len(lora_a) == 1 and is_fused(
        num_tokens=update.num_tokens,
        rank=lora_a[0].shape[1],
        width=update.tiles.adapters.shape[2],
        itemsize=_itemsize(x, lora_a[0], lora_b[0]),
    ):
        return [fused(update, x, lora_a[0], lora_b[0], base[0], ranks[0])]
    h = _shared_shrink(update, x, lora_a, lora_b, ranks)
    return [
        expand(update, h[w], lora_b[w], base[w], ranks[w], update.blocks(x, lora_a[w], lora_b[w]))
        for w in range(len(lora_a))
    ]


def gradients(
    update: Update,
    x: Float[Array, "N D"],
    lora_a: Sequence[Array],
    lora_b: Sequence[Array],
    dy: Sequence[Array],
    ranks: Sequence[Int[Array, " LK"]],
    *,
    ids: Int[Array, "N k"],
    by_adapter: tuple[Int[Array, " M"], Int[Array, " K_and_end"]],
) -> list[tuple[Array, Array, Array, Array]]:
    """(dx, d lora_a, d lora_b, d gates) of every projection, the weights' of one layer (K, R, ·).

    dx is the same update with the roles of A and B exchanged, as both lie contraction last.
    `by_adapter` holds the entries sorted by adapter and where each adapter's begin.
    """
    found = []
    shared = _shared_shrink(update, x, lora_a, lora_b, ranks)
    for a, b, own, dy_w, h in zip(lora_a, lora_b, ranks, dy, shared, strict=True):
        there, back = update.blocks(x, a, b), update.blocks(dy_w, b, a)
        (dh,) = _shared_shrink(update, dy_w, [b], [a], [own])
        zeros = zeros_varying_like(x, x.shape, x.dtype if len(dy) == 1 else jnp.float32)
        dx = expand(update, dh, a, zeros, own, back)
        d_a = outer(update, dh, x, own, by_adapter, there, like=a)
        d_b = outer(update, h, dy_w, own, by_adapter, back, like=b)
        # h is Σ over planes of what both shrinks left; an entry without a tile was never written.
        product = jnp.sum(h.planes[:, :, h.at], axis=0) * jnp.sum(dh.planes[:, :, dh.at], axis=0)
        d_gates = jnp.sum(jnp.where((ids >= 0).reshape(-1, 1), product, 0), axis=1)
        found.append((dx, d_a, d_b, d_gates.reshape(ids.shape).astype(update.gates.dtype)))
    return found


def _itemsize(*arrays: Array) -> int:
    return max(each.dtype.itemsize for each in arrays)


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """h of one projection among those that were computed together."""

    planes: Float[Array, "S M W Rp"]
    at: int  # of W


def _shared_shrink(update, x, lora_a, lora_b, ranks) -> list[Shrunk]:
    """h of every projection, in one launch for those of one shape and dtype."""
    groups: dict = {}
    for w, each in enumerate(lora_a):
        groups.setdefault((each.shape, each.dtype), []).append(w)
    found = {}
    for members in groups.values():
        blocks = update.blocks(x, lora_a[members[0]], lora_b[members[0]])
        planes = shrink(
            update, x, [lora_a[w] for w in members], [ranks[w] for w in members], blocks
        )
        found |= {w: Shrunk(planes, at) for at, w in enumerate(members)}
    return [found[w] for w in range(len(lora_a))]


def shrink(
    update: Update,
    x: Float[Array, "N D"],
    weights: Sequence[Float[Array, "LK R D"]],
    ranks: Sequence[Int[Array, " LK"]],
    blocks: Blocks,
) -> Float[Array, "S M W Rp"]:
    """h of every entry for every projection, zero past its adapter's rank.

    Entries without a tile are not written.
    """
    passes, _, width = update.tiles.adapters.shape
    column_blocks = pl.cdiv(weights[0].shape[1], blocks.rank)
    steps = pl.cdiv(pl.cdiv(x.shape[1], blocks.inner), blocks.planes)
    shape = (blocks.planes, update.num_entries, len(weights), column_blocks * blocks.rank)

    def kernel(tile_refs, x_ref, *refs):
        weight_refs, rank_refs, h_ref = refs[: len(weights)], refs[len(weights) : -1], refs[-1]
        program, part = pl.program_id(0), pl.program_id(1)
        plane, column = part // column_blocks, part % column_blocks * blocks.rank
        # The adapters of a tile follow one another, as they read the same x; and so do the passes,
        # whose tiles of one number mostly use the same adapter.
        c, tile = program % width, program // width
        slot, rows = _tile(tile_refs, tile % passes, tile // passes, c, update, blocks)

        @pl.when(slot.known & (rows.count > 0))
        def _():
            given = [
                (ref, slot.at, ranks_ref[slot.at])
                for ref, ranks_ref in zip(weight_refs, rank_refs, strict=True)
            ]
            h = shrink_rows(x_ref, given, rows, column, plane * steps, steps)
            for w, each in enumerate(h):
                columns = column + jnp.arange(blocks.rank, dtype=jnp.int32)
                plgpu.store(
                    h_ref.at[plane, rows.entry[:, None], w, columns[None, :]],
                    each,
                    mask=rows.live[:, None],
                )

    return update.launch(
        "lora_shrink",
        kernel,
        (update.programs(blocks) * passes * width, blocks.planes * column_blocks),
        shape_varying_like(x, shape, jnp.float32),
        blocks,
        x,
        *weights,
        *ranks,
    )


def expand(
    update: Update,
    h: Shrunk,
    weight: Float[Array, "LK R F"],
    base: Float[Array, "N F"],
    ranks: Int[Array, " LK"],
    blocks: Blocks,
) -> Float[Array, "N F"]:
    """base with gate·h·B added in place, a launch a pass; a token without a tile is not touched."""
    passes, _, width = update.tiles.adapters.shape
    steps = pl.cdiv(pl.cdiv(base.shape[1], blocks.outer), blocks.parts)

    def run(p, base):
        def kernel(tile_refs, h_ref, weight_ref, ranks_ref, gates_ref, base_ref, y_ref):
            first = pl.program_id(1) * steps
            members = []
            for c in range(width):
                slot, rows = _tile(tile_refs, p, pl.program_id(0), c, update, blocks)
                own = jnp.where(slot.known, ranks_ref[slot.at], 0)
                load = functools.partial(_load_h, h_ref, h.at, gates_ref, rows, own)
                members.append((slot.at, own, load, rows))

            @pl.when(members[0][3].count > 0)
            def _():
                _expand_rows(members, weight_ref, base_ref, y_ref, first, steps)

        return update.launch(
            "lora_expand",
            kernel,
            (update.programs(blocks), blocks.parts),
            shape_varying_like(base, base.shape, base.dtype),
            blocks,
            h.planes,
            weight,
            ranks,
            update.flat_gates(),
            base,
            in_place=4,
        )

    for p in range(passes):
        base = run(p, base)
    return base


def fused(
    update: Update,
    x: Float[Array, "N D"],
    lora_a: Float[Array, "LK R D"],
    lora_b: Float[Array, "LK R F"],
    base: Float[Array, "N F"],
    ranks: Int[Array, " LK"],
) -> Float[Array, "N F"]:
    """`expand` of `shrink` in one launch a pass, for many tokens and a rank of one block."""
    passes, _, width = update.tiles.adapters.shape
    blocks = update.blocks(x, lora_a, lora_b)
    in_steps, out_steps = pl.cdiv(x.shape[1], blocks.inner), pl.cdiv(base.shape[1], blocks.outer)
    assert lora_a.shape[1] <= blocks.rank

    def run(p, base):
        def kernel(tile_refs, x_ref, a_ref, b_ref, ranks_ref, gates_ref, base_ref, y_ref):
            tiles = [_tile(tile_refs, p, pl.program_id(0), c, update, blocks) for c in range(width)]

            @pl.when(tiles[0][1].count > 0)
            def _():
                own = [jnp.where(slot.known, ranks_ref[slot.at], 0) for slot, _ in tiles]
                given = [(a_ref, slot.at, r) for (slot, _), r in zip(tiles, own, strict=True)]
                found = shrink_rows(x_ref, given, tiles[0][1], jnp.int32(0), 0, in_steps)
                members = []
                for (slot, rows), r, h in zip(tiles, own, found, strict=True):
                    # A row whose set is smaller has no entry, and no gate that is not zero.
                    gate = _load_gates(gates_ref, rows)
                    gated = jnp.where(rows.live[:, None], h * gate[:, None], 0)
                    members.append((slot.at, r, lambda _, gated=gated: gated, rows))
                _expand_rows(members, b_ref, base_ref, y_ref, 0, out_steps)

        return update.launch(
            "lora_fused",
            kernel,
            (update.programs(blocks),),
            shape_varying_like(base, base.shape, base.dtype),
            blocks,
            x,
            lora_a,
            lora_b,
            ranks,
            update.flat_gates(),
            base,
            in_place=5,
        )

    for p in range(passes):
        base = run(p, base)
    return base


def outer(
    update: Update,
    h: Shrunk,
    x: Float[Array, "N D"],
    ranks: Int[Array, " LK"],
    by_adapter: tuple[Int[Array, " M"], Int[Array, " K_and_end"]],
    blocks: Blocks,
    *,
    like: Float[Array, "LK R D"],
) -> Float[Array, "K R D"]:
    """Σ gate·h[e]ᵀ·x[token of e] over the entries e of each adapter; zeros where it has none."""
    order, offsets = by_adapter
    num_slots, (rank, d_in) = offsets.shape[0] - 1, like.shape[1:]
    # Sums of rank × inner numbers stay in registers, with both halves of h beside them.
    inner = 64 if x.dtype.itemsize <= 2 else 32
    blocks = dataclasses.replace(blocks, rows=32, inner=inner, warps=4)
    if h.planes.shape[0] > 2:  # each plane that a step loads would take registers or shared memory
        h = Shrunk(jnp.sum(h.planes, axis=0, keepdims=True), h.at)

    def kernel(tile_refs, order_ref, offsets_ref, h_ref, x_ref, gates_ref, ranks_ref, out_ref):
        slot, part, column_block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        begin, end = offsets_ref[slot], offsets_ref[slot + 1]
        own = ranks_ref[tile_refs[0][0] + slot]
        inner = part * blocks.inner + jnp.arange(blocks.inner, dtype=jnp.int32)

        def add(step, total):
            row = begin + step * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
            entry = plgpu.load(order_ref.at[row], mask=row < end, other=update.num_entries)
            rows = _Entries(entry, end - begin, update, blocks)
            left = _load_h(h_ref, h.at, gates_ref, rows, own, column_block)
            return total + wide_dot(left.T, load_rows(x_ref, rows, inner))

        zeros = jnp.zeros((blocks.rank, blocks.inner), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(end - begin, blocks.rows), add, zeros)
        column = column_block * blocks.rank + jnp.arange(blocks.rank, dtype=jnp.int32)
        plgpu.store(
            out_ref.at[slot, column[:, None], inner[None, :]],
            total.astype(like.dtype),
            mask=(column < rank)[:, None] & (inner < d_in)[None, :],
        )

    return update.launch(
        "lora_outer",
        kernel,
        (num_slots, pl.cdiv(d_in, blocks.inner), pl.cdiv(rank, blocks.rank)),
        shape_varying_like(x, (num_slots, rank, d_in), like.dtype),
        blocks,
        order,
        offsets,
        h.planes,
        x,
        update.flat_gates(),
        ranks,
    )


class _Slot:
    """One adapter of a tile: where its weights lie, and whether there is one at all."""

    def __init__(self, first, slot):
        self.known = slot >= 0
        self.at = first + jnp.maximum(slot, 0)


class Rows:
    """A block of tokens, N past the end of its tile."""

    def __init__(self, token, inside, blocks: Blocks):
        self.token, self.inside, self.blocks = token, inside, blocks


class _Entries(Rows):
    """The rows of a tile for one of its adapters: an entry each, M past the tile's end."""

    def __init__(self, entry, count, update: Update, blocks: Blocks):
        token = entry // update.gates.shape[1]
        super().__init__(token, token < update.num_tokens, blocks)
        self.entry, self.count = entry, count
        self.live = entry < update.num_entries


def _tile(tile_refs, p, program, c, update: Update, blocks: Blocks) -> tuple[_Slot, _Entries]:
    """Adapter c of the tile, or of the part of one, that a program of pass p computes."""
    first_ref, entries_ref, start_ref, rows_ref, adapters_ref = tile_refs
    cuts = pl.cdiv(update.tiles.block, blocks.rows)
    t, skipped = program // cuts, program % cuts * blocks.rows
    lane = jnp.arange(blocks.rows, dtype=jnp.int32)
    count = rows_ref[p, t] - skipped
    entry = plgpu.load(
        entries_ref.at[p, start_ref[p, t] + skipped + lane, c],
        mask=lane < count,
        other=update.num_entries,
    )
    rows = _Entries(entry, count, update, blocks)
    return _Slot(first_ref[0], adapters_ref[p, t, c]), rows


def shrink_rows(x_ref, weights, rows: Rows, first_column, first, steps):
    """x[token]·A[at]ᵀ over `steps` blocks of D from block `first`, for each (A's ref, at, rank).

    x is read once for all of them.
    """
    blocks = rows.blocks
    column = first_column + jnp.arange(blocks.rank, dtype=jnp.int32)

    def add(step, sums):
        inner = (first + step) * blocks.inner + jnp.arange(blocks.inner, dtype=jnp.int32)
        x = load_rows(x_ref, rows, inner)
        loaded = [load_weight(ref, at, column, inner, rank) for ref, at, rank in weights]
        return tuple(total + _exact_dot(x, a.T) for total, a in zip(sums, loaded, strict=True))

    zeros = jnp.zeros((blocks.rows, blocks.rank), jnp.float32)
    # No adapter has columns past its rank, so blocks of them cost neither bytes nor products.
    used = first_column < functools.reduce(jnp.maximum, [rank for _, _, rank in weights])
    sums = lax.fori_loop(0, steps * used.astype(jnp.int32), add, (zeros,) * len(weights))
    # Selected, as an x that is not finite times a masked zero is NaN.
    return [
        jnp.where((column < rank)[None, :], total, 0)
        for (_, _, rank), total in zip(weights, sums, strict=True)
    ]


def _expand_rows(members, weight_ref, base_ref, y_ref, first, steps):
    """y[token] = base[token] + Σ h·B over `steps` blocks of F from block `first`.

    `members` holds (at, rank, load, rows) for each adapter of the tile; `load(i)` gives block i of
    gate·h.
    """
    rows = members[0][3]
    blocks = rows.blocks
    d_out = weight_ref.shape[2]
    column_blocks = pl.cdiv(weight_ref.shape[1], blocks.rank)
    # One block of h is loaded once for all of F; several are loaded as they are needed.
    held = [load(0) if column_blocks == 1 else None for _, _, load, _ in members]

    def write(step, carry):
        wide = (first + step) * blocks.outer + jnp.arange(blocks.outer, dtype=jnp.int32)
        total = jnp.zeros((blocks.rows, blocks.outer), jnp.float32)
        for (at, own, load, _), h in zip(members, held, strict=True):

            def add(block, total, at=at, own=own, load=load, h=h):
                column = block * blocks.rank + jnp.arange(blocks.rank, dtype=jnp.int32)
                b = load_weight(weight_ref, at, column, wide, own)
                return total + wide_dot(load(block) if h is None else h, b)

            if h is not None:
                total = add(0, total)
            else:
                total = lax.fori_loop(0, pl.cdiv(own, blocks.rank), add, total)
        y = load_rows(base_ref, rows, wide).astype(jnp.float32) + total
        plgpu.store(
            y_ref.at[rows.token[:, None], wide[None, :]],
            y.astype(y_ref.dtype),
            mask=rows.inside[:, None] & (wide < d_out)[None, :],
        )
        return carry

    lax.fori_loop(0, steps, write, 0)


def load_rows(ref, rows: Rows, column):
    """ref[token, column], zero outside."""
    mask = rows.inside[:, None] & (column < ref.shape[1])[None, :]
    return plgpu.load(ref.at[rows.token[:, None], column[None, :]], mask=mask, other=0)


def load_weight(ref, at, row, column, rank):
    """ref[at, row, column], zero outside and past the adapter's rank, which is not read."""
    mask = (row < rank)[:, None] & (column < ref.shape[2])[None, :]
    return plgpu.load(ref.at[at, row[:, None], column[None, :]], mask=mask, other=0)


def _load_gates(gates_ref, rows: _Entries):
    return plgpu.load(gates_ref.at[rows.entry], mask=rows.live, other=0)


def _load_h(h_ref, projection, gates_ref, rows: _Entries, rank, column_block):
    """gate·h of one block of columns, the planes summed."""
    width = rows.blocks.rank
    column = column_block * width + jnp.arange(width, dtype=jnp.int32)
    mask = rows.live[:, None] & (column < rank)[None, :]
    h = jnp.zeros(mask.shape, jnp.float32)
    for plane in range(h_ref.shape[0]):
        at = h_ref.at[plane, rows.entry[:, None], projection, column[None, :]]
        h = h + plgpu.load(at, mask=mask, other=0)
    return h * _load_gates(gates_ref, rows)[:, None]


def _exact_dot(a, b):
    """a·b in float32 from exact products: halves on tensor cores, the rest in full float32."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return _dot(a, b)


def wide_dot(a, b):
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
    wide = high.astype(jnp.float32)
    # What overflows stays infinite: ∞ − ∞ would make it NaN.
    return high, jnp.where(jnp.abs(wide) < jnp.inf, a - wide, 0).astype(jnp.bfloat16)


def _dot(a, b):
    return lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
