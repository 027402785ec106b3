"""A routed projection with random weights, and what it must give, in float64 by plain loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Routing, lora_delta, make_plan
from pallas_kernels.shapes import ProblemSize, workload

# A way is a strategy, with the backend behind a colon where it is not XLA.
STRATEGIES = ["all_slots", "grouped", "bgmv", "reference"]
KERNELS = ["all_slots:interpret", "grouped:interpret", "bgmv:interpret"]
WAYS = [*STRATEGIES, *KERNELS]

# Hundreds of small programs are compiled once and run once: half the time without optimisation.
# What XLA does with an operation, its dtypes and its order stay the same.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class Case:
    x: jax.Array
    lora_a: jax.Array
    lora_b: jax.Array
    routing: Routing
    base: jax.Array
    ranks: jax.Array


def make_case(size: ProblemSize, name: str = "uniform", *, dtype=jnp.float32, seed: int = 0):
    """Values of order one, lora_b included; ranks mixed; rows past a rank are zero."""
    rng = np.random.default_rng(seed)
    n, d, f, r, k = size.num_tokens, size.d_in, size.d_out, size.rank, size.num_slots
    ranks = np.resize([r, max(1, r // 2), r, 1], k)
    in_rank = np.arange(r)[None, :, None] < ranks[:, None, None]

    def random(*shape):
        return rng.standard_normal(shape)

    return Case(
        x=jnp.asarray(random(n, d), dtype),
        lora_a=jnp.asarray(random(k, r, d) / d**0.5 * in_rank, dtype),
        lora_b=jnp.asarray(random(k, r, f) / r**0.5 * in_rank, dtype),
        routing=workload(name, size, seed=seed),
        base=jnp.asarray(random(n, f), dtype),
        ranks=jnp.asarray(ranks, jnp.int32),
    )


def with_ids(routing: Routing, replaced: dict[tuple[int, int], int]) -> Routing:
    """The routing with some ids set, {(token, choice): id}."""
    ids = np.array(routing.adapter_ids)
    for where, adapter_id in replaced.items():
        ids[where] = adapter_id
    return Routing(jnp.asarray(ids), routing.gates)


def expected(case: Case, *, with_base: bool = True) -> np.ndarray:
    """base + Σ_j gate_j · Bᵀ·(A·x), one token and one choice at a time."""
    x, a, b, base, gates = (
        np.asarray(each, np.float64)
        for each in (case.x, case.lora_a, case.lora_b, case.base, case.routing.gates)
    )
    y = base.copy() if with_base else np.zeros_like(base)
    ids = np.asarray(case.routing.adapter_ids)
    for (n, j), slot in np.ndenumerate(ids):
        if 0 <= slot < len(a):
            r = int(case.ranks[slot])
            y[n] += gates[n, j] * (a[slot, :r] @ x[n]) @ b[slot, :r]
    return y


def how(way: str) -> dict[str, str]:
    """Arguments of `lora_delta` and `make_plan`."""
    strategy, _, backend = way.partition(":")
    return {"strategy": strategy, "backend": backend or "auto"}


def update(way: str, block: int | None = None):
    """lora_delta as a function of arrays alone."""

    def run(x, lora_a, lora_b, routing, base=None, ranks=None):
        plan = None
        if block is not None:
            plan = make_plan(routing, lora_a.shape[0], block=block, **how(way))
        return lora_delta(x, lora_a, lora_b, routing, base=base, ranks=ranks, plan=plan, **how(way))

    return run


@functools.cache
def compiled(way: str, block: int | None = None):
    return jit(update(way, block))


def run(way: str, case: Case, *, block: int | None = None) -> jax.Array:
    return compiled(way, block)(
        case.x, case.lora_a, case.lora_b, case.routing, case.base, case.ranks
    )


@functools.cache
def compiled_gradients(way: str):
    """Gradients of Σ weights·y in x, lora_a, lora_b, gates and base, by name."""

    @jit
    def gradients(case: dict, ids, ranks, weights):
        def loss(case):
            y = lora_delta(
                case["x"],
                case["lora_a"],
                case["lora_b"],
                Routing(ids, case["gates"]),
                base=case["base"],
                ranks=ranks,
                **how(way),
            )
            # Selected, so that a token of weight zero is absent and not 0·inf.
            return jnp.sum(jnp.where(weights == 0, 0, y.astype(jnp.float32) * weights))

        return jax.grad(loss)(case)

    return gradients


def gradients(way: str, case: Case, weights) -> dict[str, np.ndarray]:
    values = {name: getattr(case, name) for name in ("x", "lora_a", "lora_b", "base")}
    values["gates"] = case.routing.gates
    found = compiled_gradients(way)(values, case.routing.adapter_ids, case.ranks, weights)
    return {name: np.asarray(value) for name, value in found.items()}
