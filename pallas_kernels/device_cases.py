"""What `device_check` measures: cases in order of importance, and a machine's constants."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import bench
from pallas_kernels.api import make_plan
from pallas_kernels.baselines import BASELINES
from pallas_kernels.shapes import ProblemSize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """What differs between a GPU and a run on CPU that only shows that the script works."""

    width: int
    largest: int  # tokens
    margin_s: float  # nothing begins with less time left
    calls: int  # in one program
    few_tokens_calls: int  # the same where a call is so short that the noise of a launch shows
    repeats: int
    dtype: str


GPU = Scale(
    width=4096,
    largest=65536,
    margin_s=8.0,
    calls=12,
    few_tokens_calls=48,
    repeats=15,
    dtype="bfloat16",
)
TINY = Scale(
    width=32, largest=64, margin_s=0.0, calls=4, few_tokens_calls=4, repeats=3, dtype="float32"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One size, the arms that are timed there in turns, and the section it belongs to."""

    section: str
    size: ProblemSize
    arms: tuple[str, ...]
    base_product: bool = False

    def calls(self, scale: Scale) -> int:
        """Calls in one program; few where an arm is K passes, which take long to compile."""
        if self.section == "baselines":
            return 4
        return scale.few_tokens_calls if self.size.num_tokens <= 1024 else scale.calls

    def __str__(self):
        s = self.size
        layer = " with the base product" if self.base_product else ""
        return f"N={s.num_tokens} D={s.d_in} r={s.rank} K={s.num_slots} k={s.top_k}{layer}"


def cases(scale: Scale) -> Iterator[Case]:
    """What is timed, the most important first."""

    def case(section, arms, *, n, slots=8, k=1, r=64, base_product=False):
        r = r if scale is GPU else 4
        size = ProblemSize(
            num_tokens=n, d_in=scale.width, d_out=scale.width, rank=r, num_slots=slots, top_k=k
        )
        return Case(section=section, size=size, arms=arms, base_product=base_product)

    strategies = ("grouped", "all_slots", "bgmv", "auto")
    for n in (1, 32, 160, 1024, 8192, 65536):
        yield case("tokens, k=1", strategies if n <= 1024 else ("grouped", "all_slots"), n=n)
    for k in (1, 2, 4):
        arms = ("single_lora", "grouped", "all_slots", "auto")
        for base_product in (False, True):
            yield case("table16", arms, n=4096, k=k, base_product=base_product)
    for n in (8, 16, 64, 128, 256, 512):
        yield case("bgmv crossover", ("grouped", "bgmv", "all_slots", "auto"), n=n)
    for n in (1024, 8192):
        for slots in (4, 16, 64):
            yield case("adapters", ("grouped", "all_slots", "auto"), n=n, slots=slots)
    for n in (128, 1024, 8192):
        yield case("tokens, k=2", ("grouped", "all_slots", "auto"), n=n, k=2)
    yield case("rank 16", ("grouped", "all_slots", "bgmv", "auto"), n=1024, r=16)
    yield case("baselines", ("auto", *BASELINES), n=2048, slots=4)
    yield case("baselines", ("auto", *BASELINES), n=1024, slots=16, k=2)


def sections(scale: Scale) -> dict[str, list[Case]]:
    """The cases by section, none larger than the scale allows, none twice."""
    found: dict[str, dict[Case, None]] = {}
    for case in cases(scale):
        if case.size.num_tokens > scale.largest:
            size = dataclasses.replace(case.size, num_tokens=scale.largest)
            case = dataclasses.replace(case, size=size)
        found.setdefault(case.section, {})[case] = None
    return {section: list(of_section) for section, of_section in found.items()}


def sort_arm(inputs: bench.Inputs, *, calls: int) -> bench.Arm:
    """The plan of `grouped`, made `calls` times from ids that differ by a rotation of tokens."""

    def sorts(count, x, weights, stacks, routing, base):
        plans = []
        for i in range(count):
            ids = jnp.roll(routing.adapter_ids, i, axis=0)
            turned = dataclasses.replace(routing, adapter_ids=ids)
            plans.append(make_plan(turned, inputs.size.num_slots, strategy="grouped"))
        return plans

    def program(count):
        run = jax.jit(functools.partial(sorts, count))
        return run.lower(*inputs.arguments()).compile(compiler_options=graphs())

    fewer = calls // 4
    return bench.Arm(
        run=program(calls),
        calls=calls,
        fewer=program(fewer) if fewer else None,
        fewer_calls=fewer,
    )


def graphs() -> dict[str, str | bool]:
    """Compiler options by which every launch goes into a CUDA graph."""
    return {"xla_gpu_graph_min_graph_size": "1"} if jax.default_backend() == "gpu" else {}


def _steps(array: jax.Array, count: int) -> float:
    """Seconds of one of `count` elementwise steps, each a kernel of its own, in one program."""

    def run(a):
        for _ in range(count):
            a = lax.optimization_barrier(a * 1.0001 + 1.0)
        return a

    compiled = jax.jit(run).lower(array).compile(compiler_options=graphs())
    taken = []
    for turn in range(8):
        start = time.perf_counter()
        compiled(array).block_until_ready()
        if turn >= 3:
            taken.append((time.perf_counter() - start) / count)
    return float(np.median(taken))


def _node_cost(scale: Scale) -> dict[str, float]:
    many, few = (300, 100) if scale is GPU else (30, 10)
    small = jnp.zeros(1024, jnp.float32)
    # The difference leaves out what a launch of the whole program costs.
    seconds = (many * _steps(small, many) - few * _steps(small, few)) / (many - few)
    return {"node_us": 1e6 * seconds, "h200_model_us": 1.5}


def _bandwidth(scale: Scale, *, megabytes: int) -> dict[str, float]:
    numbers = megabytes * 2**18 if scale is GPU else 2**12
    steps = 64 if megabytes < 64 else 8
    seconds = _steps(jnp.zeros(numbers, jnp.float32), steps)
    return {"terabytes_per_s": 2 * 4 * numbers / seconds / 1e12, "megabytes": numbers / 2**18}


CONSTANTS: dict[str, Callable[[Scale], dict[str, float]]] = {
    "node cost": _node_cost,
    "L2 bandwidth": functools.partial(_bandwidth, megabytes=12),
    "copy bandwidth": functools.partial(_bandwidth, megabytes=2048),
}
