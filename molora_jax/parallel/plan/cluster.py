"""The machines of a plan: H200s in nodes of eight, and what a collective takes between them.

Every constant has its unit and where it comes from. Letters: n devices of a group, of which g in
each node; m nodes that it spans; S bytes.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from molora_jax.parallel.rules import AXES
from pallas_kernels import cost

Sizes = dict[str, int]  # devices along each of AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """HGX H200 boards of eight, joined by one 400 Gb/s InfiniBand port for each device.

    memory_bytes     of a device, as XLA's description of an H200 has it (targets/h200.txtpb)
    usable           share of it for a program's buffers; an assumption. The rest is CUDA's context,
                     NCCL's buffers, CUDA graphs, what the allocator loses between buffers
    nvlink_bytes_s   one way, as NCCL reaches it: 370 of 450 GB/s (github.com/NVIDIA/nccl-tests,
                     issue 212, words of NCCL's maintainer)
    sharp_bytes_s    the same for an all-reduce of a whole node, which the switches sum: "bus
                     bandwidth" of 480 GB/s (the same place); 475 seen on H200s (its issue 272)
    network_bytes_s  of a device's own port: 47 of 50 GB/s (its issue 290: 46 to 48)
    """

    device: cost.Device = cost.H200
    memory_bytes: int = 150_754_820_096
    usable: float = 0.92
    node: int = 8
    nvlink_bytes_s: float = 370e9
    sharp_bytes_s: float = 480e9
    network_bytes_s: float = 47e9

    @property
    def budget_bytes(self) -> int:
        return int(self.usable * self.memory_bytes)


H200_NODES = Cluster()


class _Protocol(NamedTuple):
    """One of NCCL's ways to send; its own model of them (NCCL 2.19, src/graph/tuning.cc), µs.

    share  of the links' bandwidth that it reaches
    """

    share: float
    base_us: float
    nvlink_us: float  # a step of a ring, or a level of a tree, inside a node
    ring_us: float  # a step between nodes
    tree_us: float  # a level between nodes


_PROTOCOLS = (
    _Protocol(0.25, 6.6, 0.6, 2.7, 5.0),  # LL: a flag beside every four bytes
    _Protocol(0.92, 14.0, 1.9, 4.0, 8.5),  # LL128
    _Protocol(1.0, 8.4, 3.4, 14.0, 28.0),  # Simple
)
_SHARP_US = 25.0  # NVLS, a whole node


class Group(NamedTuple):
    """n devices that take part together: g of each node, m nodes."""

    n: int
    g: int
    m: int


def group(axes: tuple[str, ...], sizes: Sizes, cluster: Cluster = H200_NODES) -> Group:
    """The devices that differ along `axes` alone: all groups are alike, device 0's is counted.

    A mesh numbers its devices with its last axis fastest.
    """
    return _group(axes, tuple(sizes[axis] for axis in AXES), cluster.node)


@functools.cache
def _group(axes: tuple[str, ...], sizes: tuple[int, ...], node: int) -> Group:
    strides = {axis: math.prod(sizes[i + 1 :]) for i, axis in enumerate(AXES)}
    members = np.zeros(1, int)
    for axis in axes:
        offsets = np.arange(sizes[AXES.index(axis)]) * strides[axis]
        members = (members[:, None] + offsets).ravel()
    nodes, counts = np.unique(members // node, return_counts=True)
    return Group(len(members), int(counts[0]), len(nodes))


def wire_bytes(kind: str, size: float | int, n: int) -> float:
    """Bytes that each device sends, as a ring sends them (NCCL's "bus" bytes).

        all-gather, reduce-scatter, all-to-all   S·(n − 1)/n
        all-reduce                               2·S·(n − 1)/n

    size  S of one device: the result of an all-gather, the operand of the others
    """
    return (2 if kind == "all-reduce" else 1) * size * (n - 1) / n


class Taken(NamedTuple):
    """Seconds of a collective: in all; of them what the links' bandwidth takes, rest is latency."""

    seconds: float
    wire_seconds: float
    network: bool  # whether the slowest link is between nodes


def taken(kind: str, size: float | int, members: Group, cluster: Cluster = H200_NODES) -> Taken:
    """Of NCCL's protocols the fastest: latency + the slower of its two kinds of link.

    latency = base + (steps − crossings)·nvlink + crossings·network
    ring:  steps n − 1 and crossings m − 1 of them, twice for an all-reduce
    tree:  of an all-reduce, 2·((g − 1)·nvlink + ⌈log₂ m⌉·network)
    links = max(wire/nvlink, wire/(g·network))    a ring leaves a node through g ports
    """
    n, g, m = members
    if n == 1 or size == 0:
        return Taken(0.0, 0.0, False)
    wire = wire_bytes(kind, size, n)
    inside = wire / cluster.nvlink_bytes_s if g > 1 else 0.0
    # Every pair of an all-to-all has bytes of its own: those for other nodes leave by the own port.
    leaving = size * (n - g) / n if kind == "all-to-all" else wire / g
    outside = leaving / cluster.network_bytes_s if m > 1 else 0.0
    rounds = 2 if kind == "all-reduce" else 1
    options = []
    for each in _PROTOCOLS:
        ring = rounds * ((n - m) * each.nvlink_us + (m - 1) * each.ring_us)
        tree = 2 * ((g - 1) * each.nvlink_us + math.ceil(math.log2(m)) * each.tree_us)
        steps = min(ring, tree) if kind == "all-reduce" else ring
        links = max(inside, outside) / each.share
        options.append((1e-6 * (each.base_us + steps) + links, links))
    if kind == "all-reduce" and g == n == cluster.node:
        links = wire / cluster.sharp_bytes_s
        options.append((1e-6 * _SHARP_US + links, links))
    return Taken(*min(options), network=outside > inside)
