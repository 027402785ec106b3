"""Baselines give what the contract gives: compared with float64 loops on small odd shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.baselines import BASELINES, HOST, tile_loop
from pallas_kernels.shapes import SMALL
from tests.helpers import assert_close
from tests.pallas_kernels.cases import expected, jit, make_case, with_ids

ROUTED = [name for name in BASELINES if name != "single_lora"]
SIZES = ["odd", "one_token", "one_slot", "many_slots", "dense", "past_a_tile"]


def run(name, case):
    function = BASELINES[name] if name in HOST else jit(BASELINES[name])
    return function(case.x, case.lora_a, case.lora_b, case.routing, case.base)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROUTED)
def test_a_baseline_is_the_routed_update(name, size):
    case = make_case(SMALL[size])
    y = run(name, case)
    assert y.dtype == case.base.dtype
    assert_close(y, expected(case), terms=60)


@pytest.mark.parametrize("name", ROUTED)
def test_tokens_without_an_adapter_keep_their_base(name):
    case = make_case(SMALL["odd"])
    routing = with_ids(case.routing, {(0, 0): -1, (0, 1): -1, (5, 0): -1, (7, 1): 3})
    case = dataclasses.replace(case, routing=routing)
    y = run(name, case)
    np.testing.assert_array_equal(y[0], case.base[0])
    assert_close(y, expected(case), terms=60)


@pytest.mark.parametrize("name", ROUTED)
def test_a_baseline_in_bfloat16(name):
    case = make_case(SMALL["odd"], dtype=jnp.bfloat16)
    y = run(name, case)
    assert y.dtype == jnp.bfloat16
    assert_close(y, expected(case), terms=4)


def test_one_lora_on_every_token():
    case = make_case(SMALL["odd"])
    x, a, b = (np.asarray(each, np.float64) for each in (case.x, case.lora_a[0], case.lora_b[0]))
    assert_close(run("single_lora", case), np.asarray(case.base) + x @ a.T @ b, terms=60)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("separate", [False, True])
def test_tiles_over_stacked_and_over_separate_weights(size, separate):
    case = make_case(SMALL[size])
    weights = (case.lora_a, case.lora_b)
    if separate:
        weights = tuple(list(each) for each in weights)
    y = jax.jit(tile_loop, static_argnames="block")(
        case.x, *weights, case.routing, case.base, block=4
    )
    assert_close(y, expected(case), terms=60)


def test_tiles_leave_out_unknown_ids():
    case = make_case(SMALL["odd"])
    case = dataclasses.replace(
        case, routing=with_ids(case.routing, {(0, 0): -1, (0, 1): -1, (36, 1): 3})
    )
    y = jit(tile_loop)(case.x, case.lora_a, case.lora_b, case.routing, case.base)
    np.testing.assert_array_equal(y[0], case.base[0])
    assert_close(y, expected(case), terms=60)
