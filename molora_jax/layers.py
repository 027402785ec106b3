"""MoLoRALinear: a frozen projection plus the routed delta of its adapters."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from molora_jax.adapters import AdapterStack
from pallas_kernels import DispatchPlan, Routing, lora_delta


@dataclasses.dataclass(frozen=True)
class RoutedAdapters:
    """What one decoder layer needs to add its deltas: its slots, the decision, how to compute it.

    `stacks` holds one layer: lora_a (K, R, D), lora_b (K, R, F), ranks (K,). Projections that no
    adapter of the bank touches are absent and stay exactly the base.
    """

    stacks: dict[str, AdapterStack]
    routing: Routing
    plan: DispatchPlan | None
    strategy: str
    backend: str

    def add_to(self, base: Array, projection: str, x: Array) -> Array:
        """base + Σ_j gate_j · B[id_j]·(A[id_j]·x) for x (B, S, D) and base (B, S, F)."""
        stack = self.stacks.get(projection)
        if stack is None:
            return base
        return lora_delta(
            x,
            stack.lora_a,
            stack.lora_b,
            self.routing,
            base=base,
            ranks=stack.ranks,
            strategy=self.strategy,
            backend=self.backend,
            plan=self.plan,
        )


class MoLoRALinear(nnx.Module):
    """y = x·Wᵀ + b + Σ_j gate_j · B[id_j]·(A[id_j]·x); paper 2603.15965, "learned routing".

    The adapters are an argument and not parameters of the module: a bank is data of the compiled
    step, so that loading one changes no graph, and the base has no trainable leaf to freeze.

    `weight` is (F, D), contraction last, as every checkpoint format stores it; `bias` (F,) or None.
    """

    def __init__(self, weight: Array, bias: Array | None = None):
        self.weight = nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(
        self, x: Float[Array, "B S D"], projection: str, adapters: RoutedAdapters | None
    ) -> Float[Array, "B S F"]:
        y = linear(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...][None, None, :]
        return y if adapters is None else adapters.add_to(y, projection, x)


def linear(x: Float[Array, "*n D"], weight: Float[Array, "F D"]) -> Float[Array, "*n F"]:
    """x·Wᵀ in the inputs' dtype; float32 is computed in full, never in TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=precision)


def rms_norm(x: Float[Array, "*n D"], weight: Float[Array, " D"], *, eps: float) -> Array:
    """x / rms(x) · weight, computed in float32 and returned in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * scale).astype(x.dtype)
