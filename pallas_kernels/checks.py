"""What a caller can get wrong, refused before anything is compiled."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import Array
from pallas_kernels.types import DispatchPlan, Routing, Tiles


def check_routing(routing: Routing, num_slots: int) -> None:
    """Shapes, dtypes, and the ids themselves where they are known (outside `jit`)."""
    ids, gates = routing.adapter_ids, routing.gates
    check_arrays({"routing.adapter_ids": ids, "routing.gates": gates})
    if type(num_slots) is not int or num_slots < 1:
        raise ValueError(f"num_slots is {num_slots!r}; expected a number of slots, 1 or more")
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ValueError(
            f"routing.adapter_ids has shape {ids.shape}; expected (N, k) with k ≥ 1. A routing "
            "stacked over layers is passed one layer at a time"
        )
    if ids.dtype not in (jnp.int32, jnp.int64):
        raise ValueError(
            f"routing.adapter_ids has dtype {ids.dtype}; expected int32 slot indices, −1 for none"
        )
    if ids.shape[1] > num_slots:
        raise ValueError(
            f"routing.adapter_ids has shape {ids.shape}, {ids.shape[1]} choices a token, and the "
            f"stack {num_slots} slots; expected k ≤ K"
        )
    if gates.shape != ids.shape or not jnp.issubdtype(gates.dtype, jnp.floating):
        raise ValueError(
            f"routing.gates is {gates.dtype}{list(gates.shape)}; expected floating point of the "
            f"shape of adapter_ids, {list(ids.shape)}"
        )
    if isinstance(ids, jax.core.Tracer):
        return  # inside jit an id outside the bank acts as −1
    values = np.asarray(ids)
    wrong = np.argwhere((values < -1) | (values >= num_slots))
    if len(wrong):
        n, j = map(int, wrong[0])
        raise ValueError(
            f"routing.adapter_ids[{n}, {j}] is {values[n, j]} ({len(wrong)} such ids); expected a "
            f"slot in [0, {num_slots}), or −1 for no adapter"
        )


def check_same_slots(lora_a: Sequence[Array]) -> None:
    """Projections that share a routing have the same slots, and the same layers."""
    check_arrays({"lora_a": lora_a[0]})
    first = lora_a[0].shape[:-2]
    for w, each in enumerate(lora_a):
        check_arrays({"lora_a": each})
        if each.shape[:-2] != first:
            raise ValueError(
                f"lora_a[{w}] has shape {each.shape} and lora_a[0] {lora_a[0].shape}; expected the "
                "same layers and slots in all projections, as they share the routing"
            )


def check_arrays(arrays: Mapping[str, Any]) -> None:
    """A list has no dtype to check, and would be another array at every call."""
    for name, array in arrays.items():
        if array is not None and not hasattr(array, "dtype"):
            raise ValueError(f"{name} is a {type(array).__name__}; expected an array")


def check_operands(
    x: Array,
    lora_a: Array,
    lora_b: Array,
    routing: Routing,
    *,
    base: Array | None = None,
    ranks: Array | None = None,
    layer: int | Array | None = None,
) -> None:
    """Everything `lora_delta` is given, except its plan."""
    check_arrays({"x": x, "lora_a": lora_a, "lora_b": lora_b, "base": base, "ranks": ranks})
    floats = {"x": x, "lora_a": lora_a, "lora_b": lora_b, "base": base}
    for name, array in floats.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; expected floating point")
    if x.ndim == 0:
        raise ValueError("x is a scalar; expected (..., D)")
    axes = "(K, R, {})" if layer is None else "(L, K, R, {}), as layer is given,"
    ndim = 3 if layer is None else 4
    if lora_a.ndim != ndim or lora_a.shape[-1] != x.shape[-1] or 0 in lora_a.shape:
        raise ValueError(
            f"lora_a has shape {lora_a.shape}; expected {axes.format('D')} with D = "
            f"{x.shape[-1]}, the width of x {x.shape}, and none of them 0 (contraction "
            "last: store the A of PEFT as it is)"
        )
    num_slots, rank = lora_a.shape[-3:-1]
    if lora_b.ndim != ndim or lora_b.shape[:-1] != lora_a.shape[:-1] or not lora_b.shape[-1]:
        raise ValueError(
            f"lora_b has shape {lora_b.shape}; expected {axes.format('F')} with K = {num_slots} "
            f"and R = {rank} as in lora_a {lora_a.shape} (the transpose of PEFT's B)"
        )
    check_layer(layer, lora_a.shape[0])
    num_tokens = int(np.prod(x.shape[:-1]))
    if routing.adapter_ids.ndim == 2 and routing.adapter_ids.shape[0] != num_tokens:
        raise ValueError(
            f"routing.adapter_ids has shape {routing.adapter_ids.shape}, {num_tokens} tokens are "
            f"in x {x.shape}; expected one row of ids for each token"
        )
    expected = (*x.shape[:-1], lora_b.shape[-1])
    if base is not None and base.shape != expected:
        raise ValueError(f"base has shape {base.shape}; expected {expected}, the output's")
    check_routing(routing, num_slots)
    if ranks is not None:
        check_ranks(ranks, lora_a.shape[:-2], rank)


def check_layer(layer: int | Array | None, num_layers: int) -> None:
    """One of the stack's layers; a number that is known and outside would be clipped to one."""
    if layer is None:
        return
    if jnp.ndim(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer is {layer!r}; expected a whole number")
    if isinstance(layer, jax.core.Tracer):
        return
    if not 0 <= int(layer) < num_layers:
        raise ValueError(
            f"layer is {int(layer)}; expected one of the stack's, 0 to {num_layers - 1}"
        )


def check_ranks(ranks: Array, slots: tuple[int, ...], rank: int) -> None:
    """One rank per slot (and layer), none above the stack's."""
    if ranks.shape != tuple(slots) or not jnp.issubdtype(ranks.dtype, jnp.integer):
        raise ValueError(
            f"ranks is {ranks.dtype}{list(ranks.shape)}; expected int32{list(slots)}, one rank "
            "for each slot"
        )
    if isinstance(ranks, jax.core.Tracer):
        return
    values = np.asarray(ranks)
    wrong = np.argwhere((values < 0) | (values > rank))
    if len(wrong):
        where = tuple(map(int, wrong[0]))
        raise ValueError(
            f"ranks{list(where)} is {values[where]}; expected 0 to {rank}, the rank of the stack"
        )


def check_plan(plan: DispatchPlan, routing: Routing, num_slots: int, *, strategy: str) -> None:
    """A plan fits one strategy, one set of shapes and, where they are known, the very same ids."""
    if strategy not in ("auto", "grouped"):
        raise ValueError(
            f"plan is a DispatchPlan, made for strategy 'grouped', and strategy is {strategy!r}, "
            "which needs none; pass plan=None, or strategy='grouped'"
        )
    made_for = (*plan.adapter_ids.shape, plan.num_slots)
    given = (*routing.adapter_ids.shape, num_slots)
    if made_for != given:
        sizes = "{} tokens with {} choices over {} slots"
        raise ValueError(
            f"plan was made for {sizes.format(*made_for)}; this call has {sizes.format(*given)}. "
            "Make it from this routing: make_plan(routing, num_slots)"
        )
    sorted_ids, ids = plan.adapter_ids, routing.adapter_ids
    if sorted_ids is ids or any(isinstance(each, jax.core.Tracer) for each in (sorted_ids, ids)):
        return
    other = np.argwhere(np.asarray(sorted_ids) != np.asarray(ids))
    if len(other):
        n, j = map(int, other[0])
        raise ValueError(
            f"plan was made of other ids: its adapter_ids[{n}, {j}] is {int(sorted_ids[n, j])} and "
            f"the routing's {int(ids[n, j])} ({len(other)} differ). Make it from this routing: "
            "make_plan(routing, num_slots)"
        )


def check_tiles(tiles: Tiles | None, backend: str, top_k: int) -> None:
    """The kernels write each row of y once a pass, so a pass may hold a token once."""
    if tiles is not None and backend != "xla" and tiles.layout == "entries" and top_k > 1:
        raise ValueError(
            f"plan was made for backend 'xla', where a token has a row for each of its {top_k} "
            f"choices; backend is {backend!r}. Make it with make_plan(..., backend={backend!r})"
        )
