"""LearnedRouter: a two-layer network that reads a token's hidden state, d → 64 → C (paper, §4)."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from molora_jax.routing.select import check_choice, is_count, rms_normalize, select
from pallas_kernels import Routing


class LearnedRouter(nnx.Module):
    """logits = SiLU(x̂·W_in + b_in)·W_out + b_out, with x̂ = hidden / rms(hidden), in float32 always.

    Give `num_layers` for one network per decoder layer (decision "per_layer"): every parameter then
    has a leading layer axis, and the decoder hands each layer its own slice. Give `after_layer` for
    one network that reads the output of that layer, numbered from 0 (decision "shared"); layers up
    to and including it use no adapter. −1 is the embedding: every layer is adapted.

    For training by the language-model loss use `with_top_k(num_columns)`: the dense mixture, in
    which every column has a gradient. The parameters are the same, so evaluation takes any top_k.

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
        width: int = 64,
        num_layers: int | None = None,
        after_layer: int | None = None,
        gate: str = "softmax",
        rngs: nnx.Rngs,
    ):
        check_choice(top_k=top_k, num_columns=num_columns, gate=gate)
        for name, size in (("d_model", d_model), ("width", width), ("num_layers", num_layers)):
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
        self.d_model, self.num_columns, self.width = d_model, num_columns, width
        self.num_layers, self.after_layer = num_layers, after_layer
        self.top_k, self.gate = top_k, gate

        stack = () if num_layers is None else (num_layers,)
        batch = tuple(range(len(stack)))
        fan_in = nnx.initializers.variance_scaling
        # Half the usual scale at the output: a new router starts near the uniform mixture
        # (entropy near ln C), where all columns get a gradient.
        first = fan_in(1.0, "fan_in", "normal", batch_axis=batch)
        second = fan_in(0.25, "fan_in", "normal", batch_axis=batch)
        self.w_in = nnx.Param(first(rngs.params(), (*stack, d_model, width), jnp.float32))
        self.b_in = nnx.Param(jnp.zeros((*stack, width), jnp.float32))
        self.w_out = nnx.Param(second(rngs.params(), (*stack, width, num_columns), jnp.float32))
        self.b_out = nnx.Param(jnp.zeros((*stack, num_columns), jnp.float32))

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
            raise ValueError("hidden is None: LearnedRouter reads the hidden state of its layer")
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
        if self.w_in[...].ndim != 2:
            raise ValueError(
                f"this router holds the networks of {self.num_layers} layers: hand it to the "
                "decoder, or take one with router.layer(index)"
            )
        hidden = hidden.astype(jnp.float32)
        # Tested on the mean square, which also finds finite numbers too large to be squared. Such
        # rows are computed from zeros, so that they send no NaN into the gradient of the weights.
        finite = jnp.isfinite(jnp.mean(hidden * hidden, axis=-1, keepdims=True))
        x = rms_normalize(jnp.where(finite, hidden, 0.0))
        z = _matmul(x, self.w_in[...]) + self.b_in[...][None, :]
        logits = _matmul(jax.nn.silu(z), self.w_out[...]) + self.b_out[...][None, :]
        return jnp.where(finite, logits, jnp.nan)

    def layer(self, index: int) -> "LearnedRouter":
        """The network of one layer, of a router that has one per layer."""
        if self.w_in[...].ndim != 3:
            raise ValueError("this router holds one network: there is no layer to take from it")
        return jax.tree.map(lambda leaf: leaf[index], self)

    def with_top_k(self, top_k: int) -> "LearnedRouter":
        """The same router, sharing its parameters, with another top_k."""
        check_choice(top_k=top_k, num_columns=self.num_columns)
        other = copy.copy(self)
        other.top_k = top_k
        return other

    @classmethod
    def from_linear(
        cls,
        weights: Float[ArrayLike, "*L D C"],
        bias: Float[ArrayLike, "*L C"],
        *,
        top_k: int,
        width: int = 64,
        after_layer: int | None = None,
        gate: str = "softmax",
        rngs: nnx.Rngs,
    ) -> "LearnedRouter":
        """The router whose logits are exactly x̂·weights + bias, as a start for gradient training.

        SiLU(z) − SiLU(−z) = z, so a pair of hidden units carries each column unchanged; the other
        width − 2C units keep their random input weights and have zero output weights, so they
        change nothing until training uses them.

        weights      (L, D, C), a network per layer; or (D, C) with after_layer, a shared one
        bias         (L, C) or (C,)
        """
        weights, bias = np.asarray(weights), np.asarray(bias)
        D, C = weights.shape[-2:]
        stacked = weights.ndim == 3
        if weights.ndim not in (2, 3) or bias.shape != (*weights.shape[:-2], C):
            raise ValueError(
                f"weights {weights.shape} and bias {bias.shape} do not fit: expected (L, D, C) and "
                "(L, C), or (D, C) and (C,)"
            )
        if width < 2 * C:
            raise ValueError(
                f"width {width} is too small to embed {C} columns: two hidden units carry each, "
                f"so at least {2 * C} are needed"
            )
        num_layers = weights.shape[0] if stacked else None
        router = cls(
            D,
            C,
            top_k=top_k,
            width=width,
            num_layers=num_layers,
            after_layer=after_layer,
            gate=gate,
            rngs=rngs,
        )
        signs = np.concatenate([np.eye(C), -np.eye(C)], axis=1)  # (C, 2C)
        w_in = np.array(router.w_in[...])
        w_in[..., : 2 * C] = weights @ signs
        w_out = np.zeros(router.w_out[...].shape, np.float32)
        w_out[..., : 2 * C, :] = signs.T
        router.w_in[...] = jnp.asarray(w_in)
        router.w_out[...] = jnp.asarray(w_out)
        router.b_out[...] = jnp.asarray(bias, jnp.float32)
        return router

    def to_config(self) -> dict[str, Any]:
        """The constructor's settings as plain JSON."""
        names = ("d_model", "num_columns", "top_k", "width", "num_layers", "after_layer", "gate")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any], arrays: dict[str, np.ndarray]) -> "LearnedRouter":
        """The router that `to_config` and its parameters describe."""
        # Shapes first: damaged settings could ask for more memory than there is.
        abstract = nnx.eval_shape(lambda: cls(**config, rngs=nnx.Rngs(0)))
        for name in ("w_in", "b_in", "w_out", "b_out"):
            value, expected = arrays[name], getattr(abstract, name).shape
            if value.shape != expected:
                raise ValueError(
                    f"router parameter {name} has shape {value.shape}, but its settings "
                    f"{config} ask for {expected}: the two belong to different routers"
                )
        router = cls(**config, rngs=nnx.Rngs(0))
        for name in ("w_in", "b_in", "w_out", "b_out"):
            getattr(router, name)[...] = jnp.asarray(arrays[name], jnp.float32)
        return router


def _matmul(x: Float[Array, "N D"], weight: Float[Array, "D F"]) -> Float[Array, "N F"]:
    # A GPU would multiply float32 in TF32 unless told otherwise.
    return jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST)
