"""One adapter in training: unfolded A and B, the scale applied inside the loss as PEFT does."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from molora_jax.adapters.adapter import Adapter, BaseShape
from molora_jax.adapters.lora_config import lora_scale
from molora_jax.adapters.names import PROJECTIONS, module_name
from molora_jax.adapters.stack import AdapterStack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@typing.no_type_check  # tree.map also builds one of shapes, shardings or optimiser states
class TrainableAdapter:
    """The parameters of one LoRA adapter: a pytree whose only leaves are A and B per projection.

    A bank folds the scale into B. Training does not: Adam's step does not shrink with the
    parameter's unit, so training the folded B would multiply its learning rate by 1/scale compared
    with PEFT. Differentiate with respect to this object and call `stacks()` inside the loss.

    lora_a  {projection: (L, r, D)}    lora_b  {projection: (L, r, F)}, B transposed
    """

    lora_a: dict[str, Float[Array, "L r D"]]
    lora_b: dict[str, Float[Array, "L r F"]]
    alpha: int | float = dataclasses.field(metadata={"static": True})
    use_rslora: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def rank(self) -> int:
        return next(iter(self.lora_a.values())).shape[1]

    @property
    def scale(self) -> float:
        return lora_scale(self.alpha, self.rank, use_rslora=self.use_rslora)

    def stacks(self) -> dict[str, AdapterStack]:
        """A bank of one slot (K = 1), scale folded, for `Decoder(..., adapters=...)`."""
        return {
            name: AdapterStack(
                lora_a=a[:, None],
                lora_b=(self.lora_b[name] * self.scale)[:, None],
                ranks=jnp.full((len(a), 1), self.rank, jnp.int32),
            )
            for name, a in self.lora_a.items()
        }

    def to_adapter(self, name: str, *, base_name: str | None = None) -> Adapter:
        """The host adapter, to be saved as a PEFT folder or loaded into a bank."""
        layers = len(next(iter(self.lora_a.values())))
        arrays = {
            module_name(layer, projection): (
                np.asarray(a[layer]),
                np.asarray(self.lora_b[projection][layer]).T,
            )
            for projection, a in self.lora_a.items()
            for layer in range(layers)
        }
        return Adapter.from_arrays(
            name,
            arrays,
            alpha=self.alpha,
            use_rslora=self.use_rslora,
            base_name=base_name,
            num_layers=layers,
        )


def init_adapter(
    config: BaseShape,
    *,
    rank: int,
    alpha: int | float,
    projections: Sequence[str] = PROJECTIONS,
    rng: Array,
    use_rslora: bool = False,
) -> TrainableAdapter:
    """PEFT's start: A uniform in ±1/√D (Kaiming with a = √5), B zero, so the model is the base.

    rng is a jax.random key. A projection's A depends on the key and its own name, not on which
    other projections are trained.
    """
    unknown = [name for name in projections if name not in PROJECTIONS]
    if unknown or not projections or isinstance(projections, str):
        raise ValueError(
            f"projections is {projections!r}; expected a list of some of {', '.join(PROJECTIONS)}"
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank is {rank!r}; expected a positive integer")
    L, sizes = config.num_layers, config.projection_sizes()
    lora_a, lora_b = {}, {}
    for name in projections:
        D, F = sizes[name]
        key = jax.random.fold_in(rng, PROJECTIONS.index(name))
        bound = D**-0.5
        lora_a[name] = jax.random.uniform(key, (L, rank, D), minval=-bound, maxval=bound)
        lora_b[name] = jnp.zeros((L, rank, F))
    return TrainableAdapter(lora_a, lora_b, alpha=alpha, use_rslora=use_rslora)
