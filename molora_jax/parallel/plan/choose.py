"""A plan of one mesh, and the mesh that takes the shortest step among those that fit."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from molora_jax.models.config import ModelConfig
from molora_jax.parallel import rules
from molora_jax.parallel.plan.cluster import H200_NODES, Cluster, Sizes
from molora_jax.parallel.plan.compute import Part, parts
from molora_jax.parallel.plan.memory import Memory, memory, slots_that_fit
from molora_jax.parallel.plan.traffic import Exchange, exchanges
from molora_jax.parallel.plan.workload import Workload
from molora_jax.parallel.rules import AXES, TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One step on one mesh.

    seconds = Σ parts + Σ exchanges: an exchange and a product never overlap here. XLA can hide
    gathers behind products, so `overlapped_seconds` is what would be left if it hid all of them
    (those over fsdp and of gradients; the sums over tensor stand in the way of what follows).
    """

    config: ModelConfig
    work: Workload
    sizes: Sizes
    cluster: Cluster
    memory: Memory
    parts: list[Part]
    exchanges: list[Exchange]

    @property
    def _all(self) -> list[Part | Exchange]:
        return [*self.parts, *self.exchanges]

    @property
    def seconds(self) -> float:
        return math.fsum(each.seconds for each in self._all)

    @property
    def overlapped_seconds(self) -> float:
        hidden = [e.seconds for e in self.exchanges if not {"tensor", "slots"} & {*e.axes}]
        return max(self.seconds - math.fsum(hidden), math.fsum(hidden))

    @property
    def tokens_per_s(self) -> float:
        return self.work.tokens / self.seconds

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.cluster.budget_bytes

    @functools.cached_property
    def slots_that_fit(self) -> int:
        return slots_that_fit(self.config, self.work, self.sizes, self.cluster)

    @property
    def limits(self) -> dict[str, float]:
        """Seconds by what each part and exchange waits for most, the longest first."""
        found: dict[str, float] = {}
        for each in self._all:
            found[each.limit] = found.get(each.limit, 0.0) + each.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())


@dataclasses.dataclass(frozen=True)
class Choice:
    """The plans of all meshes of so many devices: those that fit, the shortest step first, then the
    others, the smallest first."""

    plans: list[Plan]

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def faster_without_limit(self) -> Plan | None:
        """A mesh with a shorter step that does not fit: HBM capacity is then what limits."""
        fastest = min(self.plans, key=lambda each: each.seconds)
        return fastest if not fastest.fits and fastest.seconds < self.best.seconds else None


def plan(
    config: ModelConfig, work: Workload, sizes: Sizes, *, cluster: Cluster = H200_NODES
) -> Plan:
    """Raises ValueError where the mesh does not divide the model or the step."""
    work.check_length(config)
    if wrong := misfit(config, work, sizes):
        raise ValueError(wrong)
    return Plan(
        config=config,
        work=work,
        sizes=sizes,
        cluster=cluster,
        memory=memory(config, work, sizes),
        parts=parts(config, work, sizes, cluster),
        exchanges=exchanges(config, work, sizes, cluster),
    )


def choose(
    config: ModelConfig, work: Workload, devices: int, *, cluster: Cluster = H200_NODES
) -> Choice:
    """Every mesh of `devices` that divides model and step, planned and sorted.

    Raises ValueError where there is none.
    """
    work.check_length(config)
    fitting = [each for each in meshes(devices) if misfit(config, work, each) is None]
    if not fitting:
        raise ValueError(
            f"no mesh of {devices} devices divides {work.batch} rows, {work.num_adapters} adapters "
            f"and this model: expected a batch that is a multiple of {devices}"
        )
    plans = [plan(config, work, each, cluster=cluster) for each in fitting]
    return Choice(sorted(plans, key=lambda e: (not e.fits, e.seconds if e.fits else e.memory.peak)))


def meshes(devices: int) -> Iterator[Sizes]:
    """All sizes of AXES whose product is `devices`."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(AXES) - 1):
        rest, left = divmod(devices, math.prod(sizes))
        if rest and not left:
            yield dict(zip(AXES, (*sizes, rest), strict=True))


def misfit(config: ModelConfig, work: Workload, sizes: Sizes) -> str | None:
    """What the mesh does not divide, in words; None where it divides all."""
    shards, slots = rules.axis_size(TOKENS, sizes), sizes["slots"]
    needs = (
        ("tensor", sizes["tensor"], "num_kv_heads", config.num_kv_heads),
        ("tensor", sizes["tensor"], "num_heads", config.num_heads),
        ("tensor", sizes["tensor"], "intermediate_size", config.intermediate_size),
        ("tensor", sizes["tensor"], "vocab_size", config.vocab_size),
        ("fsdp", sizes["fsdp"], "hidden_size", config.hidden_size),
        ("slots", slots, "num_adapters", work.num_adapters),
        (" × ".join(TOKENS), shards, "batch", work.batch),
    )
    for axis, count, name, size in needs:
        if size % count:
            return f"mesh {axis} = {count} does not divide {name} {size}: expected a divisor of it"
    if slots > 1 and work.num_adapters // slots < work.top_k:
        return (
            f"mesh slots = {slots} leaves {work.num_adapters // slots} adapters on a device and a "
            f"token takes {work.top_k}: expected top_k {work.top_k} or more"
        )
    return None


def shown(sizes: Sizes) -> str:
    """As --mesh takes it: "data=2,tensor=4"."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
