"""Does the harness itself work: compile counter, tolerances, strict promotion, shape checks?"""

import os

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from molora_jax.compilations import count_compilations
from pallas_kernels import Routing, lora_delta
from tests.helpers import (
    assert_close,
    strict_promotion,
    tolerance,
    unchecked_shapes,
)


def test_compilations_are_counted():
    double = jax.jit(lambda x: x * 2)
    inputs = [np.ones(3, np.float32), np.ones(3, np.float32), np.ones(5, np.float32)]
    counts = []
    for each in inputs:
        with count_compilations() as compiled:
            double(each)
        counts.append(len(compiled))
    assert counts == [1, 0, 1]


def test_tolerance_follows_the_dtype():
    assert tolerance(jnp.float32)["rtol"] < 1e-6 < 1e-3 < tolerance(jnp.bfloat16)["rtol"]
    assert_close(jnp.float32(1 + 2e-7), jnp.float32(1))
    with pytest.raises(AssertionError):
        assert_close(jnp.float32(1.001), jnp.float32(1))


def test_strict_promotion_refuses_mixed_dtypes_and_ranks():
    with strict_promotion():
        with pytest.raises(ValueError, match="promotion"):
            jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.bfloat16)
        with pytest.raises(ValueError, match="rank"):
            jnp.ones(3) + jnp.ones((2, 3))


def test_shapes_are_checked_unless_told_otherwise():
    if os.environ.get("MOLORA_SHAPES") == "off":
        pytest.skip("run with MOLORA_SHAPES=off")
    routing = Routing(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)))
    lora_a, lora_b = jnp.ones((2, 3, 5)), jnp.ones((2, 3, 6))
    wrong = jnp.ones((4, 7))  # lora_a is 5 wide
    with pytest.raises(jaxtyping.TypeCheckError):
        lora_delta(wrong, lora_a, lora_b, routing)
    with unchecked_shapes(), pytest.raises(ValueError, match="7"):
        lora_delta(wrong, lora_a, lora_b, routing)


def test_pytrees_are_rebuilt_from_anything():
    routing = Routing(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)))
    assert jax.tree.map(lambda each: each.ndim, routing) == Routing(2, 2)
