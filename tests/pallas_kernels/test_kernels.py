"""What only the kernels can get wrong: tails of blocks, layers, shared shrinks, fusion."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from pallas_kernels import Routing, lora_delta, lora_deltas, make_plan, strategy
from pallas_kernels.grouped_gemm.blocks import choose_blocks
from pallas_kernels.shapes import ProblemSize
from tests.helpers import assert_close, strict_promotion, tolerance, unchecked_shapes
from tests.pallas_kernels.cases import (
    KERNELS,
    WAYS,
    expected,
    gradients,
    how,
    jit,
    make_case,
    run,
    with_ids,
)

SIZE = ProblemSize(num_tokens=45, d_in=12, d_out=10, rank=3, num_slots=5, top_k=2)
every_kernel = pytest.mark.parametrize("way", KERNELS)


@pytest.fixture(autouse=True)
def _strict():
    with strict_promotion():
        yield


def equations(function, *operands) -> list:
    """Every equation of a program that is not a call or a loop itself, in order, as it is run."""
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                found.append(equation)
                continue
            inner = [
                getattr(each, "jaxpr", each)
                for each in jax.tree.leaves(
                    list(equation.params.values()),
                    is_leaf=lambda leaf: hasattr(leaf, "jaxpr") or hasattr(leaf, "eqns"),
                )
            ]
            inner = [each for each in inner if hasattr(each, "eqns")]
            for each in inner:
                walk(each)
            if not inner:
                found.append(equation)

    walk(jax.make_jaxpr(function)(*operands).jaxpr)
    return found


def launches(function, *operands) -> list[str]:
    """Names of the kernels in a program, in order."""
    calls = [e for e in equations(function, *operands) if e.primitive.name == "pallas_call"]
    return [str(each.params["name"]) for each in calls]


def test_what_a_kernel_does_not_write_is_poison():
    def write_the_first(out_ref):
        out_ref[0] = 1.0

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    out = pl.pallas_call(write_the_first, out_shape=shape, interpret=True)()
    assert out[0] == 1
    assert np.isnan(out[1:]).all(), "rows that no kernel wrote would pass unseen in these tests"


PROBLEMS = st.fixed_dictionaries(
    {
        "num_tokens": st.sampled_from([1, 2, 7, 33, 70, 129]),
        "d_in": st.sampled_from([1, 16, 65, 130]),
        "d_out": st.sampled_from([1, 20, 129]),
        "rank": st.sampled_from([1, 2, 3, 8, 16, 17, 64, 65, 130]),
        "num_slots": st.sampled_from([1, 2, 4, 9, 70]),
        "top_k": st.sampled_from([1, 2, 3]),
    }
)


def _any_problem(way, problem, dtype, block, seed):
    problem["top_k"] = min(problem["top_k"], problem["num_slots"])
    size = ProblemSize(**problem)
    case = make_case(size, dtype=dtype, seed=seed)
    rng = np.random.default_rng(seed)
    # Any pattern: none at all, few, out of range, skewed.
    low, high = sorted(rng.integers(-2, size.num_slots + 2, 2))
    ids = rng.integers(low, high + 1, (size.num_tokens, size.top_k)).astype(np.int32)
    case = dataclasses.replace(case, routing=Routing(jnp.asarray(ids), case.routing.gates))
    block = block if way.startswith("grouped") else None
    y = run(way, case, block=block)
    bounds = tolerance(dtype, terms=1 if dtype != jnp.float32 else size.d_in + size.rank)
    np.testing.assert_allclose(np.float64(y), expected(case), **bounds)
    alone = (ids < 0) | (ids >= size.num_slots)
    assert np.array_equal(y[alone.all(axis=1)], case.base[alone.all(axis=1)])


@every_kernel
@hypothesis.given(
    problem=PROBLEMS,
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    block=st.sampled_from([None, 1, 16, 32, 100]),
    seed=st.integers(0, 5),
)
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
def test_any_problem(way, problem, dtype, block, seed):
    _any_problem(way, problem, dtype, block, seed)


@pytest.mark.long
@every_kernel
@hypothesis.given(
    problem=PROBLEMS,
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    block=st.sampled_from([None, 1, 16, 32, 64, 100, 128]),
    seed=st.integers(0, 1000),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_problem_for_long(way, problem, dtype, block, seed):
    _any_problem(way, problem, dtype, block, seed)


@every_kernel
def test_gradients_with_ranks_past_a_block_and_shared_sets(way):
    size = ProblemSize(num_tokens=70, d_in=70, d_out=40, rank=80, num_slots=3, top_k=2)
    case = make_case(size)
    case = dataclasses.replace(case, routing=with_ids(case.routing, {(0, 0): -1, (5, 1): 7}))
    weights = np.random.default_rng(1).standard_normal(case.base.shape).astype(np.float32)
    found, wanted = (gradients(each, case, weights) for each in (way, "reference"))
    for name, value in wanted.items():
        assert np.abs(value).max() > 0
        assert_close(found[name], value, terms=2000)


@every_kernel
def test_the_largest_rank(way):
    size = ProblemSize(num_tokens=20, d_in=40, d_out=33, rank=512, num_slots=3, top_k=1)
    case = make_case(size)
    assert_close(run(way, case), expected(case), terms=600)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(
    ("rank", "dtype", "fused"),
    [(5, jnp.float32, True), (64, jnp.float32, False), (64, jnp.bfloat16, True)],
)
def test_many_tokens_are_fused_and_equal(top_k, rank, dtype, fused):
    size = ProblemSize(num_tokens=4100, d_in=20, d_out=18, rank=rank, num_slots=3, top_k=top_k)
    case = make_case(size, "skewed", dtype=dtype)

    def update(x, base):
        weights = (case.lora_a, case.lora_b, case.routing)
        return lora_delta(x, *weights, base=base, ranks=case.ranks, **how("grouped:interpret"))

    assert ("lora_fused" in launches(update, case.x, case.base)) == fused
    assert_close(jit(update)(case.x, case.base), expected(case), terms=30)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_of_a_stack(way):
    cases = [make_case(SIZE, seed=seed) for seed in range(3)]
    case = cases[1]
    lora_a, lora_b, ranks = (
        jnp.stack([getattr(each, name) for each in cases]) for name in ("lora_a", "lora_b", "ranks")
    )
    weights = np.random.default_rng(1).standard_normal(case.base.shape).astype(np.float32)

    def loss(lora_a, lora_b, layer):
        y = lora_delta(
            case.x, lora_a, lora_b, case.routing, base=case.base, ranks=ranks, layer=layer,
            **how(way),
        )  # fmt: skip
        return jnp.sum(y * weights), y

    program = jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (d_lora_a, d_lora_b), y = program(lora_a, lora_b, 1)
    assert_close(y, expected(case), terms=20)
    wanted = gradients("reference", case, weights)
    for found, name in ((d_lora_a, "lora_a"), (d_lora_b, "lora_b")):
        assert_close(found[1], wanted[name], terms=200)
        assert (found[0] == 0).all() and (found[2] == 0).all()


@every_kernel
def test_no_layer_is_sliced_off_for_a_kernel(way):
    case = make_case(SIZE)
    lora_a, lora_b = (jnp.stack([w] * 7) for w in (case.lora_a, case.lora_b))

    def update(lora_a, lora_b):
        return lora_delta(case.x, lora_a, lora_b, case.routing, layer=3, **how(way))

    program = str(jax.make_jaxpr(update)(lora_a, lora_b))
    assert "f32[35,3,12]" in program  # (L·K, R, D), as it lies
    assert "f32[5,3,12]" not in program


@pytest.mark.parametrize("way", WAYS)
def test_projections_that_share_x_equal_each_alone(way):
    q = make_case(SIZE)
    k = make_case(dataclasses.replace(SIZE, d_out=7), seed=1)
    other_rank = make_case(dataclasses.replace(SIZE, rank=4, d_out=8), seed=2)
    cases = [dataclasses.replace(each, x=q.x, routing=q.routing) for each in (q, k, other_rank)]

    def together(x, gates):
        ys = lora_deltas(
            x, [c.lora_a for c in cases], [c.lora_b for c in cases],
            Routing(q.routing.adapter_ids, gates), bases=[c.base for c in cases],
            ranks=[c.ranks for c in cases], **how(way),
        )  # fmt: skip
        return sum(jnp.sum(jnp.sin(y)) for y in ys), ys

    def apart(x, gates):
        routing = Routing(q.routing.adapter_ids, gates)
        return sum(
            jnp.sum(jnp.sin(lora_delta(x, c.lora_a, c.lora_b, routing, base=c.base, ranks=c.ranks)))
            for c in cases
        )

    gradient = jit(jax.grad(together, argnums=(0, 1), has_aux=True))
    found, ys = gradient(q.x, q.routing.gates)
    for y, case in zip(ys, cases, strict=True):
        assert_close(y, expected(case), terms=20)
    for a, b in zip(found, jit(jax.grad(apart, argnums=(0, 1)))(q.x, q.routing.gates), strict=True):
        assert_close(a, b, terms=500)
    if way == "grouped:interpret":
        names = launches(lambda x: together(x, q.routing.gates), q.x)
        # q and k have one rank and one width; the third has another and a launch of its own.
        assert names.count("lora_shrink") == 2
        plan = make_plan(q.routing, SIZE.num_slots, **how(way))
        assert names.count("lora_expand") == 3 * plan.tiles["default"].entries.shape[0]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_halves_are_summed_over_projections_in_float32(way):
    half = make_case(SIZE, dtype=jnp.bfloat16)

    def loss(x, gates):
        routing = Routing(half.routing.adapter_ids, gates)
        ys = lora_deltas(x, [half.lora_a] * 3, [half.lora_b] * 3, routing, **how(way))
        return sum(jnp.sum(y.astype(jnp.float32)) for y in ys)

    def once(x, gates):
        routing = Routing(half.routing.adapter_ids, gates)
        y = lora_delta(x, half.lora_a, half.lora_b, routing, strategy="reference")
        return 3 * jnp.sum(y.astype(jnp.float32))

    found, wanted = (
        jit(jax.grad(each, argnums=(0, 1)))(half.x, half.routing.gates) for each in (loss, once)
    )
    assert found[0].dtype == jnp.bfloat16 and found[1].dtype == jnp.float32
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, jnp.bfloat16, terms=4)


def test_projections_that_share_x_share_a_sort():
    case = make_case(SIZE)

    def three(x):
        given = ([case.lora_a] * 3, [case.lora_b] * 3, case.routing)
        return lora_deltas(x, *given, strategy="grouped", backend="xla")

    sorts = [each for each in equations(three, case.x) if each.primitive.name == "sort"]
    assert len(sorts) == 1


@every_kernel
def test_tokens_in_another_order_give_their_rows_in_that_order(way):
    case = make_case(dataclasses.replace(SIZE, num_tokens=90), "zipf")
    shuffle = np.random.default_rng(0).permutation(90)
    moved = dataclasses.replace(
        case,
        x=case.x[shuffle],
        base=case.base[shuffle],
        routing=Routing(case.routing.adapter_ids[shuffle], case.routing.gates[shuffle]),
    )
    assert_close(run(way, moved), np.asarray(run(way, case))[shuffle], terms=4)
    assert np.array_equal(run(way, case), run(way, case))


@functools.partial(pytest.mark.parametrize, "block")([16, 64])
def test_a_plan_gives_what_a_call_without_one_gives(block):
    case = make_case(dataclasses.replace(SIZE, num_tokens=130), "zipf")
    assert_close(run("grouped:interpret", case, block=block), expected(case), terms=20)


def test_this_jax_still_has_the_backend():
    assert strategy.kernels_missing() == "", "auto falls back to XLA; the kernels need another home"


def test_what_cannot_run_says_why():
    case = make_case(SIZE)

    def call(**arguments):
        return lora_delta(case.x, case.lora_a, case.lora_b, case.routing, **arguments)

    with pytest.raises(NotImplementedError, match=r"'triton' needs an NVIDIA GPU.*'interpret'"):
        call(backend="triton")
    with pytest.raises(NotImplementedError, match=r"'reference' has no kernel.*'xla'"):
        call(strategy="reference", backend="interpret")
    plan = make_plan(case.routing, 5, strategy="grouped", backend="xla")
    with pytest.raises(ValueError, match=r"plan was made for backend 'xla'.*make_plan\("):
        call(strategy="grouped", backend="interpret", plan=plan)
    with jax.enable_x64(True):
        wide = dataclasses.replace(case, x=jnp.asarray(case.x, jnp.float64))
        with pytest.raises(NotImplementedError, match="no float64"):
            lora_delta(wide.x, case.lora_a, case.lora_b, case.routing, backend="interpret")


def test_bad_stacks_and_projections_are_refused():
    case = make_case(SIZE)
    stack = (jnp.stack([case.lora_a] * 2), jnp.stack([case.lora_b] * 2))
    with unchecked_shapes():
        with pytest.raises(ValueError, match=r"layer is 2; expected one of the stack's, 0 to 1"):
            lora_delta(case.x, *stack, case.routing, layer=2)
        with pytest.raises(
            ValueError, match=r"lora_a has shape \(2, 5, 3, 12\); expected \(K, R, D\)"
        ):
            lora_delta(case.x, *stack, case.routing)
        with pytest.raises(ValueError, match=r"\(L, K, R, D\), as layer is given"):
            lora_delta(case.x, case.lora_a, case.lora_b, case.routing, layer=0)
        with pytest.raises(ValueError, match=r"ranks is int32\[5\]; expected int32\[2, 5\]"):
            lora_delta(case.x, *stack, case.routing, layer=0, ranks=case.ranks)
        with pytest.raises(ValueError, match="lora_b holds 1 projections and lora_a 2"):
            lora_deltas(case.x, [case.lora_a] * 2, [case.lora_b], case.routing)
        with pytest.raises(ValueError, match="lora_a is empty"):
            lora_deltas(case.x, [], [], case.routing)
        fewer = ([case.lora_a, case.lora_a[:3]], [case.lora_b, case.lora_b[:3]])
        with pytest.raises(ValueError, match=r"lora_a\[1\] has shape \(3, 3, 12\).*same layers"):
            lora_deltas(case.x, *fewer, case.routing)
        with pytest.raises(ValueError, match="x is a list; expected an array"):
            lora_delta(case.x.tolist(), case.lora_a, case.lora_b, case.routing)
        with pytest.raises(ValueError, match=r"lora_b has shape \(5, 3, 0\)"):
            lora_delta(case.x, case.lora_a, case.lora_b[:, :, :0], case.routing)
        for block in (0, 2.5, True):
            with pytest.raises(ValueError, match=f"block is {block!r}"):
                make_plan(case.routing, 5, block=block)


@pytest.mark.parametrize("way", WAYS)
def test_long_sums_of_halves_are_not_lost(way):
    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    routing = Routing(jnp.zeros((2048, 1), jnp.int32), jnp.ones((2048, 1)))

    def loss(lora_a, lora_b):
        y = lora_delta(ones((2048, 1)), lora_a, lora_b, routing, **how(way))
        return jnp.sum(y.astype(jnp.float32))

    # One by one, a sum of ones in bfloat16 stops at 256.
    for gradient in jit(jax.grad(loss, argnums=(0, 1)))(ones((2, 1, 1)), ones((2, 1, 1))):
        assert gradient[0, 0, 0] == 2048 and gradient[1, 0, 0] == 0


def test_numpy_operands():
    case = make_case(SIZE)
    given = [np.asarray(each) for each in (case.x, case.lora_a, case.lora_b)]
    routing = Routing(*(np.asarray(each) for each in jax.tree.leaves(case.routing)))
    beside = {"base": np.asarray(case.base), "ranks": np.asarray(case.ranks)}
    for way in WAYS:
        with unchecked_shapes():
            y = lora_delta(*given, routing, **beside, **how(way))
        assert_close(y, expected(case), terms=20)


def test_a_plan_of_other_ids_is_refused():
    case = make_case(SIZE)
    plan = make_plan(case.routing, 5, strategy="grouped")
    other = with_ids(case.routing, {(7, 1): 4 - int(case.routing.adapter_ids[7, 1])})
    with pytest.raises(ValueError, match=r"plan was made of other ids: its adapter_ids\[7, 1\]"):
        lora_delta(case.x, case.lora_a, case.lora_b, other, plan=plan)
    same = Routing(np.array(case.routing.adapter_ids), case.routing.gates)
    assert_close(
        lora_delta(case.x, case.lora_a, case.lora_b, same, ranks=case.ranks, plan=plan),
        expected(case, with_base=False),
        terms=20,
    )


def test_blocks_fill_the_machine_where_tiles_are_few():
    sizes = {"rank": 64, "d_in": 4096, "d_out": 4096, "itemsize": 2}
    one = choose_blocks(block=16, num_tiles=1, **sizes)
    assert one.planes * 1 >= 16 and one.parts >= 16
    many = choose_blocks(block=128, num_tiles=600, **sizes)
    assert (many.planes, many.parts) == (1, 1)
