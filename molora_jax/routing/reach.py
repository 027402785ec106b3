"""Before a compiled pass: do router, adapters and model belong together, and can every adapter
that the router may name really be reached?

Inside jit an id without an adapter can only mean the base. What is known on the host is therefore
refused there, so that the base is never served in place of an adapter that was asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from molora_jax.adapters import AdapterBank, AdapterStack, Composition
from molora_jax.models.config import ModelConfig

# Where the routers that decide from the input keep the columns they name.
_COLUMNS = ("adapter_ids", "row_adapters", "table")


def check_reach(
    router: Any,
    adapters: Any,
    column_to_slot: Any = None,
    *,
    config: ModelConfig,
) -> None:
    """ValueError for what a pass of a decoder of `config` cannot be routed by.

    adapters, router, column_to_slot (C,) int  as a pass takes them, or whatever else was given

    That is a router without adapters or the reverse, objects of another kind, adapters of other
    sizes, and, where the arrays can be read (outside jit), a router that names a column without an
    adapter behind it: past the last, −1 in `column_to_slot`, or in an empty slot. A learned router
    never chooses a column of −1, but its columns are adapters, which a load may put into other
    slots: it needs `column_to_slot`, inside jit too, unless it `names_slots` itself. A vocabulary
    router must know every token id.
    """
    if not _given_both(router, adapters):
        return
    layers = [adapters] if isinstance(adapters, Mapping) else adapters
    _check_sizes(layers, config)
    kind, learned = type(router).__name__, router.decision != "input"
    if learned and column_to_slot is None and not getattr(router, "names_slots", False):
        raise ValueError(
            f"router is a {kind}, whose columns may lie in any slots: pass "
            "column_to_slot=composition.column_to_slot (of a bank alone "
            "bank.column_to_slot(digests)), or **composition.routed"
        )
    leaves = jax.tree.leaves((router, adapters, column_to_slot))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return
    ranks = [np.atleast_2d(stack.ranks) for each in layers for stack in each.values()]
    num_slots = ranks[0].shape[1]
    empty = np.max([each.max(axis=0) for each in ranks], axis=0) == 0
    slots = np.arange(num_slots)
    if column_to_slot is not None:
        slots = np.asarray(column_to_slot)
        _check_map(slots, num_slots)
    columns = _named(router, kind, config) if not learned else np.flatnonzero(slots >= 0)
    if (past := columns[columns >= len(slots)]).size:
        raise ValueError(
            f"{kind} names column {past[0]}, but there are {len(slots)} (0 to {len(slots) - 1}): "
            "its tokens would get the base; -1 is how to ask for that"
        )
    if learned and column_to_slot is None:
        return  # rows of an engine, which holds the slots that it names
    for column in columns:
        slot = slots[column]
        if slot < 0 or empty[slot]:
            where = f"slot {slot}, which is empty" if slot >= 0 else "no slot"
            raise ValueError(
                f"{kind} names column {column}, whose adapter is in {where}: its tokens would get "
                "the base. Load the adapter first, or use -1 to ask for the base"
            )


def _given_both(router: Any, adapters: Any) -> bool:
    """Whether a pass is routed; ValueError where only half of it is given, or something else."""
    for name, value in (("adapters", adapters), ("router", router)):
        if isinstance(value, Composition):
            raise ValueError(f"{name} is a composition: pass **composition.routed")
    if isinstance(adapters, AdapterBank):
        raise ValueError("adapters is a bank: pass bank.stacks, or **composition.routed")
    if adapters is not None and not _are_stacks(adapters):
        raise ValueError(
            f"adapters is a {type(adapters).__name__}: expected bank.stacks of an AdapterBank, or "
            "**composition.routed"
        )
    if router is not None and not hasattr(router, "decision"):
        raise ValueError(
            f"router is a {type(router).__name__}: expected a router of molora_jax.routing, or "
            "**composition.routed"
        )
    if (adapters is None) != (router is None):
        given, missing = ("router", "adapters") if adapters is None else ("adapters", "router")
        raise ValueError(
            f"{given} without {missing}: adapters act only where a router sends a token, so pass "
            "both (**composition.routed; FixedRouter or SequenceRouter for a fixed choice), or "
            "neither for the base alone"
        )
    return router is not None


def _are_stacks(adapters: Any) -> bool:
    """Stacks by projection, or a layer's in a list of them."""
    layers = [adapters] if isinstance(adapters, Mapping) else adapters
    return isinstance(layers, Sequence) and all(
        isinstance(each, Mapping) and all(isinstance(e, AdapterStack) for e in each.values())
        for each in layers
    )


def _check_sizes(layers: Sequence[Mapping[str, AdapterStack]], config: ModelConfig) -> None:
    for each in layers:
        for name, stack in each.items():
            a, b = stack.lora_a.shape, stack.lora_b.shape
            sizes = a[0] if len(a) == 4 else len(layers), a[-1], b[-1]
            expected = config.num_layers, *config.projection_sizes().get(name, ())
            if sizes != expected:
                raise ValueError(
                    f"adapters are of another base: their {name} has (layers, inputs, outputs) = "
                    f"{sizes}, the decoder's {expected}. Load them into a bank of its config"
                )


def _check_map(slots: np.ndarray, num_slots: int) -> None:
    whole = slots.ndim == 1 and slots.dtype.kind in "iu"
    if not whole or (slots < -1).any() or (slots >= num_slots).any():
        raise ValueError(
            f"column_to_slot is {slots.tolist()}: expected a whole number for each column, the "
            f"slot of its adapter in a bank of {num_slots} (0 to {num_slots - 1}) or -1 where it "
            "is in none, as composition.column_to_slot has them"
        )


def _named(router: Any, kind: str, config: ModelConfig) -> np.ndarray:
    """The columns that a router of decision "input" may name."""
    table = getattr(router, "table", None)
    if table is not None and table[...].shape[0] < config.vocab_size:
        raise ValueError(
            f"{kind} has a table of {table[...].shape[0]} token ids and the model "
            f"{config.vocab_size}: tokens past its end would get the base; give every id a "
            "column, -1 for none"
        )
    named = next((getattr(router, name) for name in _COLUMNS if hasattr(router, name)), None)
    if named is None:
        raise ValueError(
            f"{kind} decides by its input and has none of {', '.join(_COLUMNS)}: expected the "
            "columns that it may name under one of these, so that they can be held against the bank"
        )
    columns = np.unique(np.append(np.asarray(named[...]), getattr(router, "initial", -1)))
    return columns[columns >= 0]
