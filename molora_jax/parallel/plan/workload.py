"""What a plan is asked for: a model, one step of decoding or of training, and its sizes."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from molora_jax.adapters.names import PROJECTIONS
from molora_jax.adapters.slot_format import SlotFormat, zeros
from molora_jax.adapters.stack import AdapterStack
from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder, KVCache
from molora_jax.models.weights import array_shapes
from molora_jax.parallel import rules
from molora_jax.parallel.plan.cluster import Sizes
from molora_jax.routing import LearnedRouter

KINDS = ("decode", "train")
ITEM = 2  # bytes of a number of the base, the bank, the cache and activations: bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One step, over all devices.

    kind          decode: a token for each of `batch` rows, `length` slots of cache a row.
                  train: forward, backward and update of `num_adapters` adapters and their router
                  on `batch` rows of `length` tokens; the base is frozen
    num_adapters  K slots of rank R = `rank`, on all seven projections
    top_k         adapters a token
    """

    kind: str
    batch: int
    length: int
    num_adapters: int
    rank: int
    top_k: int

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; expected {' or '.join(KINDS)}")
        for name in ("batch", "length", "num_adapters", "rank", "top_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ValueError(f"{name} is {value!r}; expected an integer from 1 to {2**31 - 1}")
        if self.top_k > self.num_adapters:
            raise ValueError(
                f"top_k is {self.top_k}; expected at most num_adapters {self.num_adapters}"
            )

    @property
    def tokens(self) -> int:
        """N that a step reads."""
        return self.batch if self.kind == "decode" else self.batch * self.length

    def check_length(self, config: ModelConfig) -> None:
        if self.length > config.max_positions:
            raise ValueError(
                f"length is {self.length}; expected at most {config.max_positions}, the model's "
                "context"
            )


def trees(config: ModelConfig, work: Workload) -> dict[str, Any]:
    """The arrays of a step by part, as shapes: the project's own types, so the rules apply to them.

    trained and optimiser are float32; so is the router, always.
    """
    made = {"base": base(config)}
    router = nnx.eval_shape(
        lambda: LearnedRouter(
            config.hidden_size, work.num_adapters, top_k=work.top_k,
            num_layers=config.num_layers, rngs=nnx.Rngs(0),
        )
    )  # fmt: skip
    if work.kind == "decode":
        bank = stacks(config, work.num_adapters, work.rank)
        return made | {"bank": bank, "router": router, "cache": cache(config, work)}
    one = jax.eval_shape(lambda: _trained(config, work))
    trained = {"adapters": one, "router": nnx.to_pure_dict(nnx.state(router))}
    return made | {"router": router, "trained": trained, "optimiser": (trained, trained)}


def base(config: ModelConfig) -> Decoder:
    """Shapes of the base model, its layers stacked."""
    shapes = array_shapes(config).items()
    return jax.eval_shape(
        lambda: Decoder(config, {name: jnp.zeros(shape, "bfloat16") for name, shape in shapes})
    )


def stacks(config: ModelConfig, num_slots: int, rank: int) -> dict[str, AdapterStack]:
    """Shapes of the bank's, on all projections."""
    slots = SlotFormat.of(
        config,  # type: ignore[arg-type]  # frozen, which the protocol does not foresee
        max_rank=rank,
        projections=PROJECTIONS,
        dtype="bfloat16",
    )
    return jax.eval_shape(
        lambda: {name: zeros(slots.layout(name, num_slots)) for name in PROJECTIONS}
    )


def _trained(config: ModelConfig, work: Workload) -> dict[str, Any]:
    """K adapters in training, whose leaves here have a leading K where each has its own array."""
    L, K, R = config.num_layers, work.num_adapters, work.rank
    sizes = config.projection_sizes().items()
    return {
        "lora_a": {name: jnp.zeros((K, L, R, D)) for name, (D, _) in sizes},
        "lora_b": {name: jnp.zeros((K, L, R, F)) for name, (_, F) in sizes},
    }


def cache(config: ModelConfig, work: Workload) -> KVCache:
    """Shapes of a cache of `length` slots a row."""
    rows, slots = work.batch, work.length

    def make():
        shape = (rows, config.num_kv_heads, slots, config.head_dim)
        layers = (jnp.zeros(shape, jnp.bfloat16),) * config.num_layers
        return KVCache(layers, layers, jnp.zeros((rows, slots), bool), jnp.zeros(rows, jnp.int32))

    return jax.eval_shape(make)


@functools.cache
def leaves(config: ModelConfig, work: Workload) -> dict[str, list[tuple]]:
    """Of every part, (axes of its rule, shape, bytes of a number, arrays that are alike)."""
    found: dict[str, dict[tuple, int]] = {}
    for part, tree in trees(config, work).items():
        alike = found.setdefault(part, {})
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            axes = rules.rule_of(f"{part}/{name}").axes
            key = (axes, leaf.shape, np.dtype(leaf.dtype).itemsize)
            alike[key] = alike.get(key, 0) + 1
    return {part: [(*key, n) for key, n in alike.items()] for part, alike in found.items()}


def held_bytes(config: ModelConfig, work: Workload, sizes: Sizes) -> dict[str, int]:
    """Bytes of one device by part, of what lies there between steps, split by the rules."""
    return {
        part: sum(count * item * _local(axes, shape, sizes) for axes, shape, item, count in each)
        for part, each in leaves(config, work).items()
    }


def _local(axes: tuple, shape: tuple[int, ...], sizes: Sizes) -> int:
    """Elements of one device."""
    spec = rules.fitting(axes, shape, sizes)
    parts = math.prod(rules.axis_size(axis, sizes) for axis in spec if axis)
    return math.prod(shape) // parts
