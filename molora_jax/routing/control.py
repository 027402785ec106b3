"""Adapters that tokens switch on: a control token holds from its own place until the next one.

Vocabulary routing is the case where every token switches, one adapter for a whole row the case
where none does; `switch_columns` is the rule of all three.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from molora_jax.routing.fixed import RouterData, as_table, check_columns, one_each
from molora_jax.routing.select import resident_columns
from molora_jax.token_ids import check_token_ids
from pallas_kernels import Routing

KEEP = -2  # a table's entry for a token that changes nothing; −1 switches to the base


def switch_columns(
    entries: Int[Array, "B S"], state: Int[Array, " B"], mask: Bool[Array, "B S"]
) -> tuple[Int[Array, "B S"], Int[Array, " B"]]:
    """Column of each token, and of the token that comes next in its row.

    column[t] = the last entry of tokens 0..t that is not KEEP, or `state` where there is none yet.
    Padding switches nothing and has column −1.
    """
    S = entries.shape[1]
    switches = mask & (entries > KEEP)
    last = jax.lax.cummax(jnp.where(switches, jnp.arange(S, dtype=jnp.int32)[None], -1), axis=1)
    found = jnp.take_along_axis(entries.astype(jnp.int32), jnp.maximum(last, 0), axis=1)
    columns = jnp.where(last >= 0, found, state.astype(jnp.int32)[:, None])
    return jnp.where(mask, columns, -1), columns[:, -1]


class ControlTokenRouter(nnx.Module):
    """An adapter that a control token in the text switches on, from that token on.

    table        (V,) column that each token id switches to, −1 for the base, KEEP for most ids
    initial      column before the first control token, −1 for the base
    num_columns  C; None: one more than the largest column

    The column in force is carried from call to call as `state` (B,), so that a text may be read in
    parts and generated token by token.

        >>> router = mj.ControlTokenRouter.from_tokens({256: 0, 257: 1, 258: -1}, vocab_size=260)
        >>> tokens = jnp.array([[104, 257, 105, 258]])
        >>> routing, _, state = router(tokens, None, tokens > 0, jnp.array([-1]))
        >>> routing.adapter_ids.ravel().tolist(), state.tolist()
        ([-1, 1, 1, -1], [-1])
    """

    def __init__(
        self, table: Int[ArrayLike, " V"], *, initial: int = -1, num_columns: int | None = None
    ):
        table = as_table(table)
        if num_columns is None:
            num_columns = max(int(table.max()) + 1, initial + 1, 1)
        check_columns("table", table, num_columns, least=KEEP)
        check_columns("initial", np.asarray([initial]), num_columns)
        self.decision, self.top_k = "input", 1
        self.num_columns, self.initial = num_columns, initial
        self.table = RouterData(jnp.asarray(table, jnp.int32))

    @classmethod
    def from_tokens(
        cls,
        switches: Mapping[int, int],
        *,
        vocab_size: int,
        initial: int = -1,
        num_columns: int | None = None,
    ) -> "ControlTokenRouter":
        """From {token id: column, −1 for the base}; every other id keeps what is in force."""
        check_token_ids(
            list(switches), vocab_size, name="switches", remedy="add the control tokens first"
        )
        table = np.full(vocab_size, KEEP, np.int64)
        for token, column in switches.items():
            table[token] = column
        return cls(table, initial=initial, num_columns=num_columns)

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"] | None,
        mask: Bool[Array, "B S"],
        state: Int[Array, " B"] | None = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, None, Int[Array, " B"]]:
        """Routing (N, 1), no logits, and the column in force behind each row's last token."""
        V = self.table.shape[0]
        check_token_ids(
            token_ids,
            V,
            name="token_ids",
            of="the router's table",
            mask=mask,
            remedy="build the table for the tokenizer in use, control tokens included",
        )
        resident_columns(column_to_slot, self.num_columns)
        if state is None:
            state = jnp.full(token_ids.shape[0], self.initial, jnp.int32)
        known = mask & (token_ids >= 0) & (token_ids < V)
        entries = jnp.where(known, self.table[...][jnp.clip(token_ids, 0, V - 1)], KEEP)
        columns, state = switch_columns(entries, state, mask)
        # A token that the table does not know has no adapter of its own, whatever is in force.
        return one_each(jnp.where(known, columns, -1), column_to_slot), None, state

    def to_config(self) -> dict[str, Any]:
        """The settings beside the table, as plain JSON."""
        return {"initial": self.initial, "num_columns": self.num_columns}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> "ControlTokenRouter":
        """The router that `to_config` and its table describe."""
        return cls(arrays["table"], **config)
