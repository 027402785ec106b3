"""Bytes of one device: what lies there between steps, by the sharding rules, and what a step needs.

Letters as in `compute.py`.
"""

import dataclasses

from molora_jax.models.config import ModelConfig
from molora_jax.parallel.plan.cluster import H200_NODES, Cluster, Sizes
from molora_jax.parallel.plan.compute import (
    FLOAT,
    layer_weights,
    local_tokens,
    split_widths,
    splits_sequence,
)
from molora_jax.parallel.plan.workload import ITEM, Workload, held_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    held      by part, between steps: base, bank or trained and optimiser, router, cache
    passing   by part, within a step: see `passing_bytes`
    """

    held: dict[str, int]
    passing: dict[str, int]

    @property
    def peak(self) -> int:
        """All that is held, and what is there with it when most is: while a layer is computed (in
        training backward), or around the logits. In decoding XLA gathers the head before."""
        passing = dict(self.passing)
        head = passing.pop("gathered head"), passing.pop("logits")
        saved = passing.pop("saved inputs", None)
        routed = passing.pop("router logits", 0)
        if saved is None:
            layer = passing.pop("gathered layer") + head[0]
            return sum(self.held.values()) + layer + max(head[1], *passing.values())
        return sum(self.held.values()) + saved + max(sum(head) + routed, sum(passing.values()))


def memory(config: ModelConfig, work: Workload, sizes: Sizes) -> Memory:
    """Of one device."""
    return Memory(held_bytes(config, work, sizes), passing_bytes(config, work, sizes))


def passing_bytes(config: ModelConfig, work: Workload, sizes: Sizes) -> dict[str, int]:
    """What one step needs beside what is held.

        gathered layer   2·P/t bytes and the adapters beside them, where f > 1
        gathered head    2·D·V/t, where f > 1
        saved inputs     2·n·D·L (divided by t, where it divides S): of every layer, as the backward
                         pass computes it again
        router logits    4·K·N·L: of all tokens on every device, for the balance loss
        gradients        of what is trained, float32, and the stacked bank that the pass reads
        activations      of one layer (`_layer_bytes`)
        logits           n·V/t numbers as bfloat16 and float32; in training, where a fusion takes
                         the float32, as bfloat16 twice, with their gradient

    The constants are those of XLA's buffers for Qwen3-4B on eight devices, which `compiled.py`
    compares for others.
    """
    n, t = local_tokens(work, sizes), sizes["tensor"]
    train = work.kind == "train"
    gathered = head = 0
    if sizes["fsdp"] > 1:
        numbers = work.num_adapters // sizes["slots"] * work.rank * _widths(config, t)
        gathered = ITEM * layer_weights(config) // t + (FLOAT if train else ITEM) * numbers
        head = ITEM * config.hidden_size * config.vocab_size // t
    found = {
        "gathered layer": gathered,
        "activations": _layer_bytes(config, work, sizes),
        "gathered head": head,
        "logits": n * config.vocab_size // t * (2 * ITEM if train else ITEM + FLOAT),
    }
    if train:
        parts = t if splits_sequence(work, sizes) else 1
        found["saved inputs"] = ITEM * n * config.hidden_size * config.num_layers // parts
        # The balance loss asks for the choices of all tokens, in every layer.
        found["router logits"] = FLOAT * work.num_adapters * work.tokens * config.num_layers
        found["gradients"] = 2 * held_bytes(config, work, sizes)["trained"]
    return found


def _layer_bytes(config: ModelConfig, work: Workload, sizes: Sizes) -> int:
    """Activations of one layer, h = H/t heads.

    Decoding: scores (n, h, T), float32 and bfloat16, and the inputs and outputs of projections.
    Training, forward again and backward: two float32 and a bfloat16 array of scores (n, h, S) and
    a mask of them; the inputs and outputs of all projections with their gradients.
    """
    n, t = local_tokens(work, sizes), sizes["tensor"]
    scores = n * (config.num_heads // t) * work.length
    rows = ITEM * n * _widths(config, t)
    if work.kind == "decode":
        return scores * (FLOAT + ITEM) + rows
    return scores * (2 * FLOAT + ITEM + 1) + 2 * rows


def _widths(config: ModelConfig, t: int) -> int:
    """Inputs and outputs of the seven projections on a device."""
    return sum(sum(split_widths(config, name, t)) for name in config.projection_sizes())


def slots_that_fit(
    config: ModelConfig, work: Workload, sizes: Sizes, cluster: Cluster = H200_NODES
) -> int:
    """The largest K with which the step fits, a multiple of the devices along slots; 0 for none.

    The peak is convex in K and made of straight pieces, so Newton's steps end after a few.
    """
    step = sizes["slots"]

    def peak(K: int) -> int:
        return memory(config, dataclasses.replace(work, num_adapters=K, top_k=1), sizes).peak

    K = max(work.num_adapters // step * step, step)
    while True:
        here, next_one = peak(K), peak(K + step)
        if here <= cluster.budget_bytes < next_one:
            return K
        steps = (cluster.budget_bytes - here) // (next_one - here)
        if steps < 0 and step == K:
            return 0
        K = max(K + steps * step, step)
