"""What the cost model counts, what it chooses, and what may overrule it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain, make_plan
from pallas_kernels.cost import (
    CPU,
    H200,
    candidates,
    choose,
    estimate,
    floor_bytes,
    floor_seconds,
    live_tiles,
    path,
)
from pallas_kernels.paths import forward
from pallas_kernels.plans import bucket, read_plans
from pallas_kernels.shapes import ProblemSize, workload
from pallas_kernels.token_sort import token_sort
from pallas_kernels.types import Indices, Operands
from tests.pallas_kernels.cases import expected, make_case, run


def size(n: int, k: int = 1, *, slots: int = 8, rank: int = 64, width: int = 4096) -> ProblemSize:
    return ProblemSize(num_tokens=n, top_k=k, num_slots=slots, rank=rank, d_in=width, d_out=width)


def everywhere():
    for n in (1, 8, 64, 1000, 8192):
        for k in (1, 2, 4):
            for slots in (4, 8, 64):
                for device in (H200, CPU):
                    yield size(n, k, slots=slots), device


@pytest.mark.parametrize(
    ("n", "slots", "microseconds"),
    [(1, 4, 0.25), (128, 64, 14.3), (1024, 8, 7.8), (8192, 64, 62.4), (65536, 4, 376)],
)
def test_the_floor_of_the_design(n, slots, microseconds):
    assert 1e6 * floor_seconds(size(n, slots=slots), H200) == pytest.approx(microseconds, rel=0.02)


def test_nothing_is_below_the_floor():
    for each, device in everywhere():
        needed = 2 * each.num_tokens * each.top_k * each.rank * (each.d_in + each.d_out)
        for option in candidates(each, device):
            found = estimate(option, each, device)
            assert found.bytes >= floor_bytes(each, itemsize=device.itemsize), (option, each)
            # Masked rows count, and a tile holds every row.
            assert found.products >= 0.999 * needed, (option, each)
            assert found.seconds > 0
            assert found.launches >= 1


@pytest.mark.parametrize("device", [H200, CPU], ids=["h200", "cpu"])
@pytest.mark.parametrize("strategy", ["all_slots", "grouped", "bgmv"])
def test_more_tokens_cost_more(device, strategy):
    found = []
    for n in (1, 32, 256, 2048, 16384):
        (option,) = [each for each in candidates(size(n), device) if each.strategy == strategy]
        found.append(estimate(option, size(n), device))
    for name in ("bytes", "products", "seconds"):
        values = [getattr(each, name) for each in found]
        assert values == sorted(values)
        assert values[0] < values[-1]


@pytest.mark.parametrize("groups", [3, 40])
@pytest.mark.parametrize("block", [1, 16, 50])
def test_expected_tiles_are_those_of_a_sort(groups, block):
    each = size(300, 2, slots=groups)
    counts = [
        int((token_sort(ids, groups, layout="entries", block=block).rows > 0).sum())
        for ids in (workload("uniform", each, seed=s).adapter_ids for s in range(10))
    ]
    assert live_tiles(600, groups, block) == pytest.approx(np.mean(counts), rel=0.05, abs=0.6)


@pytest.mark.parametrize(
    ("n", "k", "slots", "wanted"),
    [
        (1, 1, 8, "bgmv"),
        (4, 1, 8, "bgmv"),
        (64, 1, 8, "all_slots"),  # nearly every slot is active, and there is nothing to sort
        (64, 1, 64, "grouped passes"),
        (160, 1, 64, "grouped passes"),
        (8192, 1, 8, "grouped passes"),
        (1024, 2, 8, "grouped sets"),  # 28 sets share the tokens
        (8192, 2, 8, "grouped sets"),
        (1024, 2, 64, "grouped passes"),  # 2016 would leave tiles nearly empty
        (1024, 4, 64, "grouped passes"),
    ],
)
def test_choice_on_a_gpu(n, k, slots, wanted):
    chosen = choose(size(n, k, slots=slots), H200)
    assert chosen.backend == "triton"
    assert f"{chosen.strategy} {chosen.layout}".startswith(wanted)
    assert choose(size(n, k, slots=slots), H200, "interpret").strategy == chosen.strategy


@pytest.mark.parametrize("slots", [4, 64])
def test_where_one_adapter_a_row_stops_paying(slots):
    """With the sort shared by a layer some 8 to 22 tokens; and once it has, for good."""
    by_row = [choose(size(n, slots=slots), H200).strategy == "bgmv" for n in range(1, 100)]
    assert 4 <= sum(by_row) <= 24
    assert by_row == sorted(by_row, reverse=True)


def test_explain_marks_what_auto_takes():
    for each, device in everywhere():
        text = explain(each, device=device.name)
        marked = [line for line in text.splitlines() if line.startswith("*")]
        assert len(marked) == 1
        chosen = choose(each, device)
        assert marked[0].startswith(f"* {chosen.strategy}/{chosen.backend}")
        if chosen.strategy == "grouped":
            assert f" {chosen.layout} of {chosen.block}" in marked[0]
        seconds = [float(line.split()[-1]) for line in text.splitlines()[2:]]
        assert seconds == sorted(seconds)
        assert ("relative" in text) == (device is CPU)
    with pytest.raises(ValueError, match="device is 'tpu'; expected one of h200, cpu"):
        explain(size(1), device="tpu")


# The plan table.


@pytest.fixture
def plans(tmp_path, monkeypatch):
    def write(table) -> str:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        file.write_text(table if isinstance(table, str) else json.dumps(table))
        monkeypatch.setenv("MOLORA_PLANS", str(file))
        return str(file)

    return write


def test_a_plan_table_overrules_the_model(plans):
    each = size(900, 2, rank=50)
    before = choose(each, H200)
    assert (before.strategy, before.layout) == ("grouped", "sets")
    assert bucket(each, "h200") == "h200 N=1024 K=8 k=2"
    tiles = {"h200 N=1024 K=8 k=2": {"layout": "passes", "block": 128}}
    plans(tiles)
    chosen = choose(each, H200)
    assert (chosen.layout, chosen.block) == ("passes", 128)
    plans(tiles | {"h200 N=1024 K=8 k=2 R=64 D=4096 F=4096": {"strategy": "bgmv"}})
    assert choose(each, H200).strategy == "bgmv"
    assert "* bgmv/triton" in explain(each)
    assert choose(dataclasses.replace(each, d_out=4097), H200).strategy == "grouped"
    assert choose(dataclasses.replace(each, num_tokens=1025), H200).strategy == "grouped"
    plans({})
    assert choose(each, H200) == before


def test_a_plan_table_changes_what_is_run(plans):
    each = ProblemSize(num_tokens=45, d_in=12, d_out=10, rank=3, num_slots=5, top_k=2)
    case = make_case(each)
    plans({"cpu N=64 K=5 k=2": {"layout": "entries", "block": 7, "strategy": "grouped"}})
    plan = make_plan(case.routing, 5)
    assert plan is not None
    assert plan.tiles["default"].block == 7
    np.testing.assert_allclose(run("auto", case), expected(case), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([], "is a list; expected an object"),
        ({"h200 N=16": {}}, "key 'h200 N=16'; expected e.g. 'h200 N=16 K=8 k=1 R=64"),
        ({"a100 N=16 K=8 k=1": {}}, "key 'a100 N=16 K=8 k=1'"),
        ({"cpu N=15 K=8 k=1": {}}, "N=15, which no bucket has"),
        ({"cpu N=16 K=8 k=1": {"strategy": "fast"}}, "strategy 'fast'; expected strategy"),
        ({"cpu N=16 K=8 k=1": {"speed": 1}}, "has speed 1"),
        ({"cpu N=16 K=8 k=1": "bgmv"}, "is 'bgmv'; expected an object"),
        ({"cpu N=16 K=8 k=1": {"layout": "sets", "block": 8}}, "layout 'sets'"),
        ({"h200 N=16 K=8 k=1": {"layout": "sets", "block": 24}}, "block 24"),
        ({"h200 N=16 K=8 k=1": {"layout": "sets"}}, "layout and block together"),
        ({"h200 N=16 K=8 k=1 R=8 D=8 F=8": {"layout": "sets", "block": 16}}, "without R, D, F"),
    ],
)
def test_a_plan_table_that_says_something_else_is_refused(plans, table, message):
    file = plans(table)
    with pytest.raises(ValueError, match=message) as refused:
        choose(size(16), CPU)
    assert file in str(refused.value)


def test_the_table_that_is_shipped_can_be_read(monkeypatch):
    monkeypatch.delenv("MOLORA_PLANS", raising=False)
    assert choose(size(1), H200).strategy == "bgmv"
    with pytest.raises(ValueError, match=r"none\.json cannot be read as JSON"):
        read_plans("none.json")


# Temporary memory.


def temporary_bytes(option, each: ProblemSize) -> int:
    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    n, k, slots = each.num_tokens, each.top_k, each.num_slots
    operands = Operands(
        x=array(n, each.d_in),
        lora_a=(array(slots, each.rank, each.d_in),),
        lora_b=(array(slots, each.rank, each.d_out),),
        gates=array(n, k),
        base=(array(n, each.d_out),),
    )

    def run(operands, ids):
        indices = Indices(adapter_ids=ids, ranks=(None,), layer=None, tiles=None)
        return forward(option, operands, indices)

    compiled = jax.jit(run).lower(operands, array(n, k, dtype=jnp.int32)).compile()
    found = compiled.memory_analysis()
    assert found is not None
    return found.temp_size_in_bytes


@pytest.mark.parametrize("strategy", ["all_slots", "grouped", "bgmv"])
@pytest.mark.parametrize(
    "numbers",  # N, D, F, R, K, k
    [
        (2048, 1024, 1024, 64, 16, 2),
        (2048, 1024, 1024, 64, 64, 2),
        (2048, 1024, 512, 16, 4, 4),
        (256, 512, 1024, 16, 8, 1),
        (8, 512, 4096, 16, 64, 4),
    ],
    ids=str,
)
def test_temporary_memory_is_what_the_compiler_takes(strategy, numbers):
    names = ("num_tokens", "d_in", "d_out", "rank", "num_slots", "top_k")
    each = ProblemSize(**dict(zip(names, numbers, strict=True)))
    option = path(strategy, "xla", each, CPU)
    stated = estimate(option, each, CPU).temp_bytes
    taken = temporary_bytes(option, each)
    assert taken <= stated <= 1.25 * taken
