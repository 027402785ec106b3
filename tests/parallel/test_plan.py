"""The plan on paper: its bytes, products, traffic and seconds against numbers made another way."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import AdapterBank
from molora_jax.generation.programs import empty_state
from molora_jax.models import Decoder
from molora_jax.models.qwen3 import QWEN3
from molora_jax.models.tiny import tiny_arrays, tiny_config
from molora_jax.models.weights import array_shapes
from molora_jax.parallel import rules
from molora_jax.parallel.__main__ import main
from molora_jax.parallel.plan import H200_NODES, Workload, choose, plan
from molora_jax.parallel.plan.cluster import group, taken, wire_bytes
from molora_jax.parallel.plan.hlo import Collective, collectives
from molora_jax.parallel.plan.workload import held_bytes, trees
from molora_jax.routing import LearnedRouter

ONE = dict.fromkeys(rules.AXES, 1)
CUBE = ONE | {"data": 2, "fsdp": 2, "tensor": 2}


def decode(**changes) -> Workload:
    sizes = {"batch": 64, "length": 4096, "num_adapters": 64, "rank": 16, "top_k": 2}
    return Workload(kind="decode", **sizes | changes)


def train(**changes) -> Workload:
    sizes = {"batch": 32, "length": 2048, "num_adapters": 8, "rank": 16, "top_k": 8}
    return Workload(kind="train", **sizes | changes)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3-1.7b", 1_720_574_976),  # the file holds the tied head once more
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_the_models_have_as_many_parameters_as_published(name, published):
    config = QWEN3[name]
    assert sum(math.prod(shape) for shape in array_shapes(config).values()) == published
    assert held_bytes(config, decode(), ONE)["base"] == 2 * published


def test_bytes_on_paper_are_those_of_real_arrays():
    config = tiny_config()
    work = Workload(kind="decode", batch=4, length=32, num_adapters=3, rank=2, top_k=1)
    arrays = {name: jnp.asarray(array, jnp.bfloat16) for name, array in tiny_arrays().items()}
    decoder = Decoder(config, arrays)
    bank = AdapterBank(config, num_slots=3, max_rank=2, dtype=jnp.bfloat16)
    router = LearnedRouter(
        config.hidden_size, 3, top_k=1, num_layers=config.num_layers, rngs=nnx.Rngs(0)
    )
    real = {
        "base": decoder,
        "bank": bank.stacks,
        "router": router,
        "cache": empty_state(decoder, rows=4, context=32, num_columns=1).cache,
    }
    sizes = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(each)) for name, each in real.items()
    }
    assert held_bytes(config, work, ONE) == sizes


@pytest.mark.parametrize("work", [decode(), train()], ids=["decode", "train"])
@pytest.mark.parametrize("slots", [1, 2])
def test_bytes_of_a_device_are_those_of_jax_own_shards(work, slots):
    config, sizes = QWEN3["qwen3-4b"], CUBE | {"slots": slots}
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    for part, tree in trees(config, work).items():
        leaves = jax.tree.leaves(tree)
        total = 0
        for leaf, spec in zip(leaves, rules.specs({part: tree}, sizes), strict=True):
            shard = jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape)
            total += math.prod(shard) * np.dtype(leaf.dtype).itemsize
        assert held_bytes(config, work, sizes)[part] == total


def test_a_group_knows_which_of_its_devices_share_a_node():
    sizes = ONE | {"data": 8, "fsdp": 2, "tensor": 4}
    assert group(("tensor",), sizes) == (4, 4, 1)
    assert group(("fsdp", "tensor"), sizes) == (8, 8, 1)
    assert group(("data",), sizes) == (8, 1, 8)
    assert group(("data", "fsdp"), sizes) == (16, 2, 8)
    assert group(rules.AXES, sizes) == (64, 8, 8)


def test_large_collectives_take_their_bytes_over_the_slowest_link():
    size = 8e9
    sizes = ONE | {"data": 8, "tensor": 8}
    inside, over = group(("tensor",), sizes), group(("data",), sizes)
    gather = taken("all-gather", size, inside)
    assert gather.seconds == pytest.approx(size * 7 / 8 / 370e9, rel=0.01)
    reduce = taken("all-reduce", size, inside)
    assert reduce.seconds == pytest.approx(2 * size * 7 / 8 / 480e9, rel=0.01)
    crossing = taken("all-gather", size, over)
    assert crossing.seconds == pytest.approx(size * 7 / 8 / 47e9, rel=0.01)
    assert crossing.network and not gather.network
    # Eight ports of a node together are as fast as NVLink.
    whole = taken("all-gather", size, group(("data", "tensor"), sizes))
    assert whole.seconds == pytest.approx(size * 63 / 64 / 370e9, rel=0.03)
    assert wire_bytes("all-reduce", size, 8) == 2 * wire_bytes("all-gather", size, 8)
    # and a small one its latency, more of it the more devices there are
    small = [taken("all-reduce", 1e4, group(("data",), ONE | {"data": n})) for n in (1, 2, 8, 64)]
    assert [each.seconds for each in small] == sorted(each.seconds for each in small)
    assert small[0].seconds == 0 and 5e-6 < small[1].seconds < small[3].seconds < 1e-4


def test_products_of_a_step_are_two_for_each_weight_and_token():
    config, work = QWEN3["qwen3-8b"], decode()
    embedding = 151936 * 4096
    # the norms: two of a layer, the last, and of every layer's queries and keys
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    projections = 8_190_735_360 - 2 * embedding - norms
    parts = {each.name: each for each in plan(config, work, ONE).parts}
    assert parts["projections"].products == 2 * 64 * projections
    assert parts["logits"].products == 2 * 64 * embedding
    assert parts["attention"].products == 36 * 4 * 64 * 4096 * 32 * 128
    # Training: forward, forward again and the gradient of the input, of a quarter on each device.
    parts = {each.name: each for each in plan(config, train(), CUBE).parts}
    tokens = 32 * 2048
    assert parts["projections"].products == 3 * 2 * tokens * projections / 8
    for name in ("projections", "attention", "logits"):
        whole = {each.name: each for each in plan(config, train(), ONE).parts}[name]
        assert whole.products == pytest.approx(8 * parts[name].products)


def test_a_decode_step_of_one_row_reads_the_weights_once():
    config = QWEN3["qwen3-8b"]
    found = plan(config, decode(batch=1, length=1), ONE)
    read = sum(each.bytes for each in found.parts if each.name in ("projections", "logits"))
    assert read == pytest.approx(2 * (8_190_735_360 - 151936 * 4096), rel=0.01)


def test_exchanged_bytes_are_counted_from_the_shapes():
    config, work = QWEN3["qwen3-4b"], decode()
    found = plan(config, work, ONE | {"data": 2, "fsdp": 2, "tensor": 2})
    sums = [each for each in found.exchanges if each.what == "o, down: sums"]
    (each,) = sums
    assert (each.kind, each.axes, each.times) == ("all-reduce", ("tensor",), 72)
    assert each.size == 2 * 16 * 2560  # 64 rows over data and fsdp
    weights = [e for e in found.exchanges if e.what.endswith("weights")]
    per_layer = 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728)
    assert sum(e.size for e in weights) == 2 * per_layer / 2
    assert all(e.wire == e.times * e.size / 2 for e in weights)
    assert plan(config, work, ONE).exchanges == []


def test_the_choice_is_the_fastest_that_fits():
    config = QWEN3["qwen3-32b"]
    choice = choose(config, decode(batch=64), 8)
    fitting = [each for each in choice.plans if each.fits]
    assert choice.best.seconds == min(each.seconds for each in fitting)
    assert choice.best.sizes["tensor"] > 1  # weights are read by several, and that is what takes
    # 512 rows of a device are 128 GiB of cache beside 61 of weights.
    full = choose(config, decode(batch=512), 1)
    assert not full.best.fits
    small = dataclasses.replace(H200_NODES, memory_bytes=60 * 2**30)
    tight = choose(config, train(), 8, cluster=small)
    assert tight.best.fits and tight.faster_without_limit is not None


@pytest.mark.parametrize("work", [decode(), train()], ids=["decode", "train"])
def test_the_bank_that_fits_fits_and_a_larger_one_does_not(work):
    config = QWEN3["qwen3-8b"]
    sizes = CUBE if work.kind == "train" else ONE
    most = plan(config, work, sizes).slots_that_fit
    assert plan(config, dataclasses.replace(work, num_adapters=most), sizes).fits
    more = dataclasses.replace(work, num_adapters=most + 1)
    assert not plan(config, more, sizes).fits


HLO = """\
%body.1 (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %ar = f32[4,8]{1,0} all-reduce-start(%x), replica_groups={{0,2},{1,3}}, to_apply=%add
  %rs = ((f32[8,4], f32[2]), (f32[4,4], f32[1])) reduce-scatter-start(%y, %z), \
replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add
}

ENTRY %main (q: bf16[4]) -> bf16[8] {
  %w = (s32[], f32[4,8]) while(%t), condition=%c, body=%body.1, \
backend_config={"known_trip_count":{"n":"36"}}
  ROOT %ag = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%q), replica_groups=[4,2]<=[8]
}
"""


def test_collectives_are_read_with_the_loops_that_hold_them():
    assert collectives(HLO) == [
        Collective("all-reduce", 128, 2, 36),
        Collective("reduce-scatter", 136, 2, 36),
        Collective("all-gather", 16, 2, 1),
    ]
    with pytest.raises(ValueError, match=r"body\.1 does not say how often"):
        collectives(HLO.replace("known_trip_count", "other"))


def test_the_command_prints_a_line_for_each_plan(capsys):
    assert main(["--plan", "--devices", "1", "8", "--kind", "decode"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4 * 2
    page = pathlib.Path(__file__).parents[2].joinpath("docs", "plan.md").read_text("utf-8")
    shown = [line.split() for line in page.splitlines()]
    assert [line for line in lines if line.split() not in shown] == []


def test_the_command_explains_one_plan(capsys):
    command = ["--plan", "--model", "qwen3-8b", "--devices", "8", "--kind", "train"]
    assert main([*command, "--mesh", "data=2,fsdp=2,tensor=2"]) == 0
    text = capsys.readouterr().out
    for word in ("optimiser", "gathered layer", "adapters that fit", "all-reduce", "waits for"):
        assert word in text
    assert main([*command, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert found["best"]["tokens_per_s"] > 0
    assert found["best"]["seconds"] <= min(each["seconds"] for each in found["others"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--plan --model qwen3-8", "did you mean 'qwen3-8b'"),
        ("--plan --devices 0", "--devices 0: expected a whole number from 1 to 65,536"),
        ("--plan --devices 8 --mesh tensor=2", "has 2 devices and --devices is 8"),
        ("--plan --mesh tensor=16", "tensor = 16 does not divide num_kv_heads 8"),
        ("--plan --mesh slots=64 --kind decode", "leaves 1 adapters on a device"),
        ("--plan --mesh tensr=2", "'tensr=2' is not one axis"),
        ("--plan --devices 64 --batch 3", "divides 3 rows"),
        ("--plan --length 99999", "length is 99999; expected at most 40960"),
        ("--plan --top_k 100", "top_k is 100; expected at most num_adapters"),
        ("--plan --rank 0", "rank is 0; expected an integer from 1"),
        ("--plan --kind serve", "unknown 'serve' (known: decode, train)"),
        ("--pln", "did you mean '--plan'"),
        ("", "required: --plan"),
    ],
)
def test_what_makes_no_plan_is_refused_in_one_line(arguments, message, capsys):
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("decode", "data=2,fsdp=2,tensor=2"),
        ("decode", "data=2,tensor=2,slots=2"),
        ("train", "data=2,fsdp=2,tensor=2"),
    ],
)
def test_the_plan_is_what_the_compiler_makes_of_eight_h200s(kind, mesh):
    """What is held and sent exactly, what a step takes at most within a tenth."""
    command = [sys.executable, "-m", "molora_jax.parallel", "--plan", "--model", "qwen3-4b"]
    command += ["--kind", kind, "--mesh", mesh, "--num_adapters", "4", "--compile", "--json"]
    # In a process of its own, as the compiler keeps what it compiled.
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(done.stdout)["compiled"]
    rows = {what: (ours, theirs) for what, ours, theirs in found["rows"]}
    ours, theirs = rows["held"]
    assert ours == pytest.approx(theirs, rel=1e-4)
    ours, theirs = rows["most at once"]
    assert ours == pytest.approx(theirs, rel=0.1)
    sent = {what: pair for what, pair in rows.items() if what.endswith(", sent")}
    assert "all-reduce, sent" in sent and "all-gather, sent" in sent
    for what, (ours, theirs) in sent.items():
        assert ours == pytest.approx(theirs, rel=0.02), what
