"""Routers that no gradient step made: solved from statistics, or keys read off the adapters."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from molora_jax.routing.closed_form import solve_logits
from molora_jax.routing.fixed import RouterData
from molora_jax.routing.hidden import HiddenRouter, matmul
from molora_jax.routing.statistics import RouterStatistics

R = TypeVar("R", bound="LinearRouter")
SIMILARITIES = ("signed", "absolute")


class LinearRouter(HiddenRouter):
    """logits = x̂·weights + bias. What it holds nobody trains; other numbers recompile nothing.

    weights  (L, D, C), a function per layer; or (D, C) with `after_layer`, a shared one
    bias     (L, C) or (C,)
    """

    def __init__(
        self,
        weights: Float[ArrayLike, "*L D C"],
        bias: Float[ArrayLike, "*L C"],
        *,
        top_k: int,
        after_layer: int | None = None,
        gate: str = "softmax",
    ):
        shape = np.shape(weights)
        if len(shape) not in (2, 3) or np.shape(bias) != (*shape[:-2], shape[-1]):
            raise ValueError(
                f"weights {shape} and bias {np.shape(bias)} do not fit: expected (L, D, C) and "
                "(L, C), or (D, C) and (C,)"
            )
        super().__init__(
            shape[-2],
            shape[-1],
            top_k=top_k,
            num_layers=shape[0] if len(shape) == 3 else None,
            after_layer=after_layer,
            gate=gate,
        )
        self.weights = RouterData(jnp.asarray(weights, jnp.float32))
        self.bias = RouterData(jnp.asarray(bias, jnp.float32))

    @property
    def is_stacked(self) -> bool:
        return self.weights[...].ndim == 3

    def scores(self, x: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """x·weights + bias of one layer."""
        return matmul(x, self.weights[...]) + self.bias[...][None, :]

    def to_config(self) -> dict[str, Any]:
        """The settings beside the arrays, as plain JSON."""
        return {name: getattr(self, name) for name in ("top_k", "after_layer", "gate")}

    @classmethod
    def from_config(cls: type[R], config: dict[str, Any], arrays: dict[str, np.ndarray]) -> R:
        """The router that `to_config` and its arrays describe."""
        return cls(arrays["weights"], arrays["bias"], **config)


class StatisticsRouter(LinearRouter):
    """The ridge regression from layer inputs to adapters, solved from what travels with adapters.

    See `statistics` and `closed_form`. Built by `solve`; adding or removing an adapter is solving
    again, which needs no data and changes no shape.

        >>> one, two = (mj.RouterStatistics(4, 64, num_features=8) for _ in range(2))
        >>> for seed, each in enumerate((one, two)):
        ...     inputs = np.random.default_rng(seed).normal(size=(4, 2, 16, 64))
        ...     each.add(inputs, np.ones((2, 16), bool))
        >>> mj.StatisticsRouter.solve([one, two]).num_columns
        2
    """

    @classmethod
    def solve(
        cls,
        statistics: Sequence[RouterStatistics],
        *,
        num_columns: int | None = None,
        top_k: int = 1,
        ridge: float = 1e-2,
        gate: str = "softmax",
    ) -> "StatisticsRouter":
        """A router whose first columns are these adapters, in order.

        The statistics are those of every layer. The same adapters give the same router, bit for
        bit, in whatever order they came.

        num_columns  C, one for each slot of the bank, so that adapters may come and go without a
                     recompilation; the last ones are empty and must be −1 in column_to_slot
                     (the column digest "" is); None: as many as there are adapters
        ridge        λ in units of a feature's mean square
        """
        weights, bias = solve_logits(statistics, ridge=ridge)
        count = len(statistics) if num_columns is None else num_columns
        if count < len(statistics):
            raise ValueError(
                f"num_columns {count} is less than the {len(statistics)} adapters: give one for "
                "each slot of the bank"
            )
        empty = [(0, 0), (0, count - len(statistics))]
        return cls(np.pad(weights, [(0, 0), *empty]), np.pad(bias, empty), top_k=top_k, gate=gate)


class PrototypeRouter(LinearRouter):
    """logits = x̂·key_c + bias_c: how much a token looks like what an adapter was made for.

    similarity "absolute" takes |x̂·key_c|, for keys whose sign means nothing (Arrow's).

    Keys come from `prototypes.arrow_keys` (an adapter's weights alone, arXiv 2405.11157) or from
    `training.gates` (a gate trained with the adapter alone, PHATGOOSE, arXiv 2402.05859).

    keys  (L, D, C), or (D, C) with `after_layer`

        >>> mj.PrototypeRouter(np.ones((4, 64, 2)), top_k=1, similarity="absolute").num_columns
        2
    """

    def __init__(
        self,
        keys: Float[ArrayLike, "*L D C"],
        bias: Float[ArrayLike, "*L C"] | None = None,
        *,
        top_k: int,
        similarity: str = "signed",
        after_layer: int | None = None,
        gate: str = "softmax",
    ):
        if similarity not in SIMILARITIES:
            raise ValueError(
                f"similarity {similarity!r} is unknown: expected one of {', '.join(SIMILARITIES)}"
            )
        shape = np.shape(keys)
        bias = np.zeros((*shape[:-2], shape[-1]), np.float32) if bias is None else bias
        super().__init__(keys, bias, top_k=top_k, after_layer=after_layer, gate=gate)
        self.similarity = similarity

    def scores(self, x: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """x·keys of one layer, or its size, and the bias."""
        found = matmul(x, self.weights[...])
        found = jnp.abs(found) if self.similarity == "absolute" else found
        return found + self.bias[...][None, :]

    def to_config(self) -> dict[str, Any]:
        """The settings beside the keys, as plain JSON."""
        return {**super().to_config(), "similarity": self.similarity}


def standardised(keys: Float[ArrayLike, "*L D C"]) -> Float[np.ndarray, "*L D C"]:
    """Keys with mean 0 and deviation 1 over channels, divided by √D, as PHATGOOSE compares them."""
    keys = np.asarray(keys, np.float32)
    centered = keys - keys.mean(axis=-2, keepdims=True)
    deviation = centered.std(axis=-2, keepdims=True)
    return centered / np.where(deviation > 0, deviation, 1.0) / np.float32(keys.shape[-2] ** 0.5)
