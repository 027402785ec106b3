"""MoLoRALinear: a frozen projection plus the routed delta of its adapters."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from molora_jax.adapters import AdapterStack
from molora_jax.parallel import local
from molora_jax.parallel.rules import ROW_SPLIT
from molora_jax.routing.select import rms_normalize
from pallas_kernels import DispatchPlan, Routing, lora_deltas
from pallas_kernels.numerics import layer_of, rows_times_weight


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
        stacks, layer = [self.stacks[name] for name in adapted], self.layer
        if any(local.is_split(each, "fsdp") for each in jax.tree.leaves(stacks)):
            # Of all layers only this one is gathered.
            stacks, layer = [whole_stack(layer_of(each, layer)) for each in stacks], None
        ranks = tuple(each.ranks for each in stacks)
        by_slot = local.is_split(ranks[0], "slots")
        # Rows go to the slots that other devices hold, and partial sums come back.
        x_here = local.to_all_slots(x) if by_slot else x
        deltas = lora_deltas(
            x_here,
            tuple(each.lora_a for each in stacks),
            tuple(each.lora_b for each in stacks),
            self.routing,
            bases=None if by_slot else tuple(bases[name] for name in adapted),
            ranks=ranks,
            strategy=self.strategy,
            backend=self.backend,
            plan=self.plan,
            layer=layer,
        )
        if by_slot:
            deltas = tuple(
                bases[name] + local.from_all_slots(delta, like=x)
                for name, delta in zip(adapted, deltas, strict=True)
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

    def base(self, x: Float[Array, "B S D"], name: str) -> Float[Array, "B S F"]:
        """x·Wᵀ + b, the frozen projection alone; of a row-split one the device's part of it."""
        row_split = name in ROW_SPLIT
        y = linear(x, local.gathered(self.weight[...], axis=-2 if row_split else -1))
        if self.bias is None:
            return y
        bias = local.once(self.bias[...], like=y) if row_split else self.bias[...]
        return y + bias[None, None, :]


def project(
    x: Float[Array, "B S D"],
    projections: Mapping[str, MoLoRALinear],
    adapters: RoutedAdapters | None,
) -> Sequence[Float[Array, "B S F"]]:
    """Projections of the same x (q, k, v; gate, up), each with its delta, in their order.

    On a mesh x holds a device's rows. Of a column-split projection the result is the device's
    columns; of a row-split one (o, down) its part of a sum, which the caller takes (`summed`), once
    for base and delta together.
    """
    bases = {name: each.base(x, name) for name, each in projections.items()}
    return list((bases if adapters is None else adapters.add_to(bases, x)).values())


def whole_stack(stack: AdapterStack) -> AdapterStack:
    """One layer's stack with what lies split over fsdp gathered: the last axis of A and of B."""
    lora_a, lora_b = (local.gathered(each, axis=-1) for each in (stack.lora_a, stack.lora_b))
    return AdapterStack(lora_a, lora_b, stack.ranks)


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
