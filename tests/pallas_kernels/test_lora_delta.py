"""The contract of the routed update, held by every strategy."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Routing, lora_delta, make_plan
from pallas_kernels.numerics import matmul, rows_times_weight
from pallas_kernels.shapes import SMALL, WORKLOADS, ProblemSize
from tests.helpers import assert_close, strict_promotion
from tests.pallas_kernels.cases import (
    KERNELS,
    WAYS,
    compiled,
    expected,
    gradients,
    how,
    jit,
    make_case,
    run,
    update,
    with_ids,
)

SIZE = ProblemSize(num_tokens=45, d_in=12, d_out=10, rank=3, num_slots=5, top_k=2)
every_strategy = pytest.mark.parametrize("strategy", WAYS)


@pytest.fixture(autouse=True)
def _strict():
    with strict_promotion():
        yield


@every_strategy
@pytest.mark.parametrize("name", SMALL)
def test_equals_the_definition(strategy, name):
    size = SMALL[name]
    case = make_case(size)
    if size.num_tokens > 3:
        ids = {(0, 0): -1, (2, 0): size.num_slots, (3, 0): -7}
        case = dataclasses.replace(case, routing=with_ids(case.routing, ids))
    y = run(strategy, case)
    assert y.shape == case.base.shape
    assert_close(y, expected(case), terms=size.d_in + size.rank * size.top_k)
    assert size.num_tokens == 0 or np.abs(y - case.base).max() > 0.1, "the adapters do something"


@every_strategy
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_distribution_of_tokens(strategy, name):
    case = make_case(SIZE, name)
    assert_close(run(strategy, case), expected(case), terms=20)


@pytest.mark.parametrize("block", [1, 2, 7, 32, 128])
def test_every_tile_height(block):
    case = make_case(SIZE, "zipf")
    assert_close(run("grouped", case, block=block), expected(case), terms=20)


@every_strategy
def test_leading_axes_and_no_base(strategy):
    case = make_case(SIZE)
    x = case.x.reshape(5, 3, 3, -1)
    y = compiled(strategy)(x, case.lora_a, case.lora_b, case.routing, ranks=case.ranks)
    assert y.shape == (5, 3, 3, SIZE.d_out)
    assert_close(y.reshape(45, -1), expected(case, with_base=False), terms=20)


@every_strategy
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_halves_accumulate_in_float32_and_round_once(strategy, dtype):
    size = ProblemSize(num_tokens=9, d_in=952, d_out=7, rank=5, num_slots=3, top_k=2)
    case = make_case(size, dtype=dtype)
    y = run(strategy, case)
    assert y.dtype == dtype
    # One rounding of the exact result, and no more than float32's own error beside it.
    exact = expected(case)
    half_unit = float(jnp.finfo(dtype).eps) / 2
    # Nine tokens hardly share a set: a pass for each choice, and what the first leaves is rounded.
    between = 6 * half_unit if strategy == "grouped:interpret" else 0
    np.testing.assert_allclose(np.float64(y), exact, rtol=1.01 * half_unit, atol=2e-5 + between)

    wide = dataclasses.replace(case, base=case.base.astype(jnp.float32))
    y = run(strategy, wide)
    assert y.dtype == jnp.float32, "the dtype of base, where there is one"
    np.testing.assert_allclose(np.float64(y), exact, rtol=2e-5, atol=2e-5)


def test_kernels_round_once_where_tokens_share_their_sets():
    size = ProblemSize(num_tokens=70, d_in=40, d_out=24, rank=5, num_slots=3, top_k=2)
    case = make_case(size, dtype=jnp.bfloat16)
    assert make_plan(case.routing, 3, **how("grouped:interpret")).tiles["default"].layout == "sets"
    y = run("grouped:interpret", case)
    half_unit = float(jnp.finfo(jnp.bfloat16).eps) / 2
    np.testing.assert_allclose(np.float64(y), expected(case), rtol=1.01 * half_unit, atol=2e-5)


@every_strategy
def test_mixed_dtypes_keep_their_precision(strategy):
    case = make_case(SIZE)
    case = dataclasses.replace(case, lora_b=case.lora_b.astype(jnp.bfloat16))
    y = run(strategy, case)
    assert y.dtype == jnp.float32
    assert_close(y, expected(case), terms=20)


@every_strategy
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_token_without_adapter_gets_exactly_its_base(strategy, dtype):
    case = make_case(SIZE, dtype=dtype)
    none = {(n, j): -1 for n in (0, 7, 44) for j in range(2)}
    base = case.base.at[0, :3].set(jnp.asarray([-0.0, jnp.inf, 1e-30], dtype))
    gates = case.routing.gates.at[7].set(jnp.nan)
    routing = Routing(with_ids(case.routing, none).adapter_ids, gates)
    case = dataclasses.replace(case, base=base, routing=routing)
    y = run(strategy, case)
    for n in (0, 7, 44):
        assert np.array_equal(y[n], base[n])
    assert np.isfinite(np.asarray(y, np.float32)[1:]).all()
    assert not np.array_equal(y[1], base[1])


@every_strategy
def test_an_id_that_stands_twice_counts_twice(strategy):
    case = make_case(SIZE)
    twice = {(n, j): 2 for n in range(0, 45, 3) for j in range(2)}
    case = dataclasses.replace(case, routing=with_ids(case.routing, twice))
    y = run(strategy, case)
    assert_close(y, expected(case), terms=20)
    # Both gates of such a token on one entry give the same.
    gates = case.routing.gates
    merged = jnp.stack([gates.sum(axis=1), jnp.zeros(45)], axis=1)
    once = dataclasses.replace(case, routing=Routing(case.routing.adapter_ids, merged))
    assert_close(y[::3], run(strategy, once)[::3], terms=20)


@every_strategy
def test_ids_out_of_range_act_as_none_inside_jit_and_are_refused_outside(strategy):
    case = make_case(SIZE)
    wrong = {(1, 0): 5, (4, 1): 2**31 - 1, (4, 0): -2, (9, 0): -(2**31)}
    bad = dataclasses.replace(case, routing=with_ids(case.routing, wrong))
    none = with_ids(case.routing, dict.fromkeys(wrong, -1))
    good = run(strategy, dataclasses.replace(case, routing=none))
    assert np.array_equal(run(strategy, bad), good)
    with pytest.raises(ValueError, match=r"adapter_ids\[1, 0\] is 5 \(4 such ids\).*\[0, 5\)"):
        lora_delta(case.x, case.lora_a, case.lora_b, bad.routing, **how(strategy))


@every_strategy
def test_overflow_of_one_adapter_stays_with_its_tokens(strategy):
    case = make_case(SIZE)
    huge = case.lora_a.at[3].set(3e38)  # finite, and h = A·x is not
    wild = dataclasses.replace(case, lora_a=huge)
    tame = dataclasses.replace(case, lora_a=case.lora_a.at[3].set(0))
    own = np.any(np.asarray(case.routing.adapter_ids) == 3, axis=1)

    y = np.asarray(run(strategy, wild))
    assert (~np.isfinite(y[own])).any(axis=1).mean() > 0.5, "the overflow happens"
    assert np.array_equal(y[~own], np.asarray(run(strategy, tame))[~own])

    # A loss of the other tokens: every gradient of theirs is finite and the same.
    weights = np.where(own[:, None], 0, 1.0 + np.arange(SIZE.d_out)).astype(np.float32)
    found, wanted = (gradients(strategy, each, weights) for each in (wild, tame))
    others = [0, 1, 2, 4]
    for name in ("x", "base", "gates"):
        assert_close(found[name][~own], wanted[name][~own], terms=20)
    for name in ("lora_a", "lora_b"):
        assert np.abs(found[name][others]).max() > 0
        assert_close(found[name][others], wanted[name][others], terms=200)


@pytest.mark.parametrize(
    "strategy", ["grouped", "bgmv", "reference", "grouped:interpret", "bgmv:interpret"]
)
@pytest.mark.parametrize("name", ["lora_a", "lora_b"])
def test_weights_that_are_not_finite_stay_with_their_tokens(strategy, name):
    case = make_case(SIZE)
    case = dataclasses.replace(case, routing=with_ids(case.routing, {(2, 0): -1, (44, 1): -1}))
    # The first and the last slot, where an id without one would be clipped to.
    weights = getattr(case, name).at[jnp.asarray([0, 4]), 0, 2].set(jnp.nan)
    broken = dataclasses.replace(case, **{name: weights})
    own = np.isin(np.asarray(case.routing.adapter_ids), [0, 4]).any(axis=1)
    assert not own[[2, 44]].any()
    y = np.asarray(run(strategy, broken))
    assert np.isnan(y[own]).any(axis=1).all()
    assert np.array_equal(y[~own], np.asarray(run(strategy, case))[~own])

    weights = np.where(own[:, None], 0, 1.0).astype(np.float32) * np.ones((1, 10), np.float32)
    found, wanted = (gradients(strategy, each, weights) for each in (broken, case))
    assert_close(found["x"][~own], wanted["x"][~own], terms=20)
    for each in ("lora_a", "lora_b"):
        assert_close(found[each][1:4], wanted[each][1:4], terms=200)


@pytest.mark.parametrize("strategy", ["all_slots", "grouped", "bgmv", *KERNELS])
@pytest.mark.parametrize(
    "name", ["odd", "many_slots", "dense", pytest.param("every_slot", marks=pytest.mark.long)]
)
def test_gradients_equal_those_of_the_reference(strategy, name):
    size = SMALL[name]
    case = make_case(size)
    ids = {(0, 0): -1, (1, 0): size.num_slots - 1, (1, 1): size.num_slots - 1}
    case = dataclasses.replace(case, routing=with_ids(case.routing, ids))
    weights = np.random.default_rng(1).standard_normal(case.base.shape).astype(np.float32)
    found, wanted = (gradients(each, case, weights) for each in (strategy, "reference"))
    for each, value in wanted.items():
        assert np.abs(value).max() > 0
        assert_close(found[each], value, terms=200)


@every_strategy
def test_gradients_of_halves_have_their_dtype(strategy):
    case = make_case(SIZE)
    half = make_case(SIZE, dtype=jnp.bfloat16)
    weights = np.ones(case.base.shape, np.float32)
    found, wanted = gradients(strategy, half, weights), gradients("reference", case, weights)
    for name in ("x", "lora_a", "lora_b", "base"):
        assert found[name].dtype == jnp.bfloat16
        assert_close(found[name], wanted[name], terms=50)
    assert found["gates"].dtype == jnp.float32


@every_strategy
def test_an_unused_adapter_has_gradients_of_exactly_zero(strategy):
    case = make_case(SIZE)
    # Groups of 8, 0, 8 and 0 entries, and slots past them.
    ids = np.full((45, 2), -1, np.int32)
    ids[:8, 0], ids[8:16, 1] = 0, 2
    case = dataclasses.replace(case, routing=Routing(jnp.asarray(ids), case.routing.gates))
    found = gradients(strategy, case, np.ones(case.base.shape, np.float32))
    for name, value in found.items():
        assert np.isfinite(value).all(), name
    for name in ("lora_a", "lora_b"):
        assert (found[name][[1, 3, 4]] == 0).all()
        assert np.abs(found[name][[0, 2]]).max(axis=(1, 2)).min() > 0
    assert (found["gates"][ids < 0] == 0).all()
    assert (found["x"][16:] == 0).all()


@every_strategy
def test_ranks_from_one_to_the_stacks(strategy):
    size = ProblemSize(num_tokens=31, d_in=9, d_out=8, rank=64, num_slots=6, top_k=1)
    case = make_case(size, "distinct")
    ranks = np.array([1, 2, 4, 8, 12, 64], np.int32)
    past = np.arange(64)[None, :, None] >= ranks[:, None, None]
    # What stands past a rank is not part of the adapter.
    case = dataclasses.replace(
        case,
        lora_a=jnp.where(past, 1e4, make_case(size, seed=1).lora_a + 0.3),
        lora_b=jnp.where(past, 1e4, make_case(size, seed=2).lora_b + 0.2),
        ranks=jnp.asarray(ranks),
    )
    y = run(strategy, case)
    assert_close(y, expected(case), terms=200)
    for slot in range(6):
        alone = [slot, slot + 6]  # tokens that use this adapter
        a, b = (np.float64(w[slot, : ranks[slot]]) for w in (case.lora_a, case.lora_b))
        by_hand = np.float64(case.x)[alone] @ a.T @ b + np.float64(case.base)[alone]
        assert_close(y[jnp.asarray(alone)], by_hand, terms=200)
    found = gradients(strategy, case, np.ones(case.base.shape, np.float32))
    for name in ("lora_a", "lora_b"):
        assert (found[name][past.repeat(found[name].shape[2], axis=2)] == 0).all()
        assert np.abs(found[name]).max(axis=(1, 2)).min() > 0


def test_one_adapter_on_every_token_is_plain_lora_bit_for_bit():
    case = make_case(SMALL["one_slot"])
    routing = Routing(case.routing.adapter_ids, jnp.ones_like(case.routing.gates))

    @jit
    def plain(x, a, b, base):
        product = functools.partial(matmul, dtype=jnp.dtype("float32"))
        return base + product(rows_times_weight(x, a, product), b, contract=(1, 0))

    y = compiled("all_slots")(case.x, case.lora_a, case.lora_b, routing, case.base)
    assert np.array_equal(y, plain(case.x, case.lora_a[0], case.lora_b[0], case.base))


@every_strategy
def test_gates_multiply_h_and_not_the_wide_rows(strategy):
    size = ProblemSize(num_tokens=24, d_in=5, d_out=1009, rank=2, num_slots=3, top_k=2)
    case = make_case(size)
    operands = (case.x, case.lora_a, case.lora_b, case.routing, case.base, case.ranks)
    program = str(jax.make_jaxpr(update(strategy))(*operands))
    multiplied = [line.split("=")[0] for line in program.splitlines() if " = mul " in line]
    assert multiplied
    assert not [shape for shape in multiplied if "1009" in shape]


@pytest.mark.parametrize("strategy", ["all_slots", "grouped"])
def test_no_weight_is_transposed(strategy):
    size = ProblemSize(num_tokens=8, d_in=24, d_out=20, rank=5, num_slots=30, top_k=2)
    case = make_case(size)
    operands = (case.x, case.lora_a, case.lora_b, case.routing, case.base, case.ranks)
    program = jax.jit(update(strategy)).lower(*operands).compile().as_text()
    sizes = [
        math.prod(int(edge) for edge in shape.split(","))
        for shape in re.findall(r"\[([\d,]+)\]\S* transpose\(", str(program))
    ]
    assert max(sizes, default=0) < min(case.lora_a.size, case.lora_b.size)  # few rows may be
