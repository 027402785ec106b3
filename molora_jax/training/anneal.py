"""A router's temperature, which falls while it is trained, handed to the compiled step."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from molora_jax.routing import LearnedRouter
from molora_jax.training.config import AnnealedConfig
from molora_jax.training.data import Batch, BatchOrder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnnealedBatch(Batch):
    """A batch with what its step is told beside it, the same number in every row.

    temperature  (B, 1) what the router's logits are divided by
    moving       (B, 1) 0 while the router stands still, then 1
    """

    temperature: Float[Any, "*accumulate B 1"]
    moving: Float[Any, "*accumulate B 1"]

    @classmethod
    def of(cls, batch: Batch, *, temperature: float = 1.0, moving: bool = True) -> "AnnealedBatch":
        """The rows of a batch, and what they are told."""
        leaves = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        told = {
            name: np.full((batch.num_rows, 1), value, np.float32)
            for name, value in {"temperature": temperature, "moving": moving}.items()
        }
        return cls(**leaves, **told)


@dataclasses.dataclass(frozen=True)
class AnnealedOrder:
    """The rows of a step with the router's temperature there."""

    rows: BatchOrder
    config: AnnealedConfig

    @property
    def windows(self) -> Batch:
        return self.rows.windows

    def __call__(self, step: int) -> AnnealedBatch:
        return AnnealedBatch.of(
            self.rows(step),
            temperature=self.config.temperature_at(step),
            moving=step >= self.config.held_steps,
        )


def tempered(router: LearnedRouter, temperature: Any) -> LearnedRouter:
    """The router with its logits divided by the temperature: they are linear in the last layer."""

    def divided(path: tuple, leaf: Any) -> Any:
        return leaf / temperature if path[0].name in ("w_out", "b_out") else leaf

    return jax.tree_util.tree_map_with_path(divided, router)
