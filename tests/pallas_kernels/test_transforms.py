"""`vmap`, `scan` and `shard_map` around the routed update, values and gradients."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Routing, lora_delta, make_plan
from pallas_kernels.shapes import ProblemSize, workload
from tests.helpers import assert_close, strict_promotion
from tests.pallas_kernels.cases import KERNELS, WAYS, how, jit, make_case

SIZE = ProblemSize(num_tokens=24, d_in=10, d_out=10, rank=3, num_slots=5, top_k=2)
# The reference is plain operations; it runs under `shard_map` below, which has rules of its own.
each_path = pytest.mark.parametrize("strategy", ["all_slots", "grouped", *KERNELS])


def stacked(count: int) -> dict:
    """`count` cases, each array with a leading axis."""
    cases = [make_case(SIZE, seed=seed) for seed in range(count)]
    values = {
        name: jnp.stack([getattr(case, name) for case in cases])
        for name in ("x", "lora_a", "lora_b", "base")
    }
    values["ids"] = jnp.stack([case.routing.adapter_ids for case in cases])
    values["gates"] = jnp.stack([case.routing.gates for case in cases])
    return values


def one(values: dict, strategy: str):
    return lora_delta(
        values["x"],
        values["lora_a"],
        values["lora_b"],
        Routing(values["ids"], values["gates"]),
        base=values["base"],
        **how(strategy),
    )


@each_path
def test_vmap(strategy):
    values = stacked(3)
    # Skewed, so that the lanes differ in how many tiles they need.
    values["ids"] = values["ids"].at[0].set(2).at[1].set(-1)
    floats = {name: value for name, value in values.items() if name != "ids"}

    def loss(floats, ids):
        return jnp.sum(jnp.sin(one({**floats, "ids": ids}, strategy)))

    with strict_promotion():
        found, gradients = jit(jax.vmap(jax.value_and_grad(loss)))(floats, values["ids"])
    single = jit(jax.value_and_grad(lambda *args: loss(*args)))
    for i in range(3):
        lane = {name: value[i] for name, value in floats.items()}
        wanted, wanted_gradients = single(lane, values["ids"][i])
        assert_close(found[i], wanted, terms=500)
        for name, value in wanted_gradients.items():
            assert_close(gradients[name][i], value, terms=200)


@each_path
def test_scan_over_layers_with_one_decision(strategy):
    values = stacked(2)
    routing = Routing(values["ids"][0], values["gates"][0])
    layers = (values["lora_a"], values["lora_b"])

    def layer(x, weights, plan):
        y = lora_delta(x, *weights, routing, base=x, plan=plan, **how(strategy))
        return jnp.tanh(y)

    def scanned(x, layers):
        plan = make_plan(routing, SIZE.num_slots, **how(strategy))
        return jax.lax.scan(lambda x, weights: (layer(x, weights, plan), None), x, layers)[0]

    def unrolled(x, layers):
        for i in range(2):
            x = layer(x, tuple(leaf[i] for leaf in layers), None)
        return x

    def outcome(run):
        with strict_promotion():
            program = jit(jax.value_and_grad(lambda *a: jnp.sum(run(*a) ** 2), argnums=(0, 1)))
            return program(values["x"][0], layers)

    leaves = zip(*(jax.tree.leaves(outcome(run)) for run in (scanned, unrolled)), strict=True)
    for found, wanted in leaves:
        assert_close(found, wanted, terms=1000)


def sharded_outcome(strategy: str, mesh) -> tuple:
    """Value and gradients with tokens split over the devices of `mesh`, or whole where None."""
    case = make_case(SIZE)
    routing = workload("zipf", SIZE)

    def update(x, lora_a, lora_b, ids, gates, base):
        return lora_delta(x, lora_a, lora_b, Routing(ids, gates), base=base, **how(strategy))

    if mesh is not None:
        tokens, everywhere = jax.P("tokens"), jax.P()
        update = jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(tokens, everywhere, everywhere, tokens, tokens, tokens),
            out_specs=tokens,
            # JAX cannot follow what varies through a kernel that it interprets.
            check_vma=strategy not in KERNELS,
        )

    def loss(x, lora_a, lora_b, gates, base):
        return jnp.sum(jnp.sin(update(x, lora_a, lora_b, routing.adapter_ids, gates, base)))

    return jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))(
        case.x, case.lora_a, case.lora_b, routing.gates, case.base
    )


def compare_sharded() -> None:
    """Run in a process with two devices."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=automatic)
    whole = jax.tree.leaves(sharded_outcome("reference", None))
    assert min(np.abs(each).max() for each in whole) > 0
    for strategy in WAYS:
        sharded = jax.tree.leaves(sharded_outcome(strategy, mesh))
        for found, wanted in zip(sharded, whole, strict=True):
            assert_close(found, wanted, terms=500)
    print("sharded as whole")


def test_shard_map_over_two_devices():
    # The number of CPU devices is settled when JAX starts.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = "from tests.pallas_kernels.test_transforms import compare_sharded as c; c()"
    result = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.strip() == "sharded as whole", result.stderr
