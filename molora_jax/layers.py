"""MoLoRALinear: a frozen projection plus the routed delta of its adapters."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from molora_jax.adapters import AdapterStack
from molora_jax.routing.select import rms_normalize
from pallas_kernels import DispatchPlan, Routing, lora_deltas
from pallas_kernels.numerics import rows_times_weight


@dataclasses.dataclass(frozen=True)
class RoutedAdapters:
    """What one decoder layer needs to add its deltas: its slots, the decision, how to compute it.

    With `layer`, `stacks` holds all layers (a leading L axis) and the kernels find the layer
    themselves: a slice inside a compiled step for a GPU would copy it. With None, inside a scan,
    it holds the one layer: lora_a (K, R, D), lora_b (K, R, F), ranks (K,). Projections that no
    adapter of the bank touches are absent and stay exactly the base.
    """

    stacks: dict[str, AdapterStack]
    routing: Routing
    plan: DispatchPlan | None
    strategy: str
    backend: str
    layer: int | None = None

    def add_to(self, bases: Mapping[str, Array], x: Array) -> dict[str, Array]:
        """base + Σ_j gate_j · B[id_j]·(A[id_j]·x) for each base (B, S, F) of the same x (B, S, D).

        Projections that share x share one pass over it.
        """
        adapted = [name for name in bases if name in self.stacks]
        if not adapted:
            return dict(bases)
        stacks = [self.stacks[name] for name in adapted]
        deltas = lora_deltas(
            x,
            tuple(each.lora_a for each in stacks),
            tuple(each.lora_b for each in stacks),
            self.routing,
            bases=tuple(bases[name] for name in adapted),
            ranks=tuple(each.ranks for each in stacks),
            strategy=self.strategy,
            backend=self.backend,
            plan=self.plan,
            layer=self.layer,
        )
        return dict(bases) | dict(zip(adapted, deltas, strict=True))


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
        self, x: Float[Array, "B S D"], name: str, adapters: RoutedAdapters | None
    ) -> Float[Array, "B S F"]:
        (y,) = project(x, {name: self}, adapters)
        return y

    def base(self, x: Float[Array, "B S D"]) -> Float[Array, "B S F"]:
        """x·Wᵀ + b, the frozen projection alone."""
        y = linear(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, None, :]


def project(
    x: Float[Array, "B S D"],
    projections: Mapping[str, MoLoRALinear],
    adapters: RoutedAdapters | None,
) -> Sequence[Float[Array, "B S F"]]:
    """Projections of the same x (q, k, v; gate, up), each with its delta, in their order."""
    bases = {name: each.base(x) for name, each in projections.items()}
    return list((bases if adapters is None else adapters.add_to(bases, x)).values())


def linear(x: Float[Array, "*n D"], weight: Float[Array, "F D"]) -> Float[Array, "*n F"]:
    """x·Wᵀ in the inputs' dtype; float32 is computed in full, never in TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def product(left, right, *, contract):
        one, other = contract
        return jax.lax.dot_general(left, right, (((one,), (other,)), ((), ())), precision=precision)

    y = rows_times_weight(x.reshape(-1, x.shape[-1]), weight, product)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def rms_norm(x: Float[Array, "*n D"], weight: Float[Array, " D"], *, eps: float) -> Array:
    """x / rms(x) · weight in float32, returned in x's dtype; NaN where x² overflows."""
    wide = rms_normalize(x, eps=eps)
    scale = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * scale).astype(x.dtype)
