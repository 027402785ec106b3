"""Timing is paired, weights rotate, memory is the compiler's. No test here judges a time."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels.baselines import single_lora
from pallas_kernels.shapes import ProblemSize
from tests.helpers import assert_close
from tests.pallas_kernels.cases import Case, expected

SIZE = ProblemSize(num_tokens=37, d_in=24, d_out=24, rank=5, num_slots=3, top_k=2)


def updated(inputs, number, x, base):
    lora_a, lora_b = inputs.stacks[number]
    ranks = jnp.full(SIZE.num_slots, SIZE.rank)
    return expected(Case(x, lora_a, lora_b, inputs.routing, base, ranks))


def test_a_chain_is_call_after_call_over_rotating_weights():
    inputs = bench.make_inputs(SIZE, weight_sets=2)
    arm = bench.compile_arm(bench.routed("grouped"), inputs, calls=4)
    assert (arm.calls, arm.fewer_calls) == (4, 1)
    for turn, sets in ((0, (0, 1, 0, 1)), (1, (1, 0, 1, 0))):
        x, base = inputs.x, inputs.base
        for count, number in enumerate(sets, 1):
            x, base = updated(inputs, number, x, base), x
            if count == 1:
                assert_close(arm.fewer(*inputs.arguments(turn)), x, jnp.float32, terms=60)
        assert_close(arm.run(*inputs.arguments(turn)), x, jnp.float32, terms=60)


def test_a_chain_with_the_base_product_is_layer_after_layer():
    inputs = bench.make_inputs(SIZE, weight_sets=2, base_product=True)
    arm = bench.compile_arm(bench.routed("all_slots"), inputs, calls=2, base_product=True)
    x = inputs.x
    for number in (0, 1):
        x = updated(inputs, number, x, np.asarray(x, np.float64) @ inputs.weights[number])
    assert_close(arm.run(*inputs.arguments()), x, jnp.float32, terms=60)
    wide = bench.make_inputs(dataclasses.replace(SIZE, d_out=20))
    with pytest.raises(ValueError, match="expected equal widths"):
        bench.compile_arm(bench.routed(), wide, calls=2)


def test_arms_take_turns_in_alternating_order():
    inputs = bench.make_inputs(SIZE)
    ran = []

    def arm(name, calls=1):
        return bench.Arm(run=lambda *arguments: ran.append(name), calls=calls)

    times = bench.time_arms({"a": arm("a"), "b": arm("b", 10)}, inputs, repeats=3, warm_up=1)
    assert ran == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(times.seconds[name]) for name in "ab"] == [3, 3]


def test_a_call_costs_what_more_calls_cost_more(monkeypatch):
    def many(*arguments): ...

    def few(*arguments): ...

    arm = bench.Arm(run=many, calls=12, fewer=few, fewer_calls=3)
    monkeypatch.setattr(bench, "_seconds", lambda run, arguments: 15.0 if run is many else 6.0)
    inputs = bench.make_inputs(SIZE)
    times = bench.time_arms({"a": arm}, inputs, repeats=3)
    assert times.seconds["a"].tolist() == [1.0, 1.0, 1.0]


def test_a_budget_leaves_three_turns():
    inputs = bench.make_inputs(SIZE)
    arms = {"a": bench.Arm(run=lambda *arguments: None)}
    times = bench.time_arms(arms, inputs, repeats=100, budget_s=0.0)
    assert len(times.seconds["a"]) == bench.MIN_REPEATS


def test_ratios_are_paired():
    times = bench.Times({"a": np.array([1.0, 20.0, 3.0]), "b": np.array([2.0, 10.0, 2.0])})
    assert times.ratio("a", over="b") == 1.5
    assert times.median("a") == 3.0
    assert math.isnan(times.ratio("a", over="c"))
    low, high = bench.Times({"a": np.arange(11.0)}).spread("a")
    assert (low, high) == (1.0, 9.0)


def test_memory_is_what_the_compiler_counts():
    inputs = bench.make_inputs(dataclasses.replace(SIZE, num_tokens=256))
    h_bytes = 4 * 256 * SIZE.num_slots * SIZE.rank
    arms, _ = bench.compile_arms(
        {"all": bench.routed("all_slots"), "one": single_lora}, inputs, base_product=False
    )
    assert arms["all"].temp_bytes >= h_bytes
    assert arms["one"].temp_bytes < arms["all"].temp_bytes


def test_what_is_not_there_is_named_with_its_reason():
    def absent(*arguments):
        raise NotImplementedError("no such kernel")

    inputs = bench.make_inputs(SIZE)
    functions = {"absent": absent, "eager": single_lora, "compiled": single_lora}
    arms, missing = bench.compile_arms(functions, inputs, host=["eager"])
    assert missing == {"absent": "no such kernel"}
    assert list(arms) == ["eager", "compiled"]
    assert arms["eager"].temp_bytes is None
    results = [jax.device_get(arm.run(*inputs.arguments())) for arm in arms.values()]
    assert_close(*results, terms=60)


def test_the_choice_of_auto_is_a_strategy():
    wide = {"num_tokens": 2048, "d_in": 1024, "d_out": 1024, "rank": 64, "num_slots": 64}
    assert bench.path_here("auto", dataclasses.replace(SIZE, **wide)).strategy == "grouped"


def test_active_adapters_are_those_in_use():
    inputs = bench.make_inputs(dataclasses.replace(SIZE, top_k=1), "identical")
    assert inputs.active == 1
