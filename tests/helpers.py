"""What several tests share: tolerances by dtype, strict promotion, unchecked shapes."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np


def tolerance(dtype, *, terms: int = 1) -> dict[str, float]:
    """`rtol` and `atol` for comparing values of order one that were computed in `dtype`.

    A sum of `terms` products of order one errs by about sqrt(terms) roundings; the factor of
    eight is room for a different order of operations. Pass it on: `assert_allclose(a, b,
    **tolerance(x.dtype, terms=D))`.
    """
    error = 8 * float(jnp.finfo(dtype).eps) * max(terms, 1) ** 0.5
    return {"rtol": error, "atol": error}


def assert_close(actual, expected, dtype=None, *, terms: int = 1) -> None:
    """Compares in float64 with the tolerance of `dtype` (by default that of `actual`)."""
    dtype = actual.dtype if dtype is None else dtype
    actual, expected = (np.asarray(each, np.float64) for each in (actual, expected))
    np.testing.assert_allclose(actual, expected, **tolerance(dtype, terms=terms))


@contextlib.contextmanager
def strict_promotion() -> Iterator[None]:
    """No implicit change of dtype or rank inside: for our forward, kernels and routers.

    A context and not a global setting, because optax does not pass under strict promotion.
    """
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@contextlib.contextmanager
def unchecked_shapes() -> Iterator[None]:
    """No shape checks by annotation inside: for tests of the messages that users get instead."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
