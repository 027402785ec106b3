"""The compiled programs of an engine: one prefill for each bucket, one decode step for all rows.

Letters beyond the table of design.md: T cache slots of a row, M columns of a row's own map, P
tables. What a row is served with (adapter, rule, sampling) is data in `RowSettings`, so that
requests come and go without a compilation.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from molora_jax.adapters.stack import Stacks
from molora_jax.generation.request import MAX_LOGPROBS
from molora_jax.generation.sampling import Sampling, sample
from molora_jax.models.decoder import Decoder, KVCache
from molora_jax.parallel import RowData
from molora_jax.parallel.local import constrain, constrain_tree
from molora_jax.routing.control import KEEP, switch_columns
from molora_jax.routing.select import place, select
from pallas_kernels import Routing

Adapters = Stacks | Sequence[Stacks]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@typing.no_type_check  # of one row (no B) or of all
class RowSettings:
    """What a request asks of its row.

    table     which of the tables says what a token switches to; 0 switches nothing
    columns   slot of each of the row's columns, −1 for none
    initial   the column in force before the first switch, −1 for the base
    learned   the learned router chooses among `columns`, and not the table
    """

    table: Int[Array, "*B"]
    columns: Int[Array, "*B M"]
    initial: Int[Array, "*B"]
    learned: Bool[Array, "*B"]
    temperature: Float[Array, "*B"]
    top_k: Int[Array, "*B"]
    top_p: Float[Array, "*B"]
    seed: UInt32[Array, "*B"]
    logprobs: Bool[Array, "*B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@typing.no_type_check
class EngineState:
    """All rows between two steps; donated to every program.

    tokens  (B,) the last token of each row, not read yet
    column  (B,) the column in force behind what was read
    count   (B,) tokens generated so far
    """

    cache: KVCache
    tokens: Int[Array, " B"]
    column: Int[Array, " B"]
    count: Int[Array, " B"]
    rows: RowSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@typing.no_type_check
class StepOut:
    """What the host reads after a program.

    tokens     (B,) the next token of each row
    finite     (B,) whether its logits were; where not, the token means nothing
    logprob    (B,), and top_ids, top_logprobs (B, 20): zeros unless a row asked for them
    routing    (L, N, k) of the tokens that were read, None without adapters
    """

    tokens: Int[Array, " B"]
    finite: Bool[Array, " B"]
    logprob: Float[Array, " B"]
    top_ids: Int[Array, "B t"]
    top_logprobs: Float[Array, "B t"]
    routing: Routing | None


def row_settings(
    columns: np.ndarray,
    *,
    table: int = 0,
    initial: int = -1,
    learned: bool = False,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    logprobs: bool = False,
) -> RowSettings:
    """One row's settings on the host, in the dtypes that the programs are compiled for."""
    fields: dict[str, Any] = {
        "table": np.int32(table),
        "columns": columns.astype(np.int32),
        "initial": np.int32(initial),
        "learned": np.bool_(learned),
        "temperature": np.float32(sampling.temperature),
        "top_k": np.int32(sampling.top_k),
        "top_p": np.float32(sampling.top_p),
        "seed": np.uint32(seed),
        "logprobs": np.bool_(logprobs),
    }
    return RowSettings(**fields)


def idle_settings(num_columns: int) -> RowSettings:
    """The base, greedy."""
    return row_settings(np.full(num_columns, -1))


def empty_state(decoder: Decoder, *, rows: int, context: int, num_columns: int) -> EngineState:
    """No row in use."""
    c = decoder.config
    shape = (rows, c.num_kv_heads, context, c.head_dim)
    dtype = decoder.embedding[...].dtype

    def per_layer():
        return tuple(jnp.zeros(shape, dtype) for _ in range(c.num_layers))

    return EngineState(
        cache=KVCache(
            per_layer(),
            per_layer(),
            filled=jnp.zeros((rows, context), bool),
            next_slot=jnp.zeros(rows, jnp.int32),
        ),
        tokens=jnp.zeros(rows, jnp.int32),
        column=jnp.full(rows, -1, jnp.int32),
        count=jnp.zeros(rows, jnp.int32),
        rows=jax.tree.map(
            lambda leaf: jnp.asarray(np.broadcast_to(leaf, (rows, *leaf.shape))),
            idle_settings(num_columns),
        ),
    )


class RowsRouter(nnx.Module):
    """Each row by its own rule: the column in force, or what a learned router makes of its map.

    slots    (B, S) the slot of each token's column in force, −1 for the base
    chooses  (B, S) whether the learned router decides instead
    columns  (N, M) slot of each column of the token's map; the learned router's are the first C
    learned  a router with logits of its own in every layer ("per_layer") or once ("shared")
    """

    names_slots = True

    def __init__(self, slots, chooses, columns, learned: Any | None):
        self.learned = learned
        self.decision = "input" if learned is None else learned.decision
        self.top_k = 1 if learned is None else learned.top_k
        self.num_columns = 0 if learned is None else learned.num_columns
        self.after_layer = None if learned is None else learned.after_layer
        # The decoder takes one layer's slice of every leaf of a router that speaks in each.
        layers = (learned.num_layers,) if learned and self.decision == "per_layer" else ()

        def held(leaf):
            return RowData(jnp.broadcast_to(leaf, (*layers, *leaf.shape)), rows=-2)

        self.slots, self.chooses = held(slots), held(chooses)
        self.columns = held(columns[:, : self.num_columns])

    def __call__(self, token_ids, hidden, mask, state=None, column_to_slot=None):
        """Routing (N, k), the learned router's logits or None, and `state` as it came."""
        fixed = self.before(mask)
        if self.learned is None:
            return fixed, None, state
        logits = self.learned.logits(hidden.reshape(-1, hidden.shape[-1]))
        chooses = (self.chooses[...] & mask).reshape(-1)
        chosen = select(
            logits,
            chooses,
            top_k=self.top_k,
            gate=self.learned.gate,
            column_to_slot=self.columns[...],
        )
        routing = jax.tree.map(
            lambda one, other: jnp.where(chooses[:, None], one, other), chosen, fixed
        )
        return routing, logits, state

    def before(self, mask: Bool[Array, "B S"]) -> Routing:
        """The columns in force alone, as used by layers before a shared decision."""
        slots = jnp.where(mask & ~self.chooses[...], self.slots[...], -1).reshape(-1, 1)
        rest = ((0, 0), (0, self.top_k - 1))
        ids = jnp.pad(slots, rest, constant_values=-1)
        return Routing(ids, jnp.where(ids >= 0, 1.0, 0.0).astype(jnp.float32))


def prefill(
    decoder: Decoder,
    adapters: Adapters | None,
    learned: Any | None,
    tables: Int[Array, "P V"],
    state: EngineState,
    tokens: Int[Array, " S"],
    lengths: Int[Array, " p"],
    rows: Int[Array, " p"],
    settings: RowSettings,
    *,
    strategy: str = "auto",
) -> tuple[EngineState, StepOut]:
    """Reads prompts into rows, whatever was there before, and chooses the first token of each.

    tokens    the prompts one behind the other, then padding
    lengths   of each prompt; at the end 0 for those that are not there, whose `rows` are B
    settings  of each prompt (p, …)
    """
    S, ends = tokens.shape[0], jnp.cumsum(lengths)
    starts, lasts = ends - lengths, jnp.maximum(ends - 1, 0)
    here = jnp.arange(S)
    # Zero-length prompts own no token: the first prompt that ends behind a token is its own.
    segment = jnp.minimum(jnp.searchsorted(ends, here, side="right"), len(lengths) - 1)
    mask = (here < ends[-1])[None]
    own = jax.tree.map(lambda leaf: leaf[segment], settings)  # (S, …)
    entries = tables[own.table, tokens].astype(jnp.int32)
    # A prompt starts from its own column, not from the one in force behind the prompt before it.
    entries = jnp.where((here == starts[segment]) & (entries == KEEP), own.initial, entries)
    columns, _ = switch_columns(entries[None], jnp.full(1, -1, jnp.int32), mask)
    out = decoder(
        tokens[None],
        mask,
        segments=segment[None],
        return_keys_values=True,
        **_routed(adapters, learned, own, columns, strategy),
    )
    chosen = _choose(decoder.logits(out.hidden[0, lasts]), settings, jnp.zeros_like(lengths))
    state = EngineState(
        _write_rows(state.cache, out.keys_values, starts, lengths, rows),
        _put(state.tokens, rows, chosen["tokens"]),
        _put(state.column, rows, columns[0, lasts]),
        _put(state.count, rows, jnp.ones_like(lengths)),
        _put(state.rows, rows, settings),
    )
    return _lying(state, StepOut(**chosen, routing=out.routing))


def _put(whole, rows: Int[Array, " p"], parts):
    """Writes rows (p, …) of every leaf; those of prompts that are not there lie past the end."""
    return jax.tree.map(lambda leaf, part: leaf.at[rows].set(part, mode="drop"), whole, parts)


def _write_rows(cache: KVCache, keys_values, starts, lengths, rows) -> KVCache:
    """Keys and values (1, Hk, S, Dh) of each layer, cut into prompts and written into their rows.

    A row is written to its end, so that nothing of its last request stays, not even a NaN.
    """
    T = cache.filled.shape[1]
    room = ((0, 0), (0, T), (0, 0))
    new = [[jnp.pad(layer[0], room) for layer in each] for each in keys_values]

    def write(p, written):
        def one(old, layer):
            text = jax.lax.dynamic_slice_in_dim(layer, starts[p], T, axis=1)
            text = jnp.where((jnp.arange(T) < lengths[p])[None, :, None], text, 0)
            return jax.lax.dynamic_update_index_in_dim(old, text, rows[p], axis=0)

        return jax.tree.map(one, written, new)

    keys, values = jax.lax.fori_loop(
        0, jnp.sum(lengths > 0), write, [list(cache.keys), list(cache.values)]
    )
    filled = jnp.arange(T)[None] < lengths[:, None]
    return KVCache(
        tuple(keys),
        tuple(values),
        filled=_put(cache.filled, rows, filled),
        next_slot=_put(cache.next_slot, rows, lengths),
    )


def decode(
    decoder: Decoder,
    adapters: Adapters | None,
    learned: Any | None,
    tables: Int[Array, "P V"],
    state: EngineState,
    active: Bool[Array, " B"],
    *,
    strategy: str = "auto",
) -> tuple[EngineState, StepOut]:
    """Reads the last token of every row and chooses the next. A row not active means nothing."""
    rows = state.rows
    tokens = jnp.where(active, state.tokens, 0)
    entries = tables[rows.table, tokens].astype(jnp.int32)
    columns, column = switch_columns(entries[:, None], state.column, active[:, None])
    out, cache = decoder.decode(
        tokens, state.cache, active=active, **_routed(adapters, learned, rows, columns, strategy)
    )
    chosen = _choose(decoder.logits(out.hidden[:, 0]), rows, state.count)
    state = EngineState(cache, chosen["tokens"], column, state.count + 1, rows)
    return _lying(state, StepOut(**chosen, routing=out.routing))


def _lying(state: EngineState, out: StepOut) -> tuple[EngineState, StepOut]:
    """On a mesh the cache is split as it was given, and what the host reads is whole."""
    return constrain_tree(state), jax.tree.map(constrain, out)


def _routed(adapters, learned, own: RowSettings, columns, strategy: str) -> dict[str, Any]:
    """The decoder's keywords: the slot of each token (B, S), by its own settings (N, …)."""
    if adapters is None:
        return {}
    slots = place(columns.reshape(-1, 1), own.columns).reshape(columns.shape)
    chooses = own.learned.reshape(columns.shape)
    return {
        "adapters": adapters,
        "router": RowsRouter(slots, chooses, own.columns, learned),
        "strategy": strategy,
    }


def _choose(logits, rows: RowSettings, count) -> dict[str, Array]:
    """The next token of each row (B,), and the numbers beside it that rows asked for."""
    keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.key(seed), n))(rows.seed, count)
    tokens = sample(keys, logits, rows.temperature, rows.top_k, rows.top_p)
    B, t = tokens.shape[0], min(MAX_LOGPROBS, logits.shape[-1])

    def numbers():
        log_p = jax.nn.log_softmax(logits, axis=-1)
        top, ids = jax.lax.top_k(log_p, t)
        return jnp.take_along_axis(log_p, tokens[:, None], axis=1)[:, 0], ids, top

    def none():
        return jnp.zeros(B), jnp.zeros((B, t), jnp.int32), jnp.zeros((B, t))

    logprob, ids, top = jax.lax.cond(rows.logprobs.any(), numbers, none)
    return {
        "tokens": tokens,
        "finite": jnp.isfinite(logits).all(axis=-1),
        "logprob": logprob,
        "top_ids": ids,
        "top_logprobs": top,
    }


def keep_table(vocab_size: int) -> np.ndarray:
    """Table 0, in which no token switches anything."""
    return np.full(vocab_size, KEEP, np.int16)
