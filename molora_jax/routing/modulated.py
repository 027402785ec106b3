"""ModulatedRouter: one adapter whose scale follows the text, token by token, with a memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from molora_jax.routing.fixed import place
from molora_jax.routing.hidden import matmul
from molora_jax.routing.select import is_count
from pallas_kernels import Routing


class ModulatedRouter(nnx.Module):
    """The scale of one adapter, in every layer, as a function of the tokens so far.

        a_t = σ(x̂_t·W_a + b_a)                 how much is kept
        u_t = tanh(x̂_t·W_u + b_u)              what is written
        h_t = a_t·h_(t−1) + (1 − a_t)·u_t      selective, diagonal; h_0 = 0; n numbers a layer
        s_t = 2·σ(h_t·w_out)                   the gate: in (0, 2), exactly 1 while w_out = 0

    with x̂ the layer's input over its root mean square, all in float32. With recurrent=False h_t is
    (1 − a_t)·u_t: the same parameters and no memory.

    This is our reading of MaLoRA, of which we know an abstract: a LoRA whose scaling factor is an
    input-dependent function with recurrent state across tokens (selective state-space modulation).
    Form and size of the recurrence, its input, the bounded gate and the start are our choice.

    A row's state begins at 0 in every call, and padding keeps it. So a text must be read whole: a
    call with a single token, as decoding with a cache makes, is refused, and a recurrent router is
    refused texts packed behind one another in a row (`segments`), which would share a state.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_layers: int,
        state_size: int = 8,
        recurrent: bool = True,
        rngs: nnx.Rngs,
    ):
        for name, value in {
            "d_model": d_model, "num_layers": num_layers, "state_size": state_size
        }.items():  # fmt: skip
            if not is_count(value):
                raise ValueError(f"{name} is {value!r}: expected a positive integer")
        self.decision, self.top_k, self.num_columns = "per_layer", 1, 1
        self.d_model, self.num_layers = d_model, num_layers
        self.state_size, self.recurrent = state_size, recurrent
        shape = (num_layers, d_model, state_size)
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=(0,))
        self.w_keep = nnx.Param(0.1 * init(rngs.params(), shape, jnp.float32))
        # Memories of about 2 to 64 tokens, so that training finds short and long ones.
        spans = np.geomspace(2.0, 64.0, state_size)
        bias = np.tile(np.log(spans - 1.0), (num_layers, 1))
        self.b_keep = nnx.Param(jnp.asarray(bias, jnp.float32))
        self.w_write = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.b_write = nnx.Param(jnp.zeros((num_layers, state_size), jnp.float32))
        self.w_out = nnx.Param(jnp.zeros((num_layers, state_size), jnp.float32))

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"] | None,
        mask: Bool[Array, "B S"],
        state: Any = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, None, None]:
        """Routing (N, 1) in slots, with s_t as gates; no logits and nothing to carry.

        Raises ValueError for a single token a row (see the class) or without a layer's input.
        """
        if hidden is None or self.w_out[...].ndim != 1:
            raise ValueError(
                "ModulatedRouter decides in every layer: pass one layer's slice and its input, as "
                "Decoder does"
            )
        if self.recurrent and token_ids.shape[1] == 1:
            raise ValueError(
                "ModulatedRouter got one token a row: its state is not kept between calls, so "
                "decoding with a cache would begin it anew at every token. Read the whole text at "
                "once (Decoder(tokens, mask, ...))"
            )
        # A token that is not finite has no adapter and leaves the state as it was.
        x = hidden.astype(jnp.float32)
        mask = mask & jnp.isfinite(jnp.mean(x * x, axis=-1))
        scale = self.scales(hidden, mask)
        ids = place(jnp.where(mask, 0, -1).astype(jnp.int32), column_to_slot).reshape(-1, 1)
        return Routing(ids, jnp.where(ids >= 0, scale.reshape(-1, 1), 0.0)), None, None

    def scales(
        self, hidden: Float[Array, "B S D"], mask: Bool[Array, "B S"]
    ) -> Float[Array, "B S"]:
        """s_t of one layer; at padding that of the token before."""
        real = mask[:, :, None]
        # Padding may hold anything, and 0·NaN is NaN, in a gradient too: it is replaced first.
        x = jnp.where(real, hidden.astype(jnp.float32), 0.0)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        flat = x.reshape(-1, self.d_model)
        shape = (*mask.shape, self.state_size)
        keep = jax.nn.sigmoid(matmul(flat, self.w_keep[...]) + self.b_keep[...][None, :])
        write = jnp.tanh(matmul(flat, self.w_write[...]) + self.b_write[...][None, :])
        added = jnp.where(real, ((1.0 - keep) * write).reshape(shape), 0.0)
        h = added
        if self.recurrent:
            h = recurrence(jnp.where(real, keep.reshape(shape), 1.0), added)
        h = matmul(h.reshape(-1, self.state_size), self.w_out[...][:, None])
        return 2.0 * jax.nn.sigmoid(h.reshape(mask.shape))

    def to_config(self) -> dict[str, Any]:
        """The constructor's settings as plain JSON."""
        names = ("d_model", "num_layers", "state_size", "recurrent")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> "ModulatedRouter":
        """The router that `to_config` and its parameters describe."""
        names = ("w_keep", "b_keep", "w_write", "b_write", "w_out")
        # Shapes first: damaged settings could ask for more memory than there is.
        abstract = nnx.eval_shape(lambda: cls(**config, rngs=nnx.Rngs(0)))
        for name in names:
            expected = getattr(abstract, name).shape
            if arrays[name].shape != expected:
                raise ValueError(
                    f"router parameter {name} has shape {arrays[name].shape}, but its settings "
                    f"{config} ask for {expected}: the two belong to different routers"
                )
        router = cls(**config, rngs=nnx.Rngs(0))
        for name in names:
            getattr(router, name)[...] = jnp.asarray(arrays[name], jnp.float32)
        return router


def recurrence(keep: Float[Array, "B S n"], added: Float[Array, "B S n"]) -> Float[Array, "B S n"]:
    """h_t = keep_t·h_(t−1) + added_t along S from h_0 = 0, in log₂ S steps."""

    def together(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(together, (keep, added), axis=1)[1]
