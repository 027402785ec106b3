"""One adapted step, timed over a trace of accesses: with a hot set, with paging, op by op.

A step is one routed projection, x·W and its update, for B tokens of the next few accesses. The hot
set has every adapter in a bank and one program; paging has some of them in a pool and copies the
rest when a step asks for them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.access import pattern
from experiments.kernel_timing import Band
from experiments.run_folder import Run
from molora_jax.adapters import Adapter, AdapterBank, AdapterStack
from molora_jax.adapters.paging import PagedAdapters, paged
from molora_jax.layers import linear
from pallas_kernels import Routing, lora_delta

if TYPE_CHECKING:
    from experiments.latency import Config

PROJECTION = "q_proj"
# In paper terms: the hot set's one program is "graph".
ARMS = {
    "base": "x·W alone, without adapters: what this machine does to any step",
    "eager": "hot set, but op by op from Python",
    "hot_set": "every adapter in a bank, one compiled program",
    "paging": "a pool for some of them; what a step lacks is copied first",
    "paging_ahead": "the same, the copies for the next step started beside this one",
}


class Cell(NamedTuple):
    """What is measured together: B tokens a step, and who asks."""

    batch: int
    pattern: str


@dataclasses.dataclass
class OneLayer:
    """A base of one layer with square projections, as a bank wants to know it."""

    width: int
    num_layers: int = 1

    def projection_sizes(self) -> dict[str, tuple[int, int]]:
        return {PROJECTION: (self.width, self.width)}


class Latencies:
    """Seconds of every step by cell and arm, (rounds, steps)."""

    def __init__(self, seconds: Mapping[Cell, Mapping[str, np.ndarray]], *, seed: int):
        self.seconds, self.seed = seconds, seed

    def percentile(self, cell: Cell, arm: str, q: float) -> float:
        return float(np.percentile(self.seconds[cell][arm], q))

    def p99_over_p50(self, cell: Cell, arm: str) -> float:
        return self.percentile(cell, arm, 99) / self.percentile(cell, arm, 50)

    def ratio(self, cell: Cell, q: int, arm: str, *, over: str) -> float:
        return self.percentile(cell, arm, q) / self.percentile(cell, over, q)

    def variation(self, cell: Cell, arm: str) -> float:
        """Coefficient of variation, the standard deviation over the mean."""
        values = self.seconds[cell][arm]
        return float(values.std() / values.mean())

    def band(self, cell: Cell, arm: str, what: Callable[[np.ndarray], float]) -> Band:
        """A number of all steps, and its 10th and 90th percentile when rounds are drawn anew."""
        values = self.seconds[cell][arm]
        rng = np.random.default_rng(self.seed)
        drawn = [what(values[rng.integers(len(values), size=len(values))]) for _ in range(200)]
        low, high = np.percentile(drawn, (10, 90))
        return what(values), float(low), float(high)

    def p99_band(self, cell: Cell, arm: str) -> Band:
        """Milliseconds."""
        return self.band(cell, arm, lambda values: 1e3 * float(np.percentile(values, 99)))


def measure(
    config: Config, run: Run, cells: Sequence[Cell], arms: Sequence[str]
) -> tuple[Latencies, dict[Cell, float]]:
    """Every arm on every cell, in blocks by turns; and the share of accesses that paging copied."""
    layer = Layer(config)
    traces = {cell: Trace(layer, cell) for cell in cells}
    runners = {cell: {arm: layer.runner(arm, traces[cell]) for arm in arms} for cell in cells}
    for cell, by_arm in runners.items():
        layer.check(traces[cell], {arm: run_step(0) for arm, run_step in by_arm.items()})
    seconds = {
        cell: {arm: np.zeros((config.rounds, config.steps)) for arm in arms} for cell in cells
    }
    for turn in range(config.rounds):
        order = [(cell, arm) for cell in cells for arm in arms]
        for cell, arm in order[:: 1 if turn % 2 else -1]:
            step, first = runners[cell][arm], 1 + turn * (config.steps + 1)
            step(first)  # the first of a block finds other arms' data in the caches
            for i in range(config.steps):
                begun = time.perf_counter()
                step(first + 1 + i)
                seconds[cell][arm][turn, i] = time.perf_counter() - begun
        for at, (cell, arm) in enumerate(order):
            values = seconds[cell][arm][turn]
            run.log_metrics(
                {
                    "arm": arm, "batch": cell.batch, "pattern": cell.pattern,
                    "p50_s": float(np.median(values)), "max_s": float(values.max()),
                },
                step=turn * len(order) + at,
                phase="rounds",
            )  # fmt: skip
    return Latencies(seconds, seed=config.seed), {
        cell: traces[cell].missed for cell in cells if "paging" in arms
    }


class Trace:
    """The accesses of a cell, cut into steps: slots of the hot set, and rows for paging."""

    def __init__(self, layer: Layer, cell: Cell):
        config = layer.config
        self.cell, m = cell, min(config.active, cell.batch)
        count = 2 + config.rounds * (config.steps + 1)
        self.accesses = pattern(
            cell.pattern,
            num_adapters=config.num_adapters,
            length=count * m,
            seed=config.seed,
        ).reshape(count, m)
        self.names = [[layer.names[i] for i in row] for row in self.accesses.tolist()]
        # Which of a step's accesses each of its tokens belongs to.
        self.token_access = np.arange(cell.batch) * m // cell.batch
        self.slots = self.accesses[:, self.token_access, None].astype(np.int32)  # (steps, B, 1)
        self.rows = self.token_access[:, None].astype(np.int32)
        rng = np.random.default_rng(config.seed)
        self.x = jnp.asarray(rng.standard_normal((cell.batch, config.width)), config.dtype)
        self.pool: PagedAdapters | None = None

    @property
    def missed(self) -> float:
        """Share of the adapters that steps asked the pool for and that had to be copied."""
        assert self.pool is not None
        return self.pool.misses / max(self.pool.reads, 1)


class Layer:
    """The projection, its adapters in a bank, and an arm as a function of a step's number."""

    def __init__(self, config: Config):
        self.config, self.base = config, OneLayer(config.width)
        rng = np.random.default_rng(config.seed)
        D, r = config.width, config.rank
        self.weight = jnp.asarray(rng.standard_normal((D, D)) / D**0.5, config.dtype)
        self.names = [f"adapter{i}" for i in range(config.num_adapters)]
        module = f"layers.0.self_attn.{PROJECTION}"
        self.adapters = []
        for name in self.names:
            a, b = rng.standard_normal((r, D)) / D**0.5, rng.standard_normal((D, r)) / r**0.5
            pair = a.astype(np.float32), b.astype(np.float32)
            self.adapters.append(Adapter.from_arrays(name, {module: pair}, alpha=r))
        self.bank = AdapterBank(
            self.base,
            num_slots=config.num_adapters,
            max_rank=r,
            projections=(PROJECTION,),
            dtype=config.dtype,
        )
        for slot, adapter in enumerate(self.adapters):
            self.bank.load(adapter, slot=slot)
        self._programs: dict[tuple[str, int], jax.stages.Compiled] = {}

    def compiled(self, name: str, function: Callable, *arguments: Any) -> jax.stages.Compiled:
        """The program of these shapes; the patterns of a batch size share one."""
        key = name, len(arguments[0])
        if key not in self._programs:
            self._programs[key] = jax.jit(function).lower(*arguments).compile()
        return self._programs[key]

    def update(self, x, weight, stack: AdapterStack, routing: Routing) -> jax.Array:
        """x·W and what each token's adapters add."""
        return lora_delta(
            x,
            stack.lora_a,
            stack.lora_b,
            routing,
            base=linear(x, weight),
            ranks=stack.ranks,
            layer=0,
            strategy=self.config.strategy,
        )

    def runner(self, arm: str, trace: Trace) -> Callable[[int], jax.Array]:
        """A function of the step's number that computes it and waits."""
        if arm in ("paging", "paging_ahead"):
            return self._paging(trace, ahead=arm == "paging_ahead")
        x, weight, stack = trace.x, self.weight, self.bank.stacks[PROJECTION]

        def routed(x, weight, stack, ids):
            return self.update(x, weight, stack, Routing(ids, jnp.ones(ids.shape)))

        if arm == "base":
            base = self.compiled("base", linear, x, weight)
            return lambda step: base(x, weight).block_until_ready()
        if arm == "eager":
            slots = trace.slots
            return lambda step: routed(
                x, weight, stack, jnp.asarray(slots[step])
            ).block_until_ready()
        program = self.compiled("hot_set", routed, x, weight, stack, trace.slots[0])
        return lambda step: program(x, weight, stack, trace.slots[step]).block_until_ready()

    def _paging(self, trace: Trace, *, ahead: bool) -> Callable[[int], jax.Array]:
        config = self.config
        pool = PagedAdapters(
            self.base,
            num_pages=config.resident * (config.rank // config.page_rank),
            page_rank=config.page_rank,
            max_rank=config.rank,
            projections=(PROJECTION,),
            dtype=config.dtype,
        )
        for adapter in self.adapters:
            pool.add(adapter)
        if not ahead:
            trace.pool = pool

        def routed(x, weight, stack, rows, table):
            routing = paged(Routing(rows, jnp.ones(rows.shape)), table)
            return self.update(x, weight, stack, routing)

        x, weight, rows = trace.x, self.weight, trace.rows
        table = pool.fetch(trace.names[0])
        program = self.compiled("paging", routed, x, weight, pool.stacks[PROJECTION], rows, table)

        def step(number: int) -> jax.Array:
            table = pool.fetch(trace.names[number])
            y = program(x, weight, pool.stacks[PROJECTION], rows, table)
            if ahead and number + 1 < len(trace.names):
                pool.prefetch(trace.names[number + 1])
            return y.block_until_ready()

        return step

    def check(self, trace: Trace, answers: Mapping[str, jax.Array]) -> None:
        """RuntimeError unless all arms but the base give the update in float32 of step 0."""
        answers = {arm: y for arm, y in answers.items() if arm != "base"}
        x = np.asarray(trace.x, np.float32)
        expected = x @ np.asarray(self.weight, np.float32).T
        for token, slot in enumerate(trace.slots[0, :, 0]):
            (pair,) = self.adapters[slot].modules.values()
            expected[token] += pair.scale * (pair.b @ (pair.a @ x[token]))
        room = 30 * float(jnp.finfo(self.config.dtype).eps) * self.config.width**0.5
        for arm, y in answers.items():
            error = np.abs(np.asarray(y, np.float32) - expected).max()
            if not error < room:
                raise RuntimeError(f"{arm} differs from the update by {error:.3g} in {trace.cell}")
