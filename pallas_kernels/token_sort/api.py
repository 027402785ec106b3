"""From adapter ids to tiles: rows sorted by adapter, or by set of adapters, in static shapes."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import Array, Int
from pallas_kernels.numerics import known_ids
from pallas_kernels.token_sort import xla
from pallas_kernels.token_sort.groups import members, num_sets, set_code
from pallas_kernels.types import Tiles

LAYOUTS = ("entries", "passes", "sets")


def num_groups(layout: str, *, num_slots: int, top_k: int) -> int:
    """Groups that rows are sorted into: one for each adapter, or for each set of them."""
    return num_sets(num_slots, top_k) if layout == "sets" else num_slots


def num_tiles(num_rows: int, groups: int, *, block: int) -> int:
    """Tiles that suffice for every distribution of the rows over the groups.

    A group with c > 0 rows needs ⌈c/block⌉ ≤ ⌊c/block⌋ + 1 tiles, and no tile is empty.
    """
    return min(num_rows, num_rows // block + min(groups, num_rows))


@functools.partial(jax.jit, static_argnames=("num_slots", "layout", "block", "backend"))
def token_sort(
    adapter_ids: Int[Array, "N k"],
    num_slots: int,
    *,
    layout: str,
    block: int,
    backend: str = "xla",
) -> Tiles:
    """Sorts rows by their adapters, stably, and cuts them into tiles of at most `block` rows.

    Ids outside [0, num_slots) are left out. Rows are placed by their rank and never by atomics, so
    equal ids give equal tiles.

    Args:
      layout: what a row is; see `Tiles`.
      backend: xla, triton or interpret; equal in what they return.
    """
    num_tokens, top_k = adapter_ids.shape
    num_entries = num_tokens * top_k
    groups = num_groups(layout, num_slots=num_slots, top_k=top_k)
    ids = known_ids(adapter_ids, num_slots)
    slots = jnp.where(ids >= 0, ids, num_slots)  # behind all others where there is none

    if layout == "entries":
        codes = slots.reshape(1, num_entries)
    elif layout == "passes":
        codes = slots.T
    else:
        slots, choice = _sort_columns(slots)
        codes = set_code(slots, num_slots)[None]

    order, offsets = _sort_rows(codes, groups, backend)
    if layout == "entries":
        entries = order[:, :, None]
    elif layout == "passes":
        entries = (order * top_k + jnp.arange(top_k, dtype=jnp.int32)[:, None])[:, :, None]
    else:
        token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
        of_token = jnp.where(slots < num_slots, token * top_k + choice, num_entries)
        entries = of_token[order[0]][None]
    row = jnp.arange(order.shape[1], dtype=jnp.int32)[None, :, None]
    entries = jnp.where(row < offsets[:, -1][:, None, None], entries, num_entries)

    start, rows, group = _cut(offsets, num_tiles(codes.shape[1], groups, block=block), block)
    if layout == "sets":
        table = jnp.asarray(members(num_slots, top_k))
        adapters = table.at[group].get(mode="fill", fill_value=-1)
    else:
        adapters = jnp.where(group < groups, group, -1)[:, :, None]
    return Tiles(
        entries=entries, start=start, rows=rows, adapters=adapters, block=block, layout=layout
    )


def adapter_order(
    adapter_ids: Int[Array, "N k"], num_slots: int, *, backend: str
) -> tuple[Int[Array, " M"], Int[Array, " K_and_end"]]:
    """All entries sorted by adapter, those without one last; where each adapter's begin."""
    ids = known_ids(adapter_ids, num_slots)
    codes = jnp.where(ids >= 0, ids, num_slots).reshape(1, -1)
    order, offsets = _sort_rows(codes, num_slots, backend)
    return order[0], offsets[0]


def _sort_rows(codes, groups: int, backend: str):
    if backend == "xla":
        return xla.sort_rows(codes, groups)
    from pallas_kernels.token_sort import triton  # only where Pallas has that backend

    return triton.sort_rows(codes, groups, interpret=backend == "interpret")


def _cut(
    offsets: Int[Array, "P G_and_end"], num_tiles: int, block: int
) -> tuple[Int[Array, "P T"], Int[Array, "P T"], Int[Array, "P T"]]:
    """First row, rows and group of every tile; one that is not needed has no rows and group G."""
    tiles_of = -(-jnp.diff(offsets, axis=1) // block)
    last = jnp.cumsum(tiles_of, axis=1, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)[None]
    group = jnp.sum(last[:, None, :] <= tile[:, :, None], axis=2, dtype=jnp.int32)

    def of_group(values):
        return jnp.take_along_axis(values, group, axis=1, mode="fill", fill_value=0)

    start = of_group(offsets[:, :-1]) + (tile - of_group(last - tiles_of)) * block
    return (
        jnp.where(group < tiles_of.shape[1], start, 0),
        jnp.clip(of_group(offsets[:, 1:]) - start, 0, block),
        group,
    )


def _sort_columns(slots: Int[Array, "N k"]) -> tuple[Int[Array, "N k"], Int[Array, "N k"]]:
    """Each row in ascending order and where its values stood, by k·(k − 1)/2 exchanges.

    Elementwise, so that it fuses; a sort along an axis of two would be a kernel of its own.
    """
    top_k = slots.shape[1]
    keys = [slots[:, j] * top_k + j for j in range(top_k)]
    for end in range(top_k - 1, 0, -1):
        for j in range(end):
            keys[j], keys[j + 1] = (
                jnp.minimum(keys[j], keys[j + 1]),
                jnp.maximum(keys[j], keys[j + 1]),
            )
    packed = jnp.stack(keys, axis=1)
    return packed // top_k, packed % top_k
