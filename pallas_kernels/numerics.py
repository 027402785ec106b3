"""What every path agrees on: the accumulator, exact products, which ids and rows count."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.arrays import Array, Bool, Float, Int

FEW_ROWS = 64  # up to which a CPU's product is as costly as reading its weight


def accumulator_dtype(*arrays: Array) -> jnp.dtype:
    """float32 for halves and singles, float64 where an input is one."""
    wide = any(a.dtype == jnp.float64 for a in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def matmul(a: Array, b: Array, *, contract: tuple[int, int], dtype: jnp.dtype) -> Array:
    """Σ a·b over axis `contract[0]` of a and `contract[1]` of b, accumulated in `dtype`.

    HIGHEST because float32 products default to TF32 on a GPU. Operands keep their own width
    unless they differ (a float32 h times a bfloat16 lora_b), where the narrow one is widened.
    """
    if a.dtype != b.dtype:
        a, b = a.astype(dtype), b.astype(dtype)
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def rows_times_weight(
    x: Float[Array, "N D"], weight: Float[Array, "F D"], product: Callable[..., Array]
) -> Float[Array, "N F"]:
    """x·Wᵀ as `product(x, weight, contract=(1, 1))`; for few rows on a CPU as (W·xᵀ)ᵀ.

    A product on a CPU streams its left factor and repacks its right one, and for the rows of a
    decode step the weight is nearly all there is to read.
    """

    def as_it_stands(x, weight):
        return product(x, weight, contract=(1, 1))

    def weight_first(x, weight):
        # The barriers keep XLA from turning the product back.
        columns = lax.optimization_barrier(x.T)
        return lax.optimization_barrier(product(weight, columns, contract=(1, 0))).T

    if not 2 <= len(x) <= FEW_ROWS:
        return as_it_stands(x, weight)
    return lax.platform_dependent(x, weight, cpu=weight_first, default=as_it_stands)


def known_ids(adapter_ids: Int[Array | np.ndarray, "N k"], num_slots: int) -> Int[Array, "N k"]:
    """int32 ids with everything outside [0, num_slots) as −1."""
    # Compared before the cast: a 64-bit id may wrap onto a real slot.
    known = (adapter_ids >= 0) & (adapter_ids < num_slots)
    return jnp.where(known, jnp.asarray(adapter_ids, jnp.int32), -1)


def rows_in_rank(ranks: Int[Array, " K"] | None, rank: int, num_slots: int) -> Bool[Array, "K R"]:
    """True for the rows of each slot that count: all of them where `ranks` is None."""
    if ranks is None:
        return jnp.ones((num_slots, rank), bool)
    return jnp.arange(rank, dtype=jnp.int32)[None, :] < ranks.astype(jnp.int32)[:, None]


def layer_of(stacked, layer: int | Int[Array, ""] | None):
    """One layer of a pytree of stacks, or all of it where it holds one layer."""
    return stacked if layer is None else jax.tree.map(lambda leaf: leaf[layer], stacked)


def vary_together(tree):
    """Inside `shard_map`, lets every array of a pytree vary over the axes that any of them does.

    The rule of a `custom_vjp` must return cotangents typed like its arguments. After this they
    all vary, and the sum over devices that a replicated argument needs is the transpose of the
    mark. Outside `shard_map` nothing varies and this does nothing.
    """
    union = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))

    def mark(a):
        missing = union - varying_axes(a)
        return lax.pcast(a, tuple(missing), to="varying") if missing else a

    return jax.tree.map(mark, tree)


def varying_axes(a: Array) -> frozenset:
    """The mesh axes of a `shard_map` over which an array differs from device to device."""
    return frozenset(jax.typeof(a).mat.varying)


def shape_varying_like(like: Array, shape: Sequence[int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """The shape of a kernel's output that varies over devices as `like` does."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=jax.typeof(like).mat)


def zeros_varying_like(like: Array, shape: Sequence[int], dtype: DTypeLike) -> Float[Array, "..."]:
    """Zeros fit to start a loop whose result varies over devices as `like` does."""
    return lax.full_like(like, 0, dtype=dtype, shape=tuple(shape))
