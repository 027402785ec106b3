"""The values that travel with every routed projection: who goes where, and in what order."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.notebook import routing_html


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Which adapter slots each token uses, and how strongly.

    `adapter_ids[n, j]` is a slot of the bank, −1 for no adapter; `gates[n, j]` its weight.
    A stacked Routing (one decision per layer) carries a leading layer axis on both.

        >>> Routing(np.array([[0, 1], [2, -1]]), np.array([[0.7, 0.3], [1.0, 0.0]])).gates.shape
        (2, 2)
    """

    # numpy where it has been fetched to the host.
    adapter_ids: Int[Array | np.ndarray, "*L N k"]
    gates: Float[Array | np.ndarray, "*L N k"]

    def _repr_html_(self) -> str | None:
        return routing_html(self.adapter_ids, self.gates)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """The entries (token, choice) of a Routing, sorted, and cut into tiles of one set of adapters.

    Entry n·k + j is choice j of token n; M = N·k is no entry. A row stands for one token and c of
    its entries, and a tile is a run of at most `block` rows that use the same c adapters. Three
    layouts share this form:

      entries  one pass over M rows with c = 1: a token has a row for each of its choices
      passes   k passes over N rows with c = 1: in a pass a token has one row
      sets     one pass over N rows with c = k: a row is a token with all of its choices

    Nothing is padded: `rows` says how many rows of a tile are its own. Live tiles come first.
    """

    entries: Int[Array, "P rows c"]
    start: Int[Array, "P T"]  # the first row of each tile
    rows: Int[Array, "P T"]  # how many rows it has, 0 in an empty tile
    adapters: Int[Array, "P T c"]  # what they use, −1 where a set is smaller than c
    block: int = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchPlan:
    """What the projections that share a Routing share of the work: its sort.

    Made by `make_plan` from the ids alone, so any gates go with it. Where the backend is chosen by
    the platform there are tiles for each; inside `jit` those of the others are dead code.

        >>> routing = Routing(jnp.array([[0], [1], [0]]), jnp.ones((3, 1)))
        >>> make_plan(routing, num_slots=2, strategy="grouped").adapter_ids.shape  # (N, k)
        (3, 1)
    """

    tiles: Mapping[str, Tiles]  # by platform, "default" for any other
    adapter_ids: Int[Array, "N k"]  # what was sorted, to notice another Routing
    num_slots: int = dataclasses.field(metadata={"static": True})
    strategy: str = dataclasses.field(metadata={"static": True})  # as asked for: grouped, or auto


class Operands(NamedTuple):
    """What a routed update is differentiable in: W projections that share x."""

    x: Float[Array, "N D"]
    lora_a: tuple[Float[Array, "*L K R D"], ...]
    lora_b: tuple[Float[Array, "*L K R F"], ...]
    gates: Float[Array, "N k"]
    base: tuple[Float[Array, "N F"], ...]


class Indices(NamedTuple):
    """What it is not differentiable in."""

    adapter_ids: Int[Array, "N k"]
    ranks: tuple[Int[Array, "*L K"] | None, ...]
    layer: Int[Array, ""] | None  # which layer of stacks (L, K, R, ·); None for one layer's
    tiles: Tiles | None  # made on the way where None and needed
