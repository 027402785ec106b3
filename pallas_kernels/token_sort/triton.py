"""The sort of rows by group on a GPU: a row's place is how many keys are smaller.

A key is code·rows + row, so no two are equal and the order is stable. Up to 8192 rows every program
compares its own with all others: a few million comparisons, and no communication. Above that a
first kernel counts groups in blocks of rows, and a row compares itself only within its block.
Left to XLA: the running sum over blocks. No atomics anywhere.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.arrays import Array, Int
from pallas_kernels.numerics import shape_varying_like

ONE_KERNEL_ROWS = 8192
_BLOCK = 64  # rows of a program; 64 × 64 keys are compared at once


def sort_rows(
    codes: Int[Array, "P rows"], groups: int, *, interpret: bool
) -> tuple[Int[Array, "P rows"], Int[Array, "P G_and_end"]]:
    """As `xla.sort_rows`."""
    num_sorts, num_rows = codes.shape
    boundaries = groups + 1
    if num_rows == 0:
        return codes, jnp.zeros((num_sorts, boundaries), jnp.int32)
    row_programs = pl.cdiv(num_rows, _BLOCK)
    call = functools.partial(
        pl.pallas_call,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )
    if num_rows <= ONE_KERNEL_ROWS and boundaries * num_rows <= jnp.iinfo(jnp.int32).max:
        order, offsets = call(
            functools.partial(_rank_all, num_rows=num_rows, groups=groups),
            grid=(num_sorts, row_programs + pl.cdiv(boundaries, _BLOCK)),
            out_shape=[
                shape_varying_like(codes, codes.shape, jnp.int32),
                shape_varying_like(codes, (num_sorts, boundaries), jnp.int32),
            ],
            name="token_sort_rank",
        )(codes)
        return order, offsets

    counts = call(
        functools.partial(_count, num_rows=num_rows, boundaries=boundaries),
        grid=(num_sorts, row_programs, pl.cdiv(boundaries, _BLOCK)),
        out_shape=shape_varying_like(codes, (num_sorts, row_programs, boundaries), jnp.int32),
        name="token_sort_count",
    )(codes)
    total = jnp.sum(counts, axis=1)
    offsets = jnp.cumsum(total, axis=1, dtype=jnp.int32) - total
    first = offsets[:, None, :] + jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts
    order = call(
        functools.partial(_rank_in_block, num_rows=num_rows),
        grid=(num_sorts, row_programs),
        out_shape=shape_varying_like(codes, codes.shape, jnp.int32),
        name="token_sort_place",
    )(codes, first)
    return order, offsets


def _rank_all(
    codes_ref,  # (P, rows)
    order_ref,  # (P, rows)
    offsets_ref,  # (P, G + 1)
    *,
    num_rows: int,
    groups: int,
):
    """The place of `_BLOCK` rows, or, in the last programs, where `_BLOCK` groups begin."""
    sort, program = pl.program_id(0), pl.program_id(1)
    lane = jnp.arange(_BLOCK, dtype=jnp.int32)
    row = program * _BLOCK + lane
    # A boundary g is a row before all others of group g: its place is where the group begins.
    row_programs = pl.cdiv(num_rows, _BLOCK)
    group = (program - row_programs) * _BLOCK + lane
    is_row = program < row_programs
    own = plgpu.load(codes_ref.at[sort, row], mask=is_row & (row < num_rows), other=0)
    key = jnp.where(is_row, own * num_rows + row, group * num_rows)

    def count(chunk, smaller):
        other = chunk * _BLOCK + lane
        # Those past the end come last.
        codes = plgpu.load(codes_ref.at[sort, other], mask=other < num_rows, other=groups)
        less = (codes * num_rows + other)[None, :] < key[:, None]
        less = less & (other < num_rows)[None, :]
        return smaller + jnp.sum(less.astype(jnp.int32), axis=1)

    place = jax.lax.fori_loop(0, row_programs, count, jnp.zeros(_BLOCK, jnp.int32))
    _store_at(order_ref.at, sort, place, row, mask=is_row & (row < num_rows), end=num_rows)
    plgpu.store(
        offsets_ref.at[sort, group], place, mask=jnp.logical_not(is_row) & (group <= groups)
    )


def _count(
    codes_ref,  # (P, rows)
    counts_ref,  # (P, blocks, G + 1)
    *,
    num_rows: int,
    boundaries: int,
):
    """How many of a block's rows are in each of `_BLOCK` groups."""
    sort, block, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    lane = jnp.arange(_BLOCK, dtype=jnp.int32)
    row, group = block * _BLOCK + lane, chunk * _BLOCK + lane
    codes = plgpu.load(codes_ref.at[sort, row], mask=row < num_rows, other=-1)
    count = jnp.sum((codes[:, None] == group[None, :]).astype(jnp.int32), axis=0)
    plgpu.store(counts_ref.at[sort, block, group], count, mask=group < boundaries)


def _rank_in_block(
    codes_ref,  # (P, rows)
    first_ref,  # (P, blocks, G + 1)
    order_ref,  # (P, rows)
    *,
    num_rows: int,
):
    """A row's place: where its group begins for this block, and the same group's rows before it."""
    sort, block = pl.program_id(0), pl.program_id(1)
    lane = jnp.arange(_BLOCK, dtype=jnp.int32)
    row = block * _BLOCK + lane
    live = row < num_rows
    codes = plgpu.load(codes_ref.at[sort, row], mask=live, other=-1)
    first = plgpu.load(first_ref.at[sort, block, codes], mask=live, other=0)
    same = (codes[:, None] == codes[None, :]) & (lane[None, :] < lane[:, None])
    place = first + jnp.sum(same.astype(jnp.int32), axis=1)
    _store_at(order_ref.at, sort, place, row, mask=live, end=num_rows)


def _store_at(at, sort, place, row, *, mask, end: int):
    # Interpreted, a masked lane writes back what it read; sent past the end, it writes nothing.
    plgpu.store(at[sort, jnp.where(mask, place, end)], row, mask=mask)
