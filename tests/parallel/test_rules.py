"""The table of rules: what it splits, what it refuses, and the bytes that come of it."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from molora_jax import parallel
from molora_jax.adapters import AdapterBank, init_adapter
from molora_jax.models import load_base
from molora_jax.models.tiny import tiny_config
from molora_jax.parallel import rules
from molora_jax.routing import FixedRouter, SequenceRouter

SIZES = {"data": 2, "fsdp": 2, "tensor": 2, "slots": 2}
BOTH = ("tensor", "fsdp")


def named(tree, sizes=SIZES, **how):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return dict(zip(names, rules.specs(tree, sizes, **how), strict=True))


def test_base_bank_and_training_are_split_as_the_table_says():
    base = load_base("tiny-random")
    found = named(base.decoder)
    assert found["embedding/value"] == found["lm_head/value"] == P("tensor", "fsdp")
    assert found["layers/q_proj/weight/value"] == P(None, "tensor", "fsdp")
    assert found["layers/down_proj/weight/value"] == P(None, "fsdp", "tensor")
    assert found["layers/input_norm/value"] == P()
    bank = named(AdapterBank(base.config, num_slots=2, max_rank=2).stacks)
    assert bank["gate_proj/lora_a"] == P(None, "slots", None, "fsdp")
    assert bank["gate_proj/lora_b"] == P(None, "slots", None, BOTH)
    assert bank["o_proj/lora_a"] == P(None, "slots", None, BOTH)
    assert bank["o_proj/lora_b"] == P(None, "slots", None, "fsdp")
    assert bank["o_proj/ranks"] == P(None, "slots")
    trained = init_adapter(base.config, rank=2, alpha=2, rng=jax.random.key(0))
    state = named({"params": trained, "optimiser": {"mu": trained}})
    for part in ("params", "optimiser/mu"):  # moments lie as what they are of
        assert state[f"{part}/lora_a/k_proj"] == P(None, None, "fsdp")
        assert state[f"{part}/lora_b/k_proj"] == P(None, None, BOTH)


def test_every_array_of_a_base_but_its_norms_is_split():
    whole = [name for name, spec in named(load_base("tiny-random").decoder).items() if spec == P()]
    assert whole and all("norm" in name for name in whole)


def test_rows_of_a_router_are_split_with_their_batch():
    fixed = FixedRouter(np.zeros((8, 3, 2), np.int32))
    assert set(named(fixed).values()) == {P(rules.TOKENS)}
    assert set(named(fixed, split_rows=False).values()) == {P()}
    assert set(named(SequenceRouter(np.zeros(8, np.int32))).values()) == {P(rules.TOKENS)}


def test_an_axis_of_one_device_splits_nothing():
    found = named(load_base("tiny-random").decoder, SIZES | {"fsdp": 1})
    assert found["embedding/value"] == P("tensor")
    assert rules.fitting((rules.TOKENS,), (8,), SIZES | {"fsdp": 1}) == P(("data", "slots"))


def test_a_mesh_takes_what_is_left_along_data():
    mesh = parallel.make_mesh("", devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1, "slots": 1}
    assert parallel.parse_mesh("fsdp=4, tensor=2") == {"fsdp": 4, "tensor": 2}


@pytest.mark.parametrize("text", ["tensr=2", "tensor", "tensor=0", "tensor=x", "data=1,data=1"])
def test_a_mesh_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match=r"expected some of data, fsdp, tensor, slots"):
        parallel.parse_mesh(text)


def test_a_mesh_of_other_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"fsdp 3 × tensor 5 needs 15 devices, and there are 1:"):
        parallel.make_mesh("fsdp=3,tensor=5,data=1", devices=jax.devices()[:1])


def test_sizes_that_do_not_divide_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"tensor = 4 does not divide num_kv_heads \(Hk\) 2 of"):
        rules.check_fits(tiny_config(), SIZES | {"tensor": 4})
    with pytest.raises(ValueError, match=r"does not divide hidden_size \(D\) 64 .* 1 or 2 or 4"):
        rules.check_fits(tiny_config(), SIZES | {"fsdp": 5})


@pytest.mark.long
def test_a_training_step_takes_its_share_of_memory():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "tests.parallel.memory", "fsdp=8", "fsdp=4,tensor=2"]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    shares = json.loads(done.stdout)
    assert 0.9 < shares["fsdp=8"] < 1.15 and 0.9 < shares["fsdp=4,tensor=2"] < 1.15, done.stderr
