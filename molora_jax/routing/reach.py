"""Before a compiled pass: can every adapter that a router may name really be reached?

Inside jit an id without an adapter can only mean the base. What is known on the host is therefore
refused there, so that the base is never served in place of an adapter that was asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from molora_jax.adapters.stack import AdapterStack

# Where the routers that decide from the input keep the columns they name.
_COLUMNS = ("adapter_ids", "row_adapters", "table")


def check_reach(
    router: Any,
    adapters: Mapping[str, AdapterStack] | Sequence[Mapping[str, AdapterStack]],
    column_to_slot: Int[ArrayLike, " C"] | None = None,
    *,
    vocab_size: int | None = None,
) -> None:
    """ValueError where `router` names a column without an adapter behind it.

    A column is without one if it lies past the last, if `column_to_slot` has −1 for it, or if its
    slot is empty. A learned router never chooses a column that is not resident, but its columns are
    adapters, which a load may put into other slots: it needs `column_to_slot`, inside jit too,
    unless it `names_slots` itself. A vocabulary router must know all `vocab_size` token ids. The
    rest can be read outside jit only.
    """
    kind, learned = type(router).__name__, router.decision != "input"
    if learned and column_to_slot is None and not getattr(router, "names_slots", False):
        raise ValueError(
            f"router is a {kind}, whose columns may lie in any slots: pass "
            "column_to_slot=composition.column_to_slot (of a bank alone "
            "bank.column_to_slot(digests)), or **composition.routed"
        )
    leaves = jax.tree.leaves((router, adapters, column_to_slot))
    if learned or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return
    layers = [adapters] if isinstance(adapters, Mapping) else adapters
    ranks = [np.atleast_2d(stack.ranks) for each in layers for stack in each.values()]
    num_slots = ranks[0].shape[1]
    slots = np.arange(num_slots) if column_to_slot is None else np.asarray(column_to_slot)
    table = getattr(router, "table", None)
    if table is not None and vocab_size is not None and table[...].shape[0] < vocab_size:
        raise ValueError(
            f"{kind} has a table of {table[...].shape[0]} token ids and the model {vocab_size}: "
            "tokens past its end would get the base; give every id a column, -1 for none"
        )
    named = next((getattr(router, name) for name in _COLUMNS if hasattr(router, name)), None)
    if named is None:
        raise ValueError(
            f"{kind} decides by its input and has none of {', '.join(_COLUMNS)}: expected the "
            "columns that it may name under one of these, so that they can be held against the bank"
        )
    columns = np.unique(np.append(np.asarray(named[...]), getattr(router, "initial", -1)))
    columns = columns[columns >= 0]
    if (past := columns[columns >= len(slots)]).size:
        raise ValueError(
            f"{kind} names column {past[0]}, but there are {len(slots)} (0 to {len(slots) - 1}): "
            "its tokens would get the base; -1 is how to ask for that"
        )
    empty = np.max([each.max(axis=0) for each in ranks], axis=0) == 0
    for column in columns:
        slot = slots[column]
        if slot < 0 or slot >= num_slots or empty[slot]:
            where = f"slot {slot}, which is empty" if 0 <= slot < num_slots else "no slot"
            raise ValueError(
                f"{kind} names column {column}, whose adapter is in {where}: its tokens would get "
                "the base. Load the adapter first, or use -1 to ask for the base"
            )
