"""Grouped-query attention, rotary positions, and which position a token has.

Letters beyond the table of design.md: T keys and values that a query may see, h heads of any kind.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B Hk T Dh"],
    v: Float[Array, "B Hk T Dh"],
    visible: Bool[Array, "B S T"],
    *,
    packed: bool = False,
) -> Float[Array, "B S H Dh"]:
    """Grouped-query attention; the softmax is in float32.

    Hidden keys get a finite minimum, so that a padding query, which sees nothing, stays finite.
    Where rows are `packed` with several texts, a value that is not finite reaches the queries that
    see it alone: a weight of zero would not keep it from the others, since 0 · NaN is NaN.
    """
    B, S, H, Dh = q.shape
    Hk = k.shape[1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(B, S, Hk, H // Hk, Dh)
    scores = jnp.einsum(
        "bsngd,bntd->bngst", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible[:, None, None], scores * Dh**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    if packed:
        broken = ~jnp.isfinite(v).all(axis=(1, 3))  # (B, T)
        v = jnp.where(broken[:, None, :, None], 0, v)
    out = jnp.einsum("bngst,bntd->bsngd", weights, v, precision=precision).reshape(B, S, H, Dh)
    if packed:
        out = jnp.where((visible & broken[:, None]).any(axis=-1)[..., None, None], jnp.nan, out)
    return out


def rotate(
    x: Float[Array, "B S h Dh"], cos: Float[Array, "B S half"], sin: Float[Array, "B S half"]
) -> Float[Array, "B S h Dh"]:
    """Rotary position embedding in half-split order: a head's two halves turn together."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def positions_of(
    mask: Bool[Array, "B S"], segments: Int[Array, "B S"] | None = None
) -> Int[Array, "B S"]:
    """Position of each real token in its own text, 0 for what precedes it: padding takes none."""
    count = jnp.cumsum(mask, axis=1, dtype=jnp.int32)
    if segments is not None:
        begins = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
        count -= jax.lax.cummax(jnp.where(begins, count - mask, 0), axis=1)
    return jnp.maximum(count - 1, 0)
