"""Inputs, paired times and memory of routed projections. What a time means is for others to say.

An arm is a function (x, lora_a, lora_b, routing, base) → y: `routed(strategy)`, or a baseline.
Arms are compiled first, and then timed in turns in one process, so that whatever slows the machine
down meets all of them; a ratio is the median over the turns.

On a GPU a launch costs more than a small kernel. There one program holds `calls` calls, each
reading what the one before wrote, over weight sets that rotate, so that no call finds its weights
in the cache. A second program holds a quarter of them, and what a call costs is the difference:
the launch, copies of the inputs, and the sort, which all calls share, drop out of it.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api import lora_delta, make_plan
from pallas_kernels.paths import Path
from pallas_kernels.shapes import ProblemSize, workload
from pallas_kernels.strategy import paths
from pallas_kernels.types import Routing

MIN_REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """A problem on the device: random values of order one, `weight_sets` sets of weights.

    `routing` and each of `stacks` may be pytrees of what an experiment's own arms choose from; a
    compiled arm keeps what it reads.
    """

    size: ProblemSize
    x: jax.Array  # (N, D)
    base: jax.Array  # (N, F)
    routing: Any  # Routing
    weights: tuple[jax.Array, ...]  # (D, F) each: the frozen projection
    stacks: tuple[tuple[Any, Any], ...]  # lora_a (K, R, D), lora_b (K, R, F) each

    def arguments(self, turn: int = 0) -> tuple:
        """What a compiled arm takes, with other weights first at each turn."""

        def rotated(sets):
            first = turn % max(len(sets), 1)
            return sets[first:] + sets[:first]

        return self.x, rotated(self.weights), rotated(self.stacks), self.routing, self.base

    @property
    def active(self) -> int:
        """Adapters that at least one token uses."""
        ids = np.asarray(self.routing.adapter_ids)
        return len(np.unique(ids[ids >= 0]))


def make_inputs(
    size: ProblemSize,
    workload_name: str = "uniform",
    *,
    dtype: str = "float32",
    weight_sets: int = 1,
    base_product: bool = False,
    routing: Routing | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs of a size.

    Args:
      workload_name: one of `shapes.WORKLOADS`, unless a `routing` is given.
      base_product: whether the frozen projection's weights are wanted.
    """
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 2 + 3 * weight_sets))

    def random(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(dtype)

    n, d, f, r, k = size.num_tokens, size.d_in, size.d_out, size.rank, size.num_slots
    # The update is a tenth of the output, so that a chain of calls stays of order one.
    stack = [
        (random(k, r, d, scale=d**-0.5), random(k, r, f, scale=0.1 * r**-0.5))
        for _ in range(weight_sets)
    ]
    return Inputs(
        size=size,
        x=random(n, d),
        base=random(n, f),
        routing=workload(workload_name, size, seed=seed) if routing is None else routing,
        weights=tuple(random(d, f, scale=d**-0.5) for _ in range(weight_sets * base_product)),
        stacks=tuple(stack),
    )


def routed(strategy: str = "auto", *, backend: str = "auto", block: int | None = None) -> Callable:
    """`lora_delta` as an arm; with `block`, over a plan of tiles of that many rows."""

    def run(x, lora_a, lora_b, routing, base):
        plan = None
        if block is not None:
            plan = make_plan(
                routing, lora_a.shape[0], strategy=strategy, backend=backend, block=block
            )
        return lora_delta(
            x, lora_a, lora_b, routing, base=base, strategy=strategy, backend=backend, plan=plan
        )

    return run


def path_here(strategy: str, size: ProblemSize, *, backend: str = "auto") -> Path:
    """What a strategy, or `auto`, runs at this size on the device that runs this."""
    found = paths(strategy, backend, size)
    on_gpu = jax.default_backend() == "gpu"
    return found.get("cuda", found["default"]) if on_gpu else found["default"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """Something to time: called with `Inputs.arguments()`, it computes `calls` calls.

    `fewer`, where given, computes `fewer_calls`, and a call costs the difference.
    """

    run: Callable
    calls: int = 1
    fewer: Callable | None = None
    fewer_calls: int = 0
    temp_bytes: int | None = None  # by the compiler; None where the host drives


def chain(function: Callable, *, calls: int, base_product: bool) -> Callable:
    """`calls` calls of an arm, each needing the one before.

    With the base product, x becomes x·W + Δ(x). Without it (x, base) becomes (base + Δ(x), x), so
    that a call can add in place, and none repeats a product of x that another has made.
    """

    def run(x, weights, stacks, routing, base):
        for i in range(calls):
            lora_a, lora_b = stacks[i % len(stacks)]
            if base_product:
                base = x @ weights[i % len(weights)]
            x, base = function(x, lora_a, lora_b, routing, base), x
        return x

    return run


def compile_arm(
    function: Callable,
    inputs: Inputs,
    *,
    calls: int = 1,
    base_product: bool = False,
    graphs: bool = True,
) -> Arm:
    """One program, on a GPU with every run of launches in CUDA graphs, or with none.

    Args:
      base_product: whether `base` is computed in each call, x·W, or given.

    Raises:
      NotImplementedError: the strategy or its backend is not there.
    """
    if calls > 1 and inputs.size.d_in != inputs.size.d_out:
        raise ValueError(
            f"calls is {calls} with d_in {inputs.size.d_in} and d_out {inputs.size.d_out}; calls "
            "feed one another, so expected equal widths, or calls = 1"
        )
    options: dict[str, str | bool] = {}
    if jax.default_backend() == "gpu":
        options["xla_gpu_graph_min_graph_size"] = "1" if graphs else str(10**9)

    def program(count):
        run = jax.jit(chain(function, calls=count, base_product=base_product))
        return run.lower(*inputs.arguments()).compile(compiler_options=options)

    compiled = program(calls)
    memory = compiled.memory_analysis()
    temp = None if memory is None else int(memory.temp_size_in_bytes)
    fewer_calls = calls // 4
    return Arm(
        run=compiled,
        calls=calls,
        fewer=program(fewer_calls) if fewer_calls else None,
        fewer_calls=fewer_calls,
        temp_bytes=temp,
    )


def host_arm(function: Callable, *, base_product: bool = False) -> Arm:
    """A function that the host drives, launching programs of its own."""
    return Arm(run=chain(function, calls=1, base_product=base_product))


def compile_arms(
    functions: Mapping[str, Callable],
    inputs: Inputs,
    *,
    host: Sequence[str] = (),
    calls: int = 1,
    base_product: bool = False,
) -> tuple[dict[str, Arm], dict[str, str]]:
    """Arms by name, and by name the reason of each that is not there."""
    arms, missing = {}, {}
    for name, function in functions.items():
        try:
            arms[name] = (
                host_arm(function, base_product=base_product)
                if name in host
                else compile_arm(function, inputs, calls=calls, base_product=base_product)
            )
        except NotImplementedError as error:
            missing[name] = str(error)
    return arms, missing


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a call by arm, one value a turn; values of the same turn are pairs."""

    seconds: Mapping[str, np.ndarray]

    def __contains__(self, name: str) -> bool:
        return name in self.seconds

    def median(self, name: str) -> float:
        return float(np.median(self.seconds[name]))

    def spread(self, name: str) -> tuple[float, float]:
        """The 10th and the 90th percentile."""
        low, high = np.percentile(self.seconds[name], (10, 90))
        return float(low), float(high)

    def ratio(self, name: str, over: str) -> float:
        """The median over turns of one arm's time over the other's; NaN where one is missing."""
        if name not in self.seconds or over not in self.seconds:
            return math.nan
        return float(np.median(self.seconds[name] / self.seconds[over]))


def time_arms(
    arms: Mapping[str, Arm],
    inputs: Inputs,
    *,
    repeats: int,
    warm_up: int = 1,
    budget_s: float = math.inf,
) -> Times:
    """Times arms in turns, in alternating order, with rotating weights.

    Args:
      repeats: turns.
      warm_up: turns before the first that counts.
      budget_s: no turn begins after so many seconds, once there are three.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    begun = time.perf_counter()
    for turn in range(-warm_up, repeats):
        if turn >= MIN_REPEATS and time.perf_counter() - begun > budget_s:
            break
        arguments = inputs.arguments(turn)
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            arm = arms[name]
            taken = _seconds(arm.run, arguments)
            if arm.fewer is not None:
                taken -= _seconds(arm.fewer, arguments)
            if turn >= 0:
                seconds[name].append(taken / (arm.calls - arm.fewer_calls))
    return Times({name: np.array(values) for name, values in seconds.items()})


def _seconds(run: Callable, arguments: tuple) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - start
