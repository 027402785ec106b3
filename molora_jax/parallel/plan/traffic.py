"""What the devices exchange in a step: every collective, its axis, bytes and seconds.

Letters as in `compute.py`. Sizes are of one device: an all-gather's result, the operand of the
others. What each is for, by the design of `molora_jax.parallel.local`:

    base weights     all-gather over fsdp of every projection before its use: 2·D·F/t bytes, once a
                     forward pass, so again where the backward pass computes a layer again
    adapters         the same of their A and B
    row-split sums   all-reduce over tensor after o and down, of 2·n·D bytes. In training positions
                     are split over tensor between projections: a reduce-scatter, and an all-gather
                     before (q, k, v) and (gate, up), with the like for the gradients
    embedding        ids over fsdp (all-gather), rows over tensor (all-reduce of 2·n·f·D/f) and over
                     fsdp (all-to-all of as many)
    head             all-gather over fsdp: 2·V·D/t
    slots            tokens of each projection's input to all slots (all-gather), partial deltas
                     back (reduce-scatter)
    gradients        all-reduce of adapters' and router's over the axes that tokens are split over;
                     of A of column-split and B of row-split ones over tensor too
"""

import dataclasses
import math

from molora_jax.models.config import ModelConfig
from molora_jax.parallel.plan.cluster import Cluster, Sizes, group, taken, wire_bytes
from molora_jax.parallel.plan.compute import (
    FLOAT,
    TOGETHER,
    local_tokens,
    split_widths,
    splits_sequence,
)
from molora_jax.parallel.plan.workload import ITEM, Workload
from molora_jax.parallel.rules import ROW_SPLIT, TOKENS


@dataclasses.dataclass(frozen=True)
class Exchange:
    """`times` collectives of `size` bytes a step, on every device.

    wire  bytes a step that a device sends; seconds of all of them, `wire_seconds` for bandwidth
    """

    what: str
    kind: str  # "all-gather", "all-reduce", "reduce-scatter", "all-to-all"
    axes: tuple[str, ...]
    size: float
    times: int
    wire: float
    seconds: float
    wire_seconds: float
    network: bool  # slowest between nodes

    @property
    def limit(self) -> str:
        if self.wire_seconds < self.seconds / 2:
            return "latency of collectives"
        return "network" if self.network else "NVLink"


def exchanges(
    config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster
) -> list[Exchange]:
    """All of a step; none where no axis has two devices."""
    n, t, f = local_tokens(work, sizes), sizes["tensor"], sizes["fsdp"]
    L, D, K, R = config.num_layers, config.hidden_size, work.num_adapters, work.rank
    train = work.kind == "train"
    forward = 2 if train else 1
    found: list[Exchange] = []

    def add(what, kind, axes, size, times):
        axes = tuple(
            axis for axis in ([axes] if isinstance(axes, str) else axes) if sizes[axis] > 1
        )
        if not axes:
            return
        members = group(axes, sizes, cluster)
        one = taken(kind, size, members, cluster)
        wire = times * wire_bytes(kind, size, members.n)
        found.append(
            Exchange(what, kind, axes, float(size), times, wire, times * one.seconds,
                     times * one.wire_seconds, one.network)
        )  # fmt: skip

    item = FLOAT if train else ITEM  # of an adapter's number
    own = item * K / sizes["slots"] * R
    widths = {name: split_widths(config, name, t) for name in config.projection_sizes()}
    for names in TOGETHER:  # XLA joins the gathers of what is used together
        said = "+".join(name.removesuffix("_proj") for name in names)
        weights = sum(math.prod(widths[name]) for name in names)
        add(f"{said}: weights", "all-gather", "fsdp", ITEM * weights, forward * L)
        adapters = own * sum(sum(widths[name]) for name in names)
        add(f"{said}: adapters", "all-gather", "fsdp", adapters, forward * L)
    rows = ITEM * n * D
    # Positions lie split over tensor between the projections: a sum is scattered, an input gathered
    # and in the backward pass the reverse, an input's gradient summed whole. The second forward
    # pass leaves out the layer's last sum.
    if splits_sequence(work, sizes):
        add("layer inputs", "all-gather", "tensor", rows, 2 * (forward + 1) * L)
        add("o, down: sums", "reduce-scatter", "tensor", rows, (2 * forward - 1) * L)
        add("inputs' gradients", "all-reduce", "tensor", rows, 2 * L)
        add("router: gates' gradients", "all-reduce", "tensor", FLOAT * n * K, L)
    else:
        add("o, down: sums", "all-reduce", "tensor", rows, 2 * L if not train else 3 * L)
        if train:
            add("inputs' gradients", "all-reduce", "tensor", rows, 2 * L)
    add("embedding: ids", "all-gather", "fsdp", 4 * n * f, 1)
    summed = "reduce-scatter" if splits_sequence(work, sizes) else "all-reduce"
    add("embedding: rows", summed, "tensor", rows, 1)
    here = rows / t if splits_sequence(work, sizes) else rows
    add("embedding: rows", "all-to-all", "fsdp", here, 1)
    if splits_sequence(work, sizes):
        add("last hidden", "all-gather", "tensor", rows, 1)
    add("head", "all-gather", "fsdp", ITEM * config.vocab_size * D / t, forward)
    if train:
        add("logits: sums", "all-reduce", "tensor", FLOAT * n, 3)
        add("hidden: gradient", "all-reduce", "tensor", rows, 1)
        add("router: logits of all", "all-gather", TOKENS, FLOAT * K * work.tokens * L, 1)

    # What goes out in a forward pass comes in in the backward one, and the reverse.
    back = 1 if train else 0
    everywhere = n * sizes["slots"]
    for names in TOGETHER:
        said = "+".join(name.removesuffix("_proj") for name in names)
        inputs = ITEM * everywhere * widths[names[0]][0]
        outputs = ITEM * everywhere * sum(widths[name][1] for name in names)
        add(f"{said}: inputs", "all-gather", "slots", inputs, forward * L)
        add(f"{said}: deltas", "reduce-scatter", "slots", outputs, forward * L)
        add(f"{said}: gradients", "all-gather", "slots", outputs, back * L)
        add(f"{said}: gradients", "reduce-scatter", "slots", inputs, back * L)
    if train:
        over = ("data", "fsdp", *(() if sizes["slots"] > 1 else ("slots",)))
        split = sum(a if name in ROW_SPLIT else b for name, (a, b) in widths.items())
        whole = sum(b if name in ROW_SPLIT else a for name, (a, b) in widths.items())
        add("adapters' gradients, split over tensor", "all-reduce", over, own * split, L)
        add("adapters' gradients, whole", "all-reduce", (*over, "tensor"), own * whole, L)
        router = L * 64 * (D + K) * FLOAT
        add("router's gradient", "all-reduce", TOKENS, router, 1)
    return found


def by_kind(found: list[Exchange]) -> dict[tuple[str, tuple[str, ...]], list[Exchange]]:
    """The exchanges of each (kind, axes), in the order of their seconds."""
    groups: dict[tuple[str, tuple[str, ...]], list[Exchange]] = {}
    for each in found:
        groups.setdefault((each.kind, each.axes), []).append(each)
    return dict(sorted(groups.items(), key=lambda item: -math.fsum(e.seconds for e in item[1])))
