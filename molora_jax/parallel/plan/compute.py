"""What one device computes in a step: products, bytes of its memory, launches, and seconds of each.

Letters beyond the table of design.md: n = B·S/(data·fsdp·slots) tokens of a device (B·1 in
decoding), t devices along tensor, f along fsdp, s along slots, P weights of a layer's projections.
A part takes

    max(products / rate, bytes / bandwidth) + launches · launch_s

Bytes move while products are formed, and parts follow one another.
"""

import dataclasses
import functools
import math

from molora_jax.models.config import ModelConfig
from molora_jax.parallel import rules
from molora_jax.parallel.plan.cluster import Cluster, Sizes
from molora_jax.parallel.plan.workload import ITEM, Workload, held_bytes
from molora_jax.parallel.rules import ROW_SPLIT, TOKENS
from pallas_kernels import cost
from pallas_kernels.shapes import ProblemSize

# Steps of the launch sequence as XLA compiles the decoder for an H200, without the deltas' and the
# router's: of a layer (in training forward, forward again and backward), more of one whose weights
# are gathered (slices, turned copies), and around the layers.
LAUNCHES = {"decode": 31, "train": 360}
GATHERING = {"decode": 60, "train": 40}
AROUND = {"decode": 10, "train": 420}
FLOAT = 4  # bytes of a float32
# Projections of the same input share one pass over it.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@dataclasses.dataclass(frozen=True)
class Part:
    """Of one device and step: products (a multiply-add counts two), bytes, launches, seconds."""

    name: str
    products: float
    bytes: float
    launches: float
    seconds: float
    limit: str  # "compute", "HBM bandwidth" or "launches": the largest of the three


def part(
    name: str,
    cluster: Cluster,
    *,
    products: float | int = 0,
    exact: bool = False,
    bytes: float | int = 0,
    launches: int = 0,
) -> Part:
    """The part with its seconds; `exact` products are of float32."""
    device = cluster.device
    terms = {
        "compute": products / (device.exact_products_per_s if exact else device.products_per_s),
        "HBM bandwidth": bytes / device.bytes_per_s,
        "launches": launches * device.launch_s,
    }
    seconds = max(terms["compute"], terms["HBM bandwidth"]) + terms["launches"]
    limit = max(terms, key=terms.__getitem__)
    return Part(name, float(products), float(bytes), float(launches), float(seconds), limit)


def local_tokens(work: Workload, sizes: Sizes) -> int:
    """n."""
    return work.tokens // rules.axis_size(TOKENS, sizes)


def parts(config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster) -> list[Part]:
    """Everything but what is exchanged."""
    compute = (_projections, _attention, _deltas, _router, _logits, _rest)
    found = [each(config, work, sizes, cluster) for each in compute]
    if work.kind == "train":
        found.append(_update(config, work, sizes, cluster))
    return found


def _passes(work: Workload) -> tuple[int, int]:
    """Times that a layer is computed forward (again in the backward pass), and backward."""
    return (1, 0) if work.kind == "decode" else (2, 1)


def _projections(config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster) -> Part:
    """Forward and, of a frozen base, the gradient of the input alone: 2·n·P products a pass.

    A pass reads P/t weights. Where they are gathered it reads P/(t·f) and writes P/t before; in
    training, where a loop over layers slices them off their stack, it reads and writes them once
    more. It reads inputs and writes outputs, n·(D + F) numbers a projection.
    """
    n, t, f = local_tokens(work, sizes), sizes["tensor"], sizes["fsdp"]
    widths = [split_widths(config, name, t) for name in config.projection_sizes()]
    weights = layer_weights(config) / t
    moved = weights * (1 if f == 1 else 2 + 1 / f)
    if work.kind == "train":
        moved += 2 * weights / f
    rows = n * sum(D + F for D, F in widths)
    passes = sum(_passes(work)) * config.num_layers
    return part(
        "projections",
        cluster,
        products=passes * 2 * n * weights,
        bytes=passes * ITEM * (moved + rows),
    )


def _attention(config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster) -> Part:
    """Scores against all T slots of the cache (in training all S keys), hidden ones included.

    4·n·T·H/t·Dh products forward, twice that backward. In decoding the cache is read; scores are
    kept whole, (B, H/t, S, T), written and read in float32, and once more as bfloat16 weights.
    """
    n, T = local_tokens(work, sizes), work.length
    heads, kv = config.num_heads / sizes["tensor"], config.num_kv_heads / sizes["tensor"]
    forward, backward = _passes(work)
    products = 4 * n * T * heads * config.head_dim * (forward + 2 * backward)
    scores = n * heads * T * (2 * FLOAT + 2 * ITEM) * (forward + 2 * backward)
    rows = n if work.kind == "decode" else n / work.length
    keys = 2 * rows * kv * T * config.head_dim * ITEM * (forward + 2 * backward)
    return part(
        "attention", cluster,
        products=config.num_layers * products, bytes=config.num_layers * (scores + keys),
    )  # fmt: skip


def _deltas(config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster) -> Part:
    """The routed deltas by the path that `pallas_kernels.cost` chooses, each projection by itself.

    Their backward pass is charged as two forward ones (the inputs' and the adapters' gradients),
    and adapters in training as bfloat16, though they are float32.
    """
    n = local_tokens(work, sizes) * sizes["slots"]
    slots = work.num_adapters // sizes["slots"]
    # Of a split bank each device has the entries of its own slots.
    top_k = max(1, min(work.top_k, slots, round(work.top_k / sizes["slots"])))
    total = {"products": 0.0, "bytes": 0.0, "launches": 0.0, "seconds": 0.0}
    for name in config.projection_sizes():
        D, F = split_widths(config, name, sizes["tensor"])
        size = ProblemSize(
            num_tokens=n, d_in=D, d_out=F, rank=work.rank, num_slots=slots, top_k=top_k
        )
        found = _delta(size, cluster.device)
        for key in total:
            total[key] += getattr(found, key)
    forward, backward = _passes(work)
    times = config.num_layers * (forward + 2 * backward)
    total = {key: times * value for key, value in total.items()}
    device = cluster.device
    limits = {
        "compute": total["products"] / device.products_per_s,
        "HBM bandwidth": total["bytes"] / device.bytes_per_s,
        "launches": total["launches"] * device.launch_s,
    }
    return Part("deltas", **total, limit=max(limits, key=limits.__getitem__))


@functools.lru_cache(maxsize=4096)
def _delta(size: ProblemSize, device: cost.Device) -> cost.Estimate:
    return cost.estimate(cost.choose(size, device), size, device)


def _router(config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster) -> Part:
    """A decision in every layer: n·(D·64 + 64·K) multiply-adds in float32, weights read once."""
    n, width = local_tokens(work, sizes), 64
    weights = width * (config.hidden_size + work.num_adapters)
    forward, backward = _passes(work)
    times = config.num_layers * (forward + 2 * backward)
    return part(
        "router", cluster, products=times * 2 * n * weights, exact=True,
        bytes=times * FLOAT * (weights + n * (config.hidden_size + 2 * work.num_adapters)),
        launches=(forward + backward) * config.num_layers * 6,
    )  # fmt: skip


def _logits(config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster) -> Part:
    """n·D·V/t multiply-adds, in training once more for the input's gradient; the head is read.

    Logits are written and read, in training their gradient too.
    """
    n, D = local_tokens(work, sizes), config.hidden_size
    V, f = config.vocab_size / sizes["tensor"], sizes["fsdp"]
    passes = 1 if work.kind == "decode" else 2
    head = V * D * (1 if f == 1 else 2 + 1 / f)
    moved = passes * (ITEM * head + n * V * (2 * ITEM + FLOAT) + ITEM * n * D)
    return part("logits", cluster, products=passes * 2 * n * D * V, bytes=moved)


def _rest(config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster) -> Part:
    """Norms, rotations, residual sums, SiLU: about 12 times n·D and 4 times n·F/t numbers a layer.

    All launches of the layers that the other parts do not count are here.
    """
    n, L = local_tokens(work, sizes), config.num_layers
    numbers = n * (12 * config.hidden_size + 4 * config.intermediate_size / sizes["tensor"])
    passes = sum(_passes(work)) + _passes(work)[1]
    of_layer = LAUNCHES[work.kind] + (GATHERING[work.kind] if sizes["fsdp"] > 1 else 0)
    return part(
        "norms, launches", cluster, bytes=passes * L * ITEM * numbers,
        launches=L * of_layer + AROUND[work.kind],
    )  # fmt: skip


def _update(config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster) -> Part:
    """AdamW reads parameter, gradient and two moments and writes three of them: 28 bytes each.

    The bank that the forward pass reads is stacked of the trained arrays, a read and a write.
    """
    trained = held_bytes(config, work, sizes)["trained"]
    return part("update", cluster, bytes=trained * (7 + 4))


def layer_weights(config: ModelConfig) -> int:
    """P: numbers in the seven projections of a layer."""
    return sum(math.prod(widths) for widths in config.projection_sizes().values())


def splits_sequence(work: Workload, sizes: Sizes) -> bool:
    """Whether positions lie split over tensor between projections: in training, if it divides S."""
    return work.kind == "train" and work.length % sizes["tensor"] == 0


def split_widths(config: ModelConfig, name: str, t: int) -> tuple[int, int]:
    """Input and output width of a projection on one device of t along tensor."""
    d_in, d_out = config.projection_sizes()[name]
    return (d_in // t, d_out) if name in ROW_SPLIT else (d_in, d_out // t)
