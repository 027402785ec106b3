"""What the routers that read a hidden state share: checks, normalisation, the call."""

import copy
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from molora_jax.routing.select import check_choice, is_count, rms_normalize, select
from pallas_kernels import Routing

R = TypeVar("R", bound="HiddenRouter")


class HiddenRouter(nnx.Module):
    """logits = scores(x̂) with x̂ = hidden / rms(hidden), in float32 always.

    Give `num_layers` for one function per decoder layer (decision "per_layer"): every array then
    has a leading layer axis, and the decoder hands each layer its own slice. Give `after_layer` for
    one function that reads the output of that layer, numbered from 0 (decision "shared"); layers up
    to and including it use no adapter. −1 is the embedding: every layer is adapted.

    A subclass has `scores`, the logits of one layer, and `is_stacked`, whether its arrays are still
    those of all layers.

    d_model      D, width of the hidden state
    num_columns  C, one per adapter
    top_k        adapters per token, 1..C
    gate         "softmax" over the selected, or "unit"; see `select`
    """

    def __init__(
        self,
        d_model: int,
        num_columns: int,
        *,
        top_k: int,
        num_layers: int | None = None,
        after_layer: int | None = None,
        gate: str = "softmax",
    ):
        check_choice(top_k=top_k, num_columns=num_columns, gate=gate)
        for name, size in (("d_model", d_model), ("num_layers", num_layers)):
            if size is not None and not is_count(size):
                raise ValueError(f"{name} is {size!r}: expected a positive integer")
        if (num_layers is None) == (after_layer is None):
            raise ValueError(
                f"num_layers is {num_layers!r} and after_layer is {after_layer!r}: give exactly "
                "one, num_layers for a router in every layer or after_layer for one shared decision"
            )
        if after_layer is not None and after_layer not in (-1, 0) and not is_count(after_layer):
            raise ValueError(
                f"after_layer {after_layer!r} is no layer: they are numbered from 0, and -1 is the "
                "embedding"
            )
        self.decision = "shared" if num_layers is None else "per_layer"
        self.d_model, self.num_columns = d_model, num_columns
        self.num_layers, self.after_layer = num_layers, after_layer
        self.top_k, self.gate = top_k, gate

    @property
    def is_stacked(self) -> bool:
        raise NotImplementedError

    def scores(self, x: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """Logits of one layer from finite, normalised rows."""
        raise NotImplementedError

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"] | None,
        mask: Bool[Array, "B S"],
        state: Any = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, Float[Array, "N C"], Any]:
        """Routing of N = B·S tokens, the raw logits, and `state` as it came."""
        if hidden is None:
            raise ValueError(
                f"hidden is None: {type(self).__name__} reads the hidden state of its layer"
            )
        if hidden.shape != (*mask.shape, self.d_model):
            raise ValueError(
                f"hidden has shape {hidden.shape}, expected (B, S, D) = "
                f"{(*mask.shape, self.d_model)} from mask and the router's d_model"
            )
        logits = self.logits(hidden.reshape(-1, self.d_model))
        routing = select(
            logits,
            mask.reshape(-1),
            top_k=self.top_k,
            gate=self.gate,
            column_to_slot=column_to_slot,
        )
        return routing, logits, state

    def logits(self, hidden: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """Raw logits of one layer, NaN for a token whose hidden state is not finite."""
        if self.is_stacked:
            raise ValueError(
                f"this router holds the networks of {self.num_layers} layers: hand it to the "
                "decoder, or take one with router.layer(index)"
            )
        hidden = hidden.astype(jnp.float32)
        # Tested on the mean square, which also finds finite numbers too large to be squared. Such
        # rows are computed from zeros, so that they send no NaN into the gradient of the weights.
        finite = jnp.isfinite(jnp.mean(hidden * hidden, axis=-1, keepdims=True))
        x = rms_normalize(jnp.where(finite, hidden, 0.0))
        return jnp.where(finite, self.scores(x), jnp.nan)

    def layer(self: R, index: int) -> R:
        """The network of one layer, of a router that has one per layer."""
        if not self.is_stacked:
            raise ValueError("this router holds one network: there is no layer to take from it")
        return jax.tree.map(lambda leaf: leaf[index], self)

    def with_top_k(self: R, top_k: int) -> R:
        """The same router, sharing its arrays, with another top_k."""
        check_choice(top_k=top_k, num_columns=self.num_columns)
        other = copy.copy(self)
        other.top_k = top_k
        return other


def matmul(x: Float[Array, "N D"], weight: Float[Array, "D F"]) -> Float[Array, "N F"]:
    """x · weight in true float32: a GPU would multiply in TF32 unless told otherwise."""
    return jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST)
