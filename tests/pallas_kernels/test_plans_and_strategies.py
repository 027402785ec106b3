"""Which path runs, what a plan is good for, and what is refused before anything is compiled."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.compilations import count_compilations
from pallas_kernels import DispatchPlan, Routing, lora_delta, make_plan
from pallas_kernels.checks import check_operands, check_ranks, check_routing
from pallas_kernels.cost import CPU, H200, choose, path
from pallas_kernels.shapes import SMOLLM2, WORKLOADS, ProblemSize, workload
from tests.helpers import assert_close
from tests.pallas_kernels.cases import STRATEGIES, expected, jit, make_case

SIZE = ProblemSize(num_tokens=45, d_in=12, d_out=10, rank=3, num_slots=5, top_k=2)


def call(case, **arguments):
    return lora_delta(case.x, case.lora_a, case.lora_b, case.routing, **arguments)


def test_only_grouped_plans():
    routing = make_case(SIZE).routing
    assert isinstance(make_plan(routing, 5, strategy="grouped"), DispatchPlan)
    assert make_plan(routing, 5, strategy="all_slots") is None
    assert make_plan(routing, 5, strategy="reference") is None


@pytest.mark.parametrize("strategy", ["auto", "grouped"])
def test_a_plan_serves_every_projection_and_any_gates(strategy):
    case = make_case(SIZE)
    plan = make_plan(case.routing, 5, strategy="grouped", block=8)
    assert plan.tiles["default"].block == 8

    @jit
    def run(gates, plan):
        routing = Routing(case.routing.adapter_ids, gates)
        return call(dataclasses.replace(case, routing=routing), strategy=strategy, plan=plan)

    for seed in range(2):
        gates = make_case(SIZE, seed=seed).routing.gates
        other = dataclasses.replace(case, routing=Routing(case.routing.adapter_ids, gates))
        assert_close(run(gates, plan), expected(other, with_base=False), terms=20)


@pytest.mark.parametrize("size", SMOLLM2.values(), ids=SMOLLM2)
def test_auto_takes_all_slots_where_most_are_used(size):
    assert choose(size, CPU).strategy == "all_slots"


def test_auto_agrees_between_plan_and_projection():
    few = ProblemSize(num_tokens=45, d_in=12, d_out=10, rank=3, num_slots=2, top_k=2)
    many = dataclasses.replace(few, num_tokens=400, d_in=256, rank=40, num_slots=90)
    for size in (few, many):
        case = make_case(size)
        plan = make_plan(case.routing, size.num_slots)
        program = str(jax.make_jaxpr(lambda c=case, p=plan: call(c, plan=p))())
        chosen = choose(size, CPU)
        assert ("while" in program) == (chosen.strategy == "grouped") == (size is many)
        assert " sort" not in program, "the sort is the plan's"
        tiles = plan.tiles["default"]
        found = path("grouped", "xla", size, CPU)
        assert (tiles.layout, tiles.block) == (found.layout, found.block)


@pytest.mark.parametrize(
    ("device", "backend"), [(CPU, "xla"), (H200, "triton")], ids=["cpu", "h200"]
)
def test_a_plan_suits_projections_of_every_width(device, backend):
    """It is made before they are known."""
    for num_tokens, num_slots in ((1, 4), (100, 8), (3000, 8), (3000, 64)):
        size = ProblemSize(
            num_tokens=num_tokens, d_in=1, d_out=1, rank=1, num_slots=num_slots, top_k=2
        )
        wide = dataclasses.replace(size, d_in=4096, d_out=11008, rank=128)
        assert path("grouped", backend, size, device) == path("grouped", backend, wide, device)


@pytest.mark.parametrize(
    ("tokens", "top_k", "slots", "rows"),
    # Shares of a half, 1024, 256, 64 and 50 rows.
    [(1, 1, 2, 1), (2048, 2, 4, 272), (2048, 2, 16, 288), (2048, 2, 64, 80), (100, 1, 2, 65)],
)
def test_tiles_on_cpu_have_the_height_of_a_fair_share_and_a_margin(tokens, top_k, slots, rows):
    size = ProblemSize(num_tokens=tokens, d_in=8, d_out=8, rank=4, num_slots=slots, top_k=top_k)
    assert path("grouped", "xla", size, CPU).block == rows


@pytest.mark.parametrize(
    ("tokens", "slots", "rows"),
    [(1, 4, 16), (1024, 4, 64), (1024, 64, 16), (65536, 4, 128), (65536, 1024, 64)],
)
def test_tiles_of_a_kernel_are_powers_of_two(tokens, slots, rows):
    size = ProblemSize(num_tokens=tokens, d_in=8, d_out=8, rank=4, num_slots=slots, top_k=1)
    assert path("grouped", "triton", size, H200).block == rows


def test_a_plan_of_kernels_has_one_row_a_token():
    routing = make_case(SIZE).routing
    tiles = make_plan(routing, 5, strategy="grouped", backend="interpret").tiles["default"]
    assert tiles.layout in ("passes", "sets")
    assert tiles.block == 16
    assert (
        make_plan(routing, 5, strategy="grouped", backend="interpret", block=500)
        .tiles["default"]
        .block
        == 128
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_what_they_are_called(name):
    size = ProblemSize(num_tokens=4000, d_in=1, d_out=1, rank=1, num_slots=4, top_k=2)
    routing = workload(name, size)
    ids = np.asarray(routing.adapter_ids)
    assert ids.shape == (4000, 2)
    assert (ids[:, 0] != ids[:, 1]).all()
    np.testing.assert_allclose(routing.gates.sum(axis=1), 1, rtol=1e-5)
    shares = np.bincount(ids[:, 0], minlength=4) / 4000
    changes = np.mean(ids[1:, 0] != ids[:-1, 0])
    wanted = {
        "identical": [0, 0, 0, 1],
        "skewed": [0.8, 0.1, 0.05, 0.05],
        "extreme": [0.95, 0.02, 0.02, 0.01],
        "zipf": np.array([12, 6, 4, 3]) / 25,
    }
    np.testing.assert_allclose(shares, wanted.get(name, [0.25] * 4), atol=0.02)
    orders = {"identical": 0, "distinct": 1, "interleaved": 1 / 8, "separated": 3 / 4000}
    if name in orders:
        np.testing.assert_allclose(changes, orders[name], atol=1e-3)


# What is refused. Shapes are tested on the check itself: the test run's own shape checker would
# answer before `lora_delta` does.


def change(case, **values):
    return {
        name: values.get(name, getattr(case, name))
        for name in ("x", "lora_a", "lora_b", "routing", "base", "ranks")
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", jnp.zeros((45, 12), jnp.int32), "x has dtype int32"),
        ("x", jnp.zeros(()), "x is a scalar"),
        ("x", jnp.zeros((44, 12)), r"\(45, 2\), 44 tokens are in x \(44, 12\)"),
        ("lora_a", jnp.zeros((5, 12, 3)), r"lora_a has shape \(5, 12, 3\).*D = 12"),
        ("lora_a", jnp.zeros((0, 3, 12)), "none of them 0"),
        ("lora_b", jnp.zeros((5, 10, 3)), r"lora_b has shape \(5, 10, 3\).*R = 3"),
        ("lora_b", jnp.zeros((5, 3, 10), jnp.int8), "lora_b has dtype int8"),
        ("base", jnp.zeros((45, 11)), r"base has shape \(45, 11\); expected \(45, 10\)"),
        ("ranks", jnp.zeros(4, jnp.int32), r"ranks is int32\[4\].*int32\[5\]"),
        ("ranks", jnp.asarray([3, 3, 4, 3, 3]), r"ranks\[2\] is 4; expected 0 to 3"),
    ],
)
def test_operands_that_do_not_fit(name, value, message):
    arguments = change(make_case(SIZE), **{name: value})
    with pytest.raises(ValueError, match=message):
        check_operands(
            arguments["x"],
            arguments["lora_a"],
            arguments["lora_b"],
            arguments["routing"],
            base=arguments["base"],
            ranks=arguments["ranks"],
        )


@dataclasses.dataclass
class Unchecked:
    """A routing that the test run's own shape checker does not see."""

    adapter_ids: jax.Array
    gates: jax.Array


@pytest.mark.parametrize(
    ("ids", "gates", "message"),
    [
        (np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32), "dtype float32"),
        (np.zeros((4, 2), np.int8), np.zeros((4, 2), np.float32), "dtype int8; expected int32"),
        (np.zeros((3, 4, 2), np.int32), np.zeros((3, 4, 2), np.float32), "one layer at a time"),
        (np.zeros((4, 0), np.int32), np.zeros((4, 0), np.float32), "k ≥ 1"),
        (np.zeros((4, 2), np.int32), np.zeros((4, 1), np.float32), r"gates is float32\[4, 1\]"),
        (np.zeros((4, 2), np.int32), np.zeros((4, 2), np.int32), "gates is int32"),
        (np.array([[0, 1], [2, 3]], np.int32), np.zeros((2, 2), np.float32), r"\[1, 1\] is 3"),
        (np.array([[0], [-2]], np.int32), np.zeros((2, 1), np.float32), r"\[1, 0\] is -2"),
    ],
)
def test_routings_that_do_not_fit(ids, gates, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(check_routing)(Unchecked(ids, gates), 3)


def test_refusals_come_before_anything_is_compiled():
    case = make_case(SIZE)
    ids = np.array(case.routing.adapter_ids)
    ids[7, 1] = 5
    bad = dataclasses.replace(case, routing=Routing(jnp.asarray(ids), case.routing.gates))
    with count_compilations() as compiled, pytest.raises(ValueError, match=r"\[7, 1\] is 5"):
        call(bad)
    with pytest.raises(ValueError, match=r"\[7, 1\] is 5"):
        make_plan(bad.routing, 5)
    assert compiled == []
    check_ranks(case.ranks, (5,), 3)


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "grouped"])
def test_a_plan_of_another_strategy_is_refused_by_name(strategy):
    case = make_case(SIZE)
    plan = make_plan(case.routing, 5, strategy="grouped")
    with pytest.raises(ValueError, match=f"'grouped', and strategy is '{strategy}'"):
        call(case, strategy=strategy, plan=plan)


def test_a_plan_of_other_sizes_is_refused_by_name():
    case = make_case(SIZE)
    plan = make_plan(case.routing, 6, strategy="grouped")
    with pytest.raises(ValueError, match=r"2 choices over 6 slots; this call has .* over 5 slots"):
        call(case, plan=plan)
    other = workload("uniform", dataclasses.replace(SIZE, num_tokens=90, top_k=1))
    with pytest.raises(ValueError, match="made for 90 tokens with 1 choices"):
        call(case, plan=make_plan(other, 5, strategy="grouped"))
    with pytest.raises(ValueError, match="block is 0"):
        make_plan(case.routing, 5, strategy="grouped", block=0)


def test_more_choices_than_slots_are_refused():
    case = make_case(SIZE)
    with pytest.raises(ValueError, match=r"2 choices a token, and the stack 1 slots; .*k ≤ K"):
        make_plan(case.routing, 1)


def test_a_plan_of_xla_is_refused_by_the_kernels():
    case = make_case(SIZE)
    plan = make_plan(case.routing, 5, strategy="grouped", backend="xla")
    with pytest.raises(ValueError, match=r"made for backend 'xla'.*a row for each of its 2"):
        call(case, strategy="grouped", backend="interpret", plan=plan)


def test_what_is_not_there_says_what_is():
    case = make_case(SIZE)
    with pytest.raises(NotImplementedError, match=r"'reference' has no kernel.*backend='xla'"):
        call(case, strategy="reference", backend="interpret")
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU.*'interpret'"):
        call(case, backend="triton")
    with pytest.raises(ValueError, match=r"'alslots'.*Did you mean 'all_slots'"):
        call(case, strategy="alslots")
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        call(case, backend="cuda")
    assert np.array_equal(call(case, backend="xla"), call(case))
