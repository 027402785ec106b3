"""Bytes on one device of a training step, compiled for meshes of eight; run in its own process.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.parallel.memory [MESH...]
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from molora_jax import parallel
from molora_jax.adapters import init_adapter
from molora_jax.models.decoder import Decoder
from molora_jax.models.tiny import tiny_config
from molora_jax.models.weights import array_shapes
from molora_jax.parallel.rules import shardings
from molora_jax.training import loop
from molora_jax.training.adapter import adapter_loss
from molora_jax.training.data import Batch

B, S, RANK = 32, 256, 8
MODEL = dataclasses.replace(
    tiny_config(),
    hidden_size=512,
    intermediate_size=1536,
    num_layers=12,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=8192,
)


def step_bytes(mesh: jax.sharding.Mesh) -> int:
    """Arguments, results and temporaries of one device, as the compiler counts them."""

    def decoder():
        return Decoder(MODEL, {n: jnp.zeros(s) for n, s in array_shapes(MODEL).items()})

    def adapter():
        return init_adapter(MODEL, rank=RANK, alpha=RANK, rng=jax.random.key(0))

    params = jax.eval_shape(adapter)
    moments = jax.eval_shape(loop._adamw(1.0, 0.0).init, params)
    state = {"params": params, "optimiser": moments}
    dtypes = {"tokens": "int32", "mask": "bool", "weights": "float32", "labels": "int32"}
    batch = Batch(**{name: jax.ShapeDtypeStruct((1, B, S), d) for name, d in dtypes.items()})
    rows = NamedSharding(mesh, PartitionSpec(None, parallel.TOKENS))

    def split(tree, how):
        return jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), tree, how
        )

    frozen = jax.eval_shape(decoder)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    with parallel.computing(mesh):
        lowered = loop._train_step.lower(
            split(state, shardings(state, mesh)),
            split(frozen, shardings(frozen, mesh)),
            split(batch, jax.tree.map(lambda _: rows, batch)),
            number,
            number,
            number,
            loss_fn=adapter_loss,
        )
    found = lowered.compile().memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def main(meshes: list[str]) -> None:
    """Prints {mesh: bytes of a device · 8 / bytes of a mesh of one device}."""
    one = step_bytes(parallel.make_mesh("", devices=jax.devices()[:1]))
    shares = {each: 8 * step_bytes(parallel.make_mesh(each)) / one for each in meshes}
    print(json.dumps({"one device": one, **shares}))


if __name__ == "__main__":
    main(sys.argv[1:] or ["fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"])
