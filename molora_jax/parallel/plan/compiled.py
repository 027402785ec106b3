"""The plan beside the compiler: the step of a plan compiled for its mesh of H200s without any.

XLA says what a device holds (arguments, temporary memory) and the program's text what is exchanged.
It says nothing of time. Training is compiled whole, its layers being a loop. Decoding is unrolled:
of it a model of two and one of three layers are compiled, and the difference is taken for every
layer, which all sizes here are linear in.
"""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from molora_jax import parallel
from molora_jax.display import Table
from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder
from molora_jax.parallel import rules
from molora_jax.parallel.plan.choose import Plan, shown
from molora_jax.parallel.plan.cluster import wire_bytes
from molora_jax.parallel.plan.hlo import collectives
from molora_jax.parallel.plan.workload import Workload, base, trees
from molora_jax.parallel.rules import TOKENS
from pallas_kernels import deviceless

LAYERS = (2, 3)  # of the decoders that are compiled in place of a deep one
SMALL = 2**16  # bytes; smaller collectives, of scalars and of choices, are not compared


def compare(name: str, paper: Plan) -> dict[str, Any]:
    """{"rows": [(what, the plan's, the compiler's)], …}: bytes of one device, collectives a step.

    Raises NotImplementedError without the CUDA compiler (the extra `deviceless`).
    """
    if paper.work.kind == "train":
        taken = compiled(paper.config, paper.work, paper.sizes)
    else:
        small = [
            compiled(dataclasses.replace(paper.config, num_layers=n), paper.work, paper.sizes)
            for n in LAYERS
        ]
        more = (paper.config.num_layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
        keys = dict.fromkeys([*small[0], *small[1]])
        first, second = ([each.get(key, 0) for key in keys] for each in small)
        taken = {key: a + more * (b - a) for key, a, b in zip(keys, first, second, strict=True)}
    ours = counted(paper)
    rows = [(key, ours.get(key, 0), taken.get(key, 0)) for key in dict.fromkeys([*ours, *taken])]
    return {"model": name, "kind": paper.work.kind, "mesh": shown(paper.sizes), "rows": rows}


def compared_table(found: dict[str, Any]) -> Table:
    """The comparison as a table."""
    step = f"{found['model']}, {found['kind']}, {found['mesh']}"
    head, rows = [step, "plan", "compiler", "ratio"], []
    for what, ours, theirs in found["rows"]:
        ratio = f"{ours / theirs:.2f}" if theirs else "-"
        if what.endswith("times") or what == "launches":
            rows.append([what, f"{ours:,.0f}", f"{theirs:,.0f}", ratio])
        else:
            rows.append([f"{what}, MB", f"{ours / 1e6:,.1f}", f"{theirs / 1e6:,.1f}", ratio])
    return Table(head, rows, right=head[1:])


def counted(paper: Plan) -> dict[str, float | int]:
    """The plan's numbers under the names that `compiled` gives the compiler's."""
    held = sum(paper.memory.held.values())
    found: dict[str, float | int] = {
        "held": held,
        "passing": paper.memory.peak - held,
        "most at once": paper.memory.peak,
    }
    for each in paper.exchanges:
        _add(found, each.kind, each.size, each.wire, each.times)
    if paper.work.kind == "decode":
        found["launches"] = sum(part.launches for part in paper.parts)
        found["launches"] += sum(each.times for each in paper.exchanges)
    return found


def compiled(config: ModelConfig, work: Workload, sizes: dict[str, int]) -> dict[str, float | int]:
    """What XLA made of a step, under the same names."""
    count = int(np.prod(list(sizes.values())))
    mesh = parallel.make_mesh(sizes, devices=deviceless.devices(count))
    build = _train if work.kind == "train" else _decode
    step, arguments, donated = build(config, work, mesh)
    report = deviceless.compile_for(step, *arguments, mesh=mesh, donate=donated)
    new = report.output_bytes - report.alias_bytes
    found: dict[str, float | int] = {
        "held": report.argument_bytes,
        "passing": report.temp_bytes + new,
        "most at once": report.argument_bytes + report.temp_bytes + new,
    }
    for each in collectives(report.hlo):
        wire = each.times * wire_bytes(each.kind, each.size, each.n)
        _add(found, each.kind, each.size, wire, each.times)
    if work.kind == "decode":  # of a loop the thunks do not say how often they run
        found["launches"] = len(report.thunks)
    return found


def _add(
    found: dict[str, float | int], kind: str, size: float | int, wire: float, times: int
) -> None:
    if size >= SMALL:
        for key, value in ((f"{kind}, sent", wire), (f"{kind}, times", times)):
            found[key] = found.get(key, 0) + value


# --- steps ----------------------------------------------------------------------------------------


def _decode(config: ModelConfig, work: Workload, mesh: Mesh) -> tuple:
    """One greedy step of all rows, the cache donated."""

    def step(decoder, tokens, active, cache, adapters, router):
        routed = {"adapters": adapters, "router": router}
        slots = np.arange(router.num_columns)
        out, cache = decoder.decode(tokens, cache, active=active, **routed, column_to_slot=slots)
        return jnp.argmax(decoder.logits(out.hidden[:, 0]), axis=-1), cache

    made = trees(config, work)
    decoder = jax.eval_shape(Decoder.unstacked, made["base"])
    rows = NamedSharding(mesh, P(TOKENS))
    tokens = jax.ShapeDtypeStruct((work.batch,), jnp.int32, sharding=rows)
    active = jax.ShapeDtypeStruct((work.batch,), jnp.bool_, sharding=rows)
    cache = _placed({"cache": made["cache"]}, mesh)["cache"]
    rest = (_placed(made[name], mesh) for name in ("bank", "router"))
    return step, (_placed(decoder, mesh), tokens, active, cache, *rest), (3,)


def _train(config: ModelConfig, work: Workload, mesh: Mesh) -> tuple:
    """One step of `train_jointly`, parameters and optimiser donated."""
    from molora_jax.training import joint, loop
    from molora_jax.training.anneal import AnnealedBatch
    from molora_jax.training.data import Batch

    settings = joint.JointTrainConfig(
        num_adapters=work.num_adapters, rank=work.rank, top_k=work.top_k, after_layer=None,
        gate="softmax" if work.top_k == work.num_adapters else "unit",
    )  # fmt: skip

    def state():
        router = joint.start_router(config, settings)
        moves = {name: jnp.zeros_like(getattr(router, name)[...]) for name in joint.ROUTER_ARRAYS}
        params = {"adapters": tuple(joint.start_adapters(config, settings)), "router": moves}
        frozen = {
            "router": router,
            "router_lr": jnp.float32(1),
            "coefs": {name: jnp.float32(0) for name in ("balance", "z", "info")},
        }
        optimiser = loop._adamw(1.0, 0.0).init(params)
        return {"params": params, "optimiser": optimiser}, frozen

    def batch():
        tokens = np.zeros((work.batch, work.length), np.int32)
        real = np.ones(tokens.shape)
        rows = AnnealedBatch.of(Batch(tokens, real.astype(bool), real.astype(np.float32), tokens))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], rows)

    trained, frozen = jax.eval_shape(state)
    frozen["decoder"] = base(config)
    rows = NamedSharding(mesh, P(None, TOKENS))
    rows_of = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows),
        jax.eval_shape(batch),
    )
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    step = functools.partial(
        inspect.unwrap(loop._train_step), loss_fn=joint.JointLoss(top_k=work.top_k)
    )
    return step, (_placed(trained, mesh), _placed(frozen, mesh), rows_of, *[number] * 3), (0,)


def _placed(tree: Any, mesh: Mesh) -> Any:
    """Shapes with the sharding that the rules give them."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        rules.shardings(tree, mesh),
    )
