"""What a routed projection is measured against: other ways to serve many adapters, in plain JAX.

Each takes (x, lora_a, lora_b, routing, base) and gives what `lora_delta` gives; none is a strategy.
h is rounded to the dtype of the weights before the second product, as PEFT and Punica do, so that
in bfloat16 both products run at full rate. An id outside [0, K) adds nothing. M is N·k entries.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.numerics import accumulator_dtype, known_ids, matmul
from pallas_kernels.types import Routing

# What the per-row gather may hold at once where rows run side by side.
GATHER_BYTES = 256 * 2**20


def single_lora(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    routing: Routing,
    base: Float[Array, "N F"],
) -> Float[Array, "N F"]:
    """Adapter 0 on every token with gate 1, whatever the routing says: what one LoRA costs."""
    del routing
    return (base + _delta(x, lora_a[0], lora_b[0])).astype(base.dtype)


def full_passes(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    routing: Routing,
    base: Float[Array, "N F"],
) -> Float[Array, "N F"]:
    """K passes, each one adapter on all tokens, of which a token keeps its own: K·N rows of work.

    This is the paper's "per-sequence": what serving one adapter at a time costs a mixed sequence.
    """
    y = base.astype(accumulator_dtype(x, lora_a, lora_b))
    for slot in range(lora_a.shape[0]):
        y = one_pass(x, lora_a[slot], lora_b[slot], routing, y, slot)
    return y.astype(base.dtype)


def one_pass(
    x: Float[Array, "N D"],
    a: Float[Array, "R D"],
    b: Float[Array, "R F"],
    routing: Routing,
    y: Float[Array, "N F"],
    slot: int | Int[Array, ""],
) -> Float[Array, "N F"]:
    """y, and on the tokens that use `slot` what its adapter a, b makes of all of them."""
    uses, gate = _use(routing, slot, accumulator_dtype(x, a, b))
    delta = jnp.where(uses[:, None], gate[:, None] * _delta(x, a, b), 0)
    return (y + delta).astype(y.dtype)


def dense_loop(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    routing: Routing,
    base: Float[Array, "N F"],
) -> Float[Array, "N F"]:
    """PEFT's mixed batch: for each adapter, index its rows, apply it, add at the same rows.

    Inside one program the index must fit the worst case, in which an adapter has all N tokens.
    """
    num_tokens = x.shape[0]

    def add_adapter(slot, y):
        uses, gate = _use(routing, slot, y.dtype)
        (rows,) = jnp.nonzero(uses, size=num_tokens, fill_value=num_tokens)
        return _add_rows(y, x, lora_a[slot], lora_b[slot], gate, rows)

    y = base.astype(accumulator_dtype(x, lora_a, lora_b))
    return lax.fori_loop(0, lora_a.shape[0], add_adapter, y).astype(base.dtype)


def per_adapter_loop(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    routing: Routing,
    base: Float[Array, "N F"],
) -> Float[Array, "N F"]:
    """The same loop driven by the host, which reads the ids and launches a program an adapter.

    Rows are counted to the next power of two, so that few sizes compile; adapters without tokens
    are left out. It cannot stand inside `jit`: sizes depend on values.
    """
    ids, num_tokens = np.asarray(routing.adapter_ids), x.shape[0]
    # A copy, because each step is donated what the one before made.
    y = jnp.array(base, accumulator_dtype(x, lora_a, lora_b), copy=True)
    for slot in range(lora_a.shape[0]):
        rows = np.flatnonzero((ids == slot).any(axis=1)).astype(np.int32)
        if len(rows):
            size = 1 << (len(rows) - 1).bit_length()
            padded = np.pad(rows, (0, size - len(rows)), constant_values=num_tokens)
            y = _host_step(y, x, lora_a, lora_b, routing, padded, slot)
    return y.astype(base.dtype)


def per_row_bgmv(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    routing: Routing,
    base: Float[Array, "N F"],
) -> Float[Array, "N F"]:
    """Punica's BGMV with an id per token: every row reads the adapter it uses, and shares nothing.

    On CPU row after row; elsewhere as many rows at once as `GATHER_BYTES` of gathered weights are.
    """
    num_slots, rank, d_in = lora_a.shape
    top_k, d_out = routing.adapter_ids.shape[1], lora_b.shape[2]
    dtype = accumulator_dtype(x, lora_a, lora_b)
    ids = known_ids(routing.adapter_ids, num_slots)
    entry_bytes = rank * (d_in + d_out) * lora_a.dtype.itemsize
    at_once = max(1, min(x.shape[0], GATHER_BYTES // (entry_bytes * top_k)))

    def row(operands):
        x_row, row_ids, row_gates, y = operands
        for j in range(top_k):
            slot = jnp.maximum(row_ids[j], 0)
            delta = _delta(x_row[None], lora_a[slot], lora_b[slot])[0]
            y = y + jnp.where(row_ids[j] >= 0, row_gates[j] * delta, 0)
        return y

    operands = (x, ids, routing.gates.astype(dtype), base.astype(dtype))
    y = lax.platform_dependent(
        *operands,
        cpu=lambda *rows: lax.map(row, rows),
        default=lambda *rows: lax.map(row, rows, batch_size=at_once),
    )
    return y.astype(base.dtype)


def ragged_dot(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    routing: Routing,
    base: Float[Array, "N F"],
) -> Float[Array, "N F"]:
    """`jax.lax.ragged_dot`, JAX's own grouped product, with the sort and both moves of rows."""
    num_slots = lora_a.shape[0]
    dtype = accumulator_dtype(x, lora_a, lora_b)
    ids = known_ids(routing.adapter_ids, num_slots).reshape(-1)
    order = jnp.argsort(jnp.where(ids >= 0, ids, num_slots), stable=True)
    group_sizes = jnp.sum(ids[:, None] == jnp.arange(num_slots), axis=0, dtype=jnp.int32)
    tokens = order // routing.adapter_ids.shape[1]
    h = _ragged(x[tokens], lora_a, group_sizes, contract=2, dtype=dtype).astype(lora_b.dtype)
    delta = _ragged(h, lora_b, group_sizes, contract=1, dtype=dtype)
    # Rows past the last group, those without an adapter, are not defined.
    delta = jnp.where(ids[order][:, None] >= 0, delta, 0)
    gates = routing.gates.reshape(-1).astype(dtype)[order]
    return base.astype(dtype).at[tokens].add(gates[:, None] * delta).astype(base.dtype)


# By name; those of HOST run on the host and compile their own pieces, all others go through `jit`.
BASELINES: dict[str, Callable] = {
    "single_lora": single_lora,
    "full_passes": full_passes,
    "dense_loop": dense_loop,
    "per_adapter_loop": per_adapter_loop,
    "per_row_bgmv": per_row_bgmv,
    "ragged_dot": ragged_dot,
}
HOST = frozenset({"per_adapter_loop"})


def tile_loop(
    x: Float[Array, "N D"],
    lora_a: Float[Array, "K R D"] | Sequence[Float[Array, "R D"]],
    lora_b: Float[Array, "K R F"] | Sequence[Float[Array, "R F"]],
    routing: Routing,
    base: Float[Array, "N F"],
    *,
    block: int = 32,
) -> Float[Array, "N F"]:
    """A loop over tiles of one adapter, with weights stacked or as K arrays of their own.

    JAX has no pointers to device memory. Stacked weights are read at slot·R·D; separate ones are
    reached by a branch of K ways on the slot, which is the nearest to a table of pointers that
    copies no weights. All else is the same, so the difference is that of the layout.
    """
    num_slots, top_k = len(lora_a), routing.adapter_ids.shape[1]
    separate = isinstance(lora_a, Sequence)
    dtype = accumulator_dtype(x, lora_a[0], lora_b[0])
    ids = known_ids(routing.adapter_ids, num_slots).reshape(-1)
    order = jnp.argsort(jnp.where(ids >= 0, ids, num_slots), stable=True)
    counts = jnp.sum(ids[:, None] == jnp.arange(num_slots), axis=0)
    offsets = jnp.append(0, jnp.cumsum(counts))
    tiles_of = -(-counts // block)
    last_tile = jnp.cumsum(tiles_of)
    gates = jnp.asarray(routing.gates, dtype).reshape(-1)

    def branch(slot):
        return lambda x_tile: _delta(x_tile, lora_a[slot], lora_b[slot])

    def add_tile(t, y):
        slot = jnp.searchsorted(last_tile, t, side="right")
        start = offsets[slot] + (t - last_tile[slot] + tiles_of[slot]) * block
        place = start + jnp.arange(block)
        entries = jnp.where(place < offsets[slot + 1], order.at[place].get(mode="clip"), ids.size)
        tokens = entries // top_k
        x_tile = x.at[tokens].get(mode="fill", fill_value=0)
        if separate:
            delta = lax.switch(slot, [branch(k) for k in range(num_slots)], x_tile)
        else:
            delta = branch(slot)(x_tile)
        gate = gates.at[entries].get(mode="fill", fill_value=0)
        return y.at[tokens].add(gate[:, None] * delta, mode="drop")

    return lax.fori_loop(0, last_tile[-1], add_tile, base.astype(dtype)).astype(base.dtype)


def _delta(
    x: Float[Array, "N D"], a: Float[Array, "R D"], b: Float[Array, "R F"]
) -> Float[Array, "N F"]:
    """One adapter on some rows."""
    dtype = accumulator_dtype(x, a, b)
    h = matmul(x, a, contract=(1, 1), dtype=dtype).astype(b.dtype)
    return matmul(h, b, contract=(1, 0), dtype=dtype)


def _use(routing: Routing, slot: int | Array, dtype) -> tuple[Array, Array]:
    """Which tokens use a slot, and with what gate: one that names it twice uses it twice."""
    chosen = routing.adapter_ids == slot
    return chosen.any(axis=1), jnp.sum(jnp.where(chosen, routing.gates.astype(dtype), 0), axis=1)


def _add_rows(y, x, a, b, gate, rows: Int[Array, " rows"]) -> Float[Array, "N F"]:
    """y with one adapter's contribution added at `rows`; a row of N is padding."""
    delta = _delta(x.at[rows].get(mode="fill", fill_value=0), a, b)
    gates = gate.at[rows].get(mode="fill", fill_value=0)
    return y.at[rows].add(gates[:, None] * delta, mode="drop")


@functools.partial(jax.jit, donate_argnames="y")
def _host_step(y, x, lora_a, lora_b, routing, rows, slot):
    _, gate = _use(routing, slot, y.dtype)
    return _add_rows(y, x, lora_a[slot], lora_b[slot], gate, rows)


def _ragged(rows, weights, group_sizes, *, contract: int, dtype) -> Float[Array, "M C"]:
    """Each group of rows times its own weights, over axis `contract` of the stack as it lies."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (contract,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return lax.ragged_dot_general(
        rows,
        weights,
        group_sizes,
        numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )
