"""Routers that look nothing up in the hidden state: by token id, by row, or as told.

They decide once, before layer 0, and have no trained parameters and no logits. What they hold is
`RouterData`: an input of the compiled step, so other data of the same shape recompiles nothing.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from molora_jax.parallel.rules import RowData
from molora_jax.routing.select import place, resident_columns
from molora_jax.token_ids import check_token_ids
from pallas_kernels import Routing


class RouterData(nnx.Variable):
    """An array that a router holds and nobody trains."""


class VocabularyRouter(nnx.Module):
    """One adapter per token id, from a table: O(1) (paper, "vocabulary routing").

    table        (V,) column for each token id, −1 for none
    num_columns  C; None: one more than the largest column of the table

        >>> router = mj.VocabularyRouter.from_ranges([(0, 128, 0), (128, 256, 1)], vocab_size=260)
        >>> tokens = jnp.array([[104, 200, 259]])
        >>> router(tokens, None, tokens > 0)[0].adapter_ids.ravel().tolist()
        [0, 1, -1]
    """

    def __init__(self, table: Int[ArrayLike, " V"], *, num_columns: int | None = None):
        table = as_table(table)
        if num_columns is None:
            num_columns = max(int(table.max()) + 1, 1)
        check_columns("table", table, num_columns)
        self.decision, self.top_k, self.num_columns = "input", 1, num_columns
        self.table = RouterData(jnp.asarray(table, jnp.int32))

    @classmethod
    def from_ranges(
        cls,
        ranges: Iterable[tuple[int, int, int]],
        *,
        vocab_size: int,
        num_columns: int | None = None,
    ) -> "VocabularyRouter":
        """Each (start, stop, column) sends the ids start ≤ id < stop to a column; the rest to none.

        Raises ValueError for an empty range, one past the vocabulary or one that overlaps another.
        """
        table = np.full(vocab_size, -1, np.int64)
        taken: list[tuple[int, int, int]] = []
        for start, stop, column in ranges:
            here = f"range {start}..{stop} of column {column}"
            if not 0 <= start < stop <= vocab_size:
                raise ValueError(
                    f"{here} does not fit: expected 0 <= start < stop <= vocab_size {vocab_size}"
                )
            for other_start, other_stop, other in taken:
                if start < other_stop and other_start < stop:
                    raise ValueError(
                        f"{here} overlaps range {other_start}..{other_stop} of column {other}: "
                        "a token id can have one adapter"
                    )
            taken.append((start, stop, column))
            table[start:stop] = column
        return cls(table, num_columns=num_columns)

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"] | None,
        mask: Bool[Array, "B S"],
        state: Any = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, None, Any]:
        """Routing (N, 1), no logits, and `state` as it came.

        Ids outside the table are refused where they can be read, and use no adapter inside jit.
        """
        check_token_ids(
            token_ids,
            self.table[...].shape[0],
            name="token_ids",
            of="the router's table",
            mask=mask,
            remedy="build the table for the tokenizer in use, image tokens included",
        )
        resident_columns(column_to_slot, self.num_columns)
        table = self.table[...]
        last = table.shape[0] - 1
        inside = (token_ids >= 0) & (token_ids <= last) & mask
        columns = jnp.where(inside, table[jnp.clip(token_ids, 0, last)], -1)
        return one_each(columns, column_to_slot), None, state

    def to_config(self) -> dict[str, Any]:
        """The settings beside the table, as plain JSON."""
        return {"num_columns": self.num_columns}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> "VocabularyRouter":
        """The router that `to_config` and its table describe."""
        return cls(arrays["table"], **config)


class SequenceRouter(nnx.Module):
    """One adapter per row: plain multi-LoRA serving, and the baseline of per-token routing.

    row_adapters  (B,) column of each row, −1 for none

        >>> tokens = jnp.ones((2, 3), int)
        >>> routing, _, _ = mj.SequenceRouter(np.array([1, -1]))(tokens, None, tokens > 0)
        >>> routing.adapter_ids.ravel().tolist()
        [1, 1, 1, -1, -1, -1]
    """

    def __init__(self, row_adapters: Int[ArrayLike, " B"]):
        if np.ndim(row_adapters) != 1:
            raise ValueError(
                f"row_adapters has shape {np.shape(row_adapters)}, expected (B,): a column per row"
            )
        check_columns("row_adapters", row_adapters)
        self.decision, self.top_k = "input", 1
        self.row_adapters = RowData(jnp.asarray(row_adapters, jnp.int32), rows=-1)

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"] | None,
        mask: Bool[Array, "B S"],
        state: Any = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, None, Any]:
        """Routing (N, 1), no logits, and `state` as it came."""
        rows = self.row_adapters[...]
        if rows.shape[0] != mask.shape[0]:
            raise ValueError(
                f"row_adapters has {rows.shape[0]} rows, but the batch has {mask.shape[0]}: "
                "give one column for each row, -1 for the base"
            )
        columns = jnp.where(mask, rows[:, None], -1)
        return one_each(columns, column_to_slot), None, state

    def to_config(self) -> dict[str, Any]:
        """No settings beside the rows."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any], arrays: dict[str, np.ndarray]) -> "SequenceRouter":
        """The router that its rows describe."""
        return cls(arrays["row_adapters"], **config)


class FixedRouter(nnx.Module):
    """The adapters and gates of each token as given: oracle labels, or a mixture of fixed weights.

    adapter_ids  (B, S, k) columns, −1 for none
    gates        (B, S, k); None: equal shares of 1 among the adapters a token has

        >>> router = mj.FixedRouter(np.array([[[0, 1], [1, -1]]]))  # both adapters, then one
        >>> tokens = jnp.array([[104, 105]])
        >>> routing, _, _ = router(tokens, None, tokens > 0)
        >>> routing.gates.tolist()  # (N, k)
        [[0.5, 0.5], [1.0, 0.0]]
    """

    def __init__(
        self,
        adapter_ids: Int[ArrayLike, "B S k"],
        gates: Float[ArrayLike, "B S k"] | None = None,
    ):
        shape = np.shape(adapter_ids)
        if len(shape) != 3 or shape[-1] == 0:
            raise ValueError(
                f"adapter_ids has shape {shape}, expected (B, S, k) with k > 0: "
                "labels of shape (B, S) are labels[..., None]"
            )
        if gates is not None and np.shape(gates) != shape:
            raise ValueError(
                f"gates has shape {np.shape(gates)}, expected {shape}, that of adapter_ids"
            )
        check_columns("adapter_ids", adapter_ids)
        ids = jnp.asarray(adapter_ids, jnp.int32)
        if gates is None:
            count = jnp.maximum((ids >= 0).sum(axis=-1, keepdims=True), 1)
            gates = jnp.broadcast_to(1.0 / count.astype(jnp.float32), ids.shape)
        self.decision, self.top_k = "input", shape[-1]
        self.adapter_ids = RowData(ids, rows=-3)
        self.gates = RowData(jnp.asarray(gates, jnp.float32), rows=-3)

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"] | None,
        mask: Bool[Array, "B S"],
        state: Any = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, None, Any]:
        """Routing (N, k), no logits, and `state` as it came."""
        columns, gates = self.adapter_ids[...], self.gates[...]
        if columns.shape[:2] != mask.shape:
            raise ValueError(
                f"adapter_ids has shape {columns.shape}, but the batch is (B, S) = {mask.shape}: "
                "a FixedRouter holds the choice for one batch; make one for each"
            )
        ids = place(jnp.where(mask[:, :, None], columns, -1), column_to_slot)
        gates = jnp.where(ids >= 0, gates, 0.0)
        return Routing(ids.reshape(-1, self.top_k), gates.reshape(-1, self.top_k)), None, state

    def to_config(self) -> dict[str, Any]:
        """No settings beside the choice."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any], arrays: dict[str, np.ndarray]) -> "FixedRouter":
        """The router that its ids and gates describe."""
        return cls(arrays["adapter_ids"], arrays["gates"], **config)


def one_each(columns: Int[Array, "B S"], column_to_slot: Int[Array, " C"] | None) -> Routing:
    """Routing (N, 1) of whole adapters, gate 1."""
    ids = place(columns, column_to_slot).reshape(-1, 1)
    return Routing(ids, jnp.where(ids >= 0, 1.0, 0.0).astype(jnp.float32))


def as_table(table: ArrayLike) -> np.ndarray:
    """On the host; ValueError where it is not (V,) integers."""
    table = np.asarray(table)
    if table.ndim != 1 or not table.size or not np.issubdtype(table.dtype, np.integer):
        raise ValueError(
            f"table has shape {table.shape} and dtype {table.dtype}: expected (V,) integers, one "
            "column for each token id"
        )
    return table


def check_columns(
    name: str, columns: Any, num_columns: int | None = None, *, least: int = -1
) -> None:
    """ValueError for the first column outside `least`..C−1 of an array that can be read."""
    if isinstance(columns, jax.core.Tracer):
        return
    columns = np.asarray(columns)
    top = np.iinfo(np.int32).max if num_columns is None else num_columns - 1
    bad = (columns < least) | (columns > top)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        expected = f">= {least}"
        if num_columns is not None:
            expected = f"{least} to {top} (num_columns {num_columns})"
        raise ValueError(
            f"{name} has column {columns[at]} at position {at}: expected {expected}, -1 for none"
        )
