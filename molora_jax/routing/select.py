"""The routing decision, from raw logits to adapter slots and gates: one pure function.

C is the number of router columns. A column stands for an adapter; `column_to_slot` says in which
slot of the bank that adapter lies at this moment.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Routing

GATES = ("softmax", "unit")


def select(
    logits: Float[Array, "N C"],
    mask: Bool[Array, " N"],
    *,
    top_k: int,
    gate: str = "softmax",
    column_to_slot: Int[Array, "*N C"] | None = None,
) -> Routing:
    """Sends each token to the `top_k` adapters with the largest logits.

    In this order: a token whose raw logits are not all finite uses no adapter (id −1, gate 0), and
    so does padding; columns that are not resident (slot −1) are out; the `top_k` largest of the
    rest are taken, in falling order, the lowest column first among equals; where fewer than `top_k`
    are resident, the rest of the ids is −1 and their gates 0.

    logits          (N, C) float32, raw
    mask            (N,), True for real tokens
    gate            "softmax": g = softmax over the selected logits. "unit": the same values, so
                    exactly 1 at k = 1, with the gradient of p = softmax over all resident columns
                    (straight-through): ∂g = ∂p. Softmax over one logit has no gradient, so a router
                    that is trained at k = 1 by the language-model loss needs "unit"
                    (arXiv 2606.31413).
    column_to_slot  (C,) int32, −1 where the column's adapter is not resident; None: slot = column;
                    or (N, C), where every token has a choice of its own

    Raises ValueError for top_k outside 1..C, an unknown gate, or a column_to_slot of wrong length.
    """
    C = logits.shape[-1]
    check_choice(top_k=top_k, num_columns=C, gate=gate)
    resident = resident_columns(column_to_slot, C)
    usable = usable_tokens(logits, mask)
    columns, chosen = choose_columns(logits, usable, resident, top_k=top_k)
    # Finite everywhere from here on: a where() around a NaN or an infinity would still send
    # 0 · NaN back through the gradient.
    safe = jnp.where(usable[:, None], logits.astype(jnp.float32), 0.0)
    gates = _softmax(jnp.take_along_axis(safe, columns, axis=-1), chosen)
    if gate == "unit":
        dense = jnp.take_along_axis(probabilities(safe, resident), columns, axis=-1)
        # p − stop(p) is exactly 0, so the value stays exactly that of `gates`.
        gates = jax.lax.stop_gradient(gates) + (dense - jax.lax.stop_gradient(dense))
    gates = jnp.where(chosen, gates, 0.0)
    return Routing(jnp.where(chosen, place(columns, column_to_slot), -1), gates)


def choose_columns(
    logits: Float[Array, "N C"],
    usable: Bool[Array, " N"],
    resident: Bool[Array, "*N C"],
    *,
    top_k: int,
) -> tuple[Int[Array, "N k"], Bool[Array, "N k"]]:
    """The `top_k` best resident columns of each token, and which of those entries are real."""
    keys = jnp.where(usable[:, None], jax.lax.stop_gradient(logits.astype(jnp.float32)), 0.0)
    # lax.top_k promises the lower index among equals, but orders −0.0 below 0.0.
    keys = jnp.where(keys == 0.0, 0.0, keys)
    resident = jnp.broadcast_to(resident, logits.shape)
    _, columns = jax.lax.top_k(jnp.where(resident, keys, -jnp.inf), top_k)
    return columns, usable[:, None] & jnp.take_along_axis(resident, columns, axis=-1)


def place(columns: Int[Array, "*n"], column_to_slot: Int[Array, "*C"] | None) -> Int[Array, "*n"]:
    """Slot of each column; −1 for column −1, a column past the last, or one not resident.

    With a map of every token's own, (N, C), `columns` is (N, k).
    """
    if column_to_slot is None:
        return columns.astype(jnp.int32)
    C = column_to_slot.shape[-1]
    inside = (columns >= 0) & (columns < C)
    at = jnp.clip(columns, 0, C - 1)
    column_to_slot = column_to_slot.astype(jnp.int32)
    if column_to_slot.ndim == 1:
        slots = column_to_slot[at]
    else:
        slots = jnp.take_along_axis(column_to_slot, at, axis=-1)
    return jnp.where(inside & (slots >= 0), slots, -1)


def usable_tokens(logits: Float[Array, "N C"], mask: Bool[Array, " N"]) -> Bool[Array, " N"]:
    """Real tokens whose raw logits are all finite."""
    return mask & jnp.isfinite(logits).all(axis=-1)


def count_nonfinite(logits: Float[Array, "*L N C"], mask: Bool[Array, " N"]) -> Int[Array, "*L"]:
    """How many real tokens fell back to the base because their logits are not finite, by layer."""
    broken = ~jnp.isfinite(logits).all(axis=-1)
    real = mask.reshape((1,) * (broken.ndim - 1) + mask.shape)
    return (broken & real).sum(axis=-1, dtype=jnp.int32)


def probabilities(
    logits: Float[Array, "N C"], resident: Bool[Array, "*N C"] | None = None
) -> Float[Array, "N C"]:
    """Softmax over the resident columns, 0 for the others; logits must be finite."""
    if resident is None:
        resident = jnp.ones(logits.shape[-1], bool)
    return _softmax(logits, jnp.broadcast_to(resident, logits.shape))


def resident_columns(
    column_to_slot: Int[Array, "*N C"] | None, num_columns: int
) -> Bool[Array, "*N C"]:
    """Which columns may be chosen; ValueError where the map has another number of columns."""
    if column_to_slot is None:
        return jnp.ones(num_columns, bool)
    if column_to_slot.shape[-1] != num_columns:
        raise ValueError(
            f"column_to_slot has shape {column_to_slot.shape}, but the router has {num_columns} "
            f"columns: pass one slot for each, ({num_columns},), -1 where none is resident"
        )
    return column_to_slot >= 0


def rms_normalize(hidden: Float[Array, "*n D"], *, eps: float = 1e-6) -> Float[Array, "*n D"]:
    """x / √(mean(x²) + eps) in float32, without a scale: what every router reads.

    NaN where x² overflows: divided by an infinite root, x would be a plausible 0.
    """
    x = hidden.astype(jnp.float32)
    square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jnp.where(jnp.isfinite(square), jax.lax.rsqrt(square + eps), jnp.nan)


def is_count(value: object) -> bool:
    """Whether it is a positive integer that can be the length of an axis; True and 2.0 are not."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return 0 < int(value) < 2**31


def check_choice(*, top_k: int, num_columns: int, gate: str = "softmax") -> None:
    """ValueError unless 0 < top_k ≤ num_columns and the gate is known."""
    if not (is_count(top_k) and is_count(num_columns) and top_k <= num_columns):
        raise ValueError(
            f"top_k {top_k!r} is not a number from 1 to {num_columns!r}, the number of router "
            "columns (one per adapter): choose a smaller top_k or add adapters"
        )
    if gate not in GATES:
        raise ValueError(f"gate {gate!r} is unknown: expected one of {', '.join(GATES)}")


def _softmax(x: Float[Array, "N C"], allowed: Bool[Array, "N C"]) -> Float[Array, "N C"]:
    """Softmax over the allowed entries of a row; 0 elsewhere, and everywhere if none is allowed."""
    top = jnp.max(jnp.where(allowed, x, -jnp.inf), axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    weight = jnp.where(allowed, jnp.exp(jnp.where(allowed, x - top, 0.0)), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    return weight / jnp.where(total > 0.0, total, 1.0)
