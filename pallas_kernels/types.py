"""The two values that travel with every routed projection: who goes where, and in what order."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Which adapter slots each token uses, and how strongly.

    `adapter_ids[n, j]` is a slot of the bank, −1 for no adapter; `gates[n, j]` its weight.
    A stacked Routing (one decision per layer) carries a leading layer axis on both.
    """

    # numpy where it has been fetched to the host.
    adapter_ids: Int[Array | np.ndarray, "*L N k"]
    gates: Float[Array | np.ndarray, "*L N k"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchPlan:
    """The entries (token, choice) of a Routing sorted by adapter, cut into tiles of one adapter.

    Each of the T tiles has `block` rows, live tiles first; only the last tile of an adapter has
    padding, and padding exists in these indices alone, never in the activations. A plan depends
    on the ids and not on the gates, and serves every projection that shares the decision.
    """

    order: Int[Array, " rows"]  # (T·block,): the token of each row, N in padding
    position: Int[Array, "N k"]  # the row of each entry, T·block where it has none: the inverse
    offsets: Int[Array, " slots_and_end"]  # (K + 1,): entries of the adapters before; their total
    tile_adapter: Int[Array, " T"]  # the adapter of each tile, −1 for an empty one
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        return self.offsets.shape[0] - 1
