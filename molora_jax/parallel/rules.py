"""How every array is split over the mesh: one table, by the name of the array.

Tokens (rows of a batch) are split over data, fsdp and slots together. A projection is split over
tensor along its outputs (column-split: q, k, v, gate, up) or its inputs (row-split: o, down), as in
Megatron-LM (arXiv 1909.08053); its adapters follow it: of a column-split one A stays whole and B is
split, of a row-split one A is split and B stays whole, so that the delta's sum over tensor is taken
once, together with the base's. What is split over fsdp lies so and is gathered when it is used. The
axis slots splits the adapter bank: tokens go to the slots, and not the weights to the tokens.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor", "slots")
TOKENS = ("data", "fsdp", "slots")  # what the rows of a batch are split over
COLUMN_SPLIT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_SPLIT = ("o_proj", "down_proj")

Entry = str | tuple[str, ...] | None  # of a partition: what one axis of an array is split over

_COLUMN, _ROW = (f"({'|'.join(names)})" for names in (COLUMN_SPLIT, ROW_SPLIT))
_BOTH = ("tensor", "fsdp")  # a device's part of tensor, once it is gathered over fsdp


@dataclass(frozen=True)
class Rule:
    """Arrays whose path matches `pattern` are split so along their last axes, and no other."""

    what: str
    pattern: str
    axes: tuple[Entry, ...]


RULES = (
    Rule("embedding, lm_head (V, D)", r"(embedding|embed_tokens|lm_head)", ("tensor", "fsdp")),
    Rule("column-split weight (F, D)", rf"{_COLUMN}[/.]weight", ("tensor", "fsdp")),
    Rule("column-split bias (F,)", rf"{_COLUMN}[/.]bias", ("tensor",)),
    Rule("row-split weight (F, D)", rf"{_ROW}[/.]weight", ("fsdp", "tensor")),
    Rule("bank, column-split lora_a (K, R, D)", rf"{_COLUMN}/lora_a", ("slots", None, "fsdp")),
    Rule("bank, column-split lora_b (K, R, F)", rf"{_COLUMN}/lora_b", ("slots", None, _BOTH)),
    Rule("bank, row-split lora_a (K, R, D)", rf"{_ROW}/lora_a", ("slots", None, _BOTH)),
    Rule("bank, row-split lora_b (K, R, F)", rf"{_ROW}/lora_b", ("slots", None, "fsdp")),
    Rule("bank, ranks (K,)", r"/ranks", ("slots",)),
    Rule("in training, column-split A (r, D)", rf"lora_a/{_COLUMN}", (None, "fsdp")),
    Rule("in training, column-split B (r, F)", rf"lora_b/{_COLUMN}", (None, _BOTH)),
    Rule("in training, row-split A (r, D)", rf"lora_a/{_ROW}", (None, _BOTH)),
    Rule("in training, row-split B (r, F)", rf"lora_b/{_ROW}", (None, "fsdp")),
    Rule("KV cache (B, Hk, T, Dh)", r"cache/(keys|values)/", (TOKENS, "tensor", None, None)),
    Rule("KV cache, filled (B, T)", r"cache/filled", (TOKENS, None)),
    Rule("KV cache, next_slot (B,)", r"cache/next_slot", (TOKENS,)),
)
WHOLE = Rule("norms, router, all else", "", ())


def activations(
    config: Any, B: int, S: int
) -> list[tuple[str, tuple[Entry, ...], tuple[int, ...]]]:
    """(what, split, shape) of what one pass over B rows of S tokens makes, the decoder's own rules.

    The residual stream lies split along the sequence where tensor divides S.
    """
    c = config
    heads = TOKENS, None, "tensor", None
    return [
        ("residual stream (B, S, D)", (TOKENS, "tensor", None), (B, S, c.hidden_size)),
        ("queries (B, S, H, Dh)", heads, (B, S, c.num_heads, c.head_dim)),
        ("keys, values (B, S, Hk, Dh)", heads, (B, S, 2 * c.num_kv_heads, c.head_dim)),
        ("inside the MLP (B, S, F)", (TOKENS, None, "tensor"), (B, S, 2 * c.intermediate_size)),
        ("router's decision (N, k)", (TOKENS, None), (B * S, 1)),
        ("logits (B, S, V)", (TOKENS, None, "tensor"), (B, S, c.vocab_size)),
    ]


class RowData(nnx.Variable):
    """What a router holds of each row or token of one batch; split as the batch is.

    `rows` in its metadata is the axis, counted from the end (−1 of (B,), −2 of (B, S)), so that it
    still holds where a layer's slice is taken.
    """


def rule_of(path: str) -> Rule:
    """The rule of the array at a path such as "layers/q_proj/weight"."""
    return next((rule for rule in RULES if re.search(rule.pattern, path)), WHOLE)


def specs(tree: Any, sizes: Mapping[str, int], *, split_rows: bool = True) -> list[P]:
    """The partition of every leaf of a pytree, in order, on a mesh with axes of these sizes.

    split_rows  whether the batch is split, or whole on every device
    """
    found = []
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda n: isinstance(n, RowData))
    for path, leaf in nodes:
        axes: Sequence
        if isinstance(leaf, RowData):
            axes = TOKENS, *[None] * (-leaf.get_metadata()["rows"] - 1)
        else:
            axes = rule_of(jax.tree_util.keystr(path, simple=True, separator="/")).axes
        kept = [None if axis == TOKENS and not split_rows else axis for axis in axes]
        found.append(fitting(kept, leaf.shape, sizes))
    return found


def fitting(axes: Sequence, shape: Sequence[int], sizes: Mapping[str, int]) -> P:
    """`axes` along the last axes of `shape`, less those that do not divide them, or split nothing.

    Sizes that a mesh has to divide are refused before (`check_fits`). Left are an adapter that is
    trained by itself, which is no bank to split, and batches of one row. Along an axis of one
    device nothing is split, so that no exchange is written for it either.
    """
    padded = [None] * (len(shape) - len(axes)) + [real(axis, sizes) for axis in axes]
    kept = [
        axis if axis is None or size % axis_size(axis, sizes) == 0 else None
        for axis, size in zip(padded, shape, strict=True)
    ]
    while kept and kept[-1] is None:
        kept.pop()
    return P(*kept)


def real(axis: Entry, sizes: Mapping[str, int]) -> Entry:
    """An entry of a partition without the axes of one device."""
    if axis is None or isinstance(axis, str):
        return axis if axis is not None and sizes[axis] > 1 else None
    return tuple(each for each in axis if sizes[each] > 1) or None


def axis_size(axis: str | Sequence[str], sizes: Mapping[str, int]) -> int:
    """Devices along a mesh axis, or along several together."""
    return math.prod(sizes[each] for each in ([axis] if isinstance(axis, str) else axis))


def check_fits(config: Any, sizes: Mapping[str, int]) -> None:
    """Raises ValueError where a model cannot be split over axes of these sizes, naming what could.

    config  a ModelConfig
    """
    counts = {
        "num_heads (H)": config.num_heads,
        "num_kv_heads (Hk)": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    outputs = {f"outputs of {name}": F for name, (_, F) in config.projection_sizes().items()}
    for axes, needed in {
        ("tensor",): counts,
        ("fsdp",): {"hidden_size (D)": config.hidden_size},
        _BOTH: outputs,
    }.items():
        count = axis_size(axes, sizes)
        if wrong := [f"{name} {size}" for name, size in needed.items() if size % count]:
            common = math.gcd(*needed.values())
            possible = [str(n) for n in range(1, min(common, 64) + 1) if common % n == 0]
            raise ValueError(
                f"mesh axis {' × '.join(axes)} = {count} does not divide {' and '.join(wrong)} of "
                f"this base: choose {' × '.join(axes)} = {' or '.join(possible)}"
            )


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The tree with a NamedSharding in place of every leaf."""
    found = specs(tree, mesh.shape)
    return jax.tree.unflatten(
        jax.tree.structure(tree), [NamedSharding(mesh, spec) for spec in found]
    )


Line = tuple[str, str, int, int]  # what, how it is split, bytes of all, bytes of one device


def table(tree: Any, mesh: Mesh) -> list[Line]:
    """A line for each rule that the tree uses."""
    rows: dict[str, list] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), spec in zip(leaves, specs(tree, mesh.shape), strict=True):
        rule = rule_of(jax.tree_util.keystr(path, simple=True, separator="/"))
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        row = rows.setdefault(rule.what, [rule.axes, 0, 0])
        row[1] += size
        row[2] += size // _parts(spec, mesh.shape)
    return [(what, shown(axes), whole, part) for what, (axes, whole, part) in rows.items()]


def table_of_pass(
    config: Any, B: int, S: int, sizes: Mapping[str, int], *, itemsize: int
) -> list[Line]:
    """A line for each kind of array that a pass makes: bytes of one layer, or of the logits."""
    lines = []
    for what, axes, shape in activations(config, B, S):
        size = math.prod(shape) * (8 if "decision" in what else 4 if "logits" in what else itemsize)
        parts = _parts(fitting(axes, shape, sizes), sizes)
        lines.append((what, shown(axes), size, size // parts))
    return lines


def _parts(spec: P, sizes: Mapping[str, int]) -> int:
    return math.prod(axis_size(axis, sizes) for axis in spec if axis)


def shown(axes: Sequence) -> str:
    """A rule's split as text, an axis for each of the array's last ones: "slots, -, fsdp"."""
    names = ["-" if a is None else a if isinstance(a, str) else "+".join(a) for a in axes]
    return ", ".join(names) or "whole"
