"""LearnedRouter: a two-layer network that reads a token's hidden state, d → 64 → C (paper, §4)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from molora_jax.routing.hidden import HiddenRouter, matmul
from molora_jax.routing.select import is_count


class LearnedRouter(HiddenRouter):
    """logits = SiLU(x̂·W_in + b_in)·W_out + b_out, with x̂ = hidden / rms(hidden), in float32 always.

    `HiddenRouter` says where it decides and what its settings are; `width` is that of the hidden
    layer.

    For training by the language-model loss use `with_top_k(num_columns)`: the dense mixture, in
    which every column has a gradient. The parameters are the same, so evaluation takes any top_k.

        >>> router = mj.LearnedRouter(64, 2, top_k=1, num_layers=4, rngs=nnx.Rngs(0))
        >>> router.with_top_k(2).top_k, router.num_columns
        (2, 2)
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
        super().__init__(
            d_model,
            num_columns,
            top_k=top_k,
            num_layers=num_layers,
            after_layer=after_layer,
            gate=gate,
        )
        if not is_count(width):
            raise ValueError(f"width is {width!r}: expected a positive integer")
        self.width = width

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

    @property
    def is_stacked(self) -> bool:
        return self.w_in[...].ndim == 3

    def scores(self, x: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """SiLU(x·W_in + b_in)·W_out + b_out of one layer."""
        z = matmul(x, self.w_in[...]) + self.b_in[...][None, :]
        return matmul(jax.nn.silu(z), self.w_out[...]) + self.b_out[...][None, :]

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

    def grown(
        self, weights: Float[ArrayLike, "*L D"], bias: Float[ArrayLike, "*L"]
    ) -> "LearnedRouter":
        """The same router with one more column, whose logit is exactly x̂·weights + bias.

        Two more hidden units carry it (see `from_linear`); the logits of the other columns stay
        what they were, bit for bit where the matrix product keeps its order of sums.

        weights  (L, D) and bias (L,); or (D,) and () for a shared router
        """
        weights, bias = np.asarray(weights, np.float32), np.asarray(bias, np.float32)
        layers = () if self.num_layers is None else (self.num_layers,)
        if weights.shape != (*layers, self.d_model) or bias.shape != layers:
            raise ValueError(
                f"weights {weights.shape} and bias {bias.shape} do not fit: expected "
                f"{(*layers, self.d_model)} and {layers} from the router"
            )
        other = LearnedRouter(
            self.d_model,
            self.num_columns + 1,
            top_k=self.top_k,
            width=self.width + 2,
            num_layers=self.num_layers,
            after_layer=self.after_layer,
            gate=self.gate,
            rngs=nnx.Rngs(0),
        )
        w_out = np.zeros(other.w_out[...].shape, np.float32)
        w_out[..., :-2, :-1] = self.w_out[...]
        w_out[..., -2:, -1] = 1.0, -1.0
        pair = np.stack([weights, -weights], axis=-1)
        other.w_in[...] = jnp.concatenate([self.w_in[...], pair], axis=-1)
        other.b_in[...] = jnp.concatenate([self.b_in[...], jnp.zeros((*layers, 2))], axis=-1)
        other.w_out[...] = jnp.asarray(w_out)
        other.b_out[...] = jnp.concatenate([self.b_out[...], bias[..., None]], axis=-1)
        return other

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
