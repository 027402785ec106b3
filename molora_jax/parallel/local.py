"""Inside the decoder's shard_map: what each device computes of its part, and what it exchanges.

Every function does nothing to its argument where there is no mesh, so that the model is written
once. Which axes an array is split over is asked of its type (JAX's varying axes), never told twice.

Small letters are a device's part: v of V, d of D, s of S.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from molora_jax.parallel import rules
from molora_jax.parallel.rules import TOKENS
from pallas_kernels import Routing
from pallas_kernels.numerics import varying_axes


def spread(f: Callable, args: dict[str, Any], out: Any, *, rows: int, by_row: Sequence[str]) -> Any:
    """f(*args.values()) with every device at its part of rows, heads and weights.

    args   pytrees by name, split by the rules; those named in `by_row` along their leading axis.
           Of "decoder" the sizes are held against the mesh
    out    partitions of the result for split rows, a prefix of its tree
    rows   B; where the devices do not divide it, each computes all rows (a prompt read alone)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or inside():
        return f(*args.values())
    rules.check_fits(args["decoder"].config, mesh.shape)
    sizes = mesh.shape
    split = rows % rules.axis_size(TOKENS, sizes) == 0

    def real(spec):
        """Of a partition the axes that split something here."""
        axes = (None if axis == TOKENS and not split else axis for axis in spec)
        return P(*(rules.real(axis, sizes) for axis in axes))

    in_specs = []
    for name, arg in args.items():
        leaves, tree = jax.tree.flatten(arg)
        if name in by_row:
            specs = [real(P(TOKENS))] * len(leaves)
        else:
            specs = rules.specs({name: arg}, sizes, split_rows=split)
        in_specs.append(jax.tree.unflatten(tree, specs))
    out = jax.tree.map(real, out, is_leaf=lambda each: isinstance(each, P))
    return jax.shard_map(f, in_specs=tuple(in_specs), out_specs=out)(*args.values())


def inside() -> bool:
    """Whether this is traced for one device of a mesh."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_split(array: Array, axis: str) -> bool:
    """Whether a device of a mesh has a part of its own of the array, along a mesh axis."""
    return axis in varying_axes(array)


def gathered(array: Array, axis: int) -> Array:
    """An array that lies split over fsdp along `axis`, whole for its use."""
    if not is_split(array, "fsdp"):
        return array
    return lax.all_gather(array, "fsdp", axis=axis % array.ndim, tiled=True, to="invarying")


def whole_sequence(x: Float[Array, "B s D"]) -> Float[Array, "B S D"]:
    """The residual stream, whose positions lie split over tensor between the projections
    (Korthikanti et al., arXiv 2205.05198), for use; of a single token it is whole already."""
    if not is_split(x, "tensor"):
        return x
    return lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying")


def summed(partial: Float[Array, "B S F"], *, split_sequence: bool) -> Float[Array, "B s F"]:
    """The sum over tensor of what each device has a part of; of it, the positions that lie here."""
    if not is_split(partial, "tensor"):
        return partial
    if split_sequence:
        return lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)
    return lax.psum(partial, "tensor")


def once(term: Array, *, like: Array) -> Array:
    """What is to be added to a sum over tensor a single time: 0 on all devices but the first."""
    if not is_split(like, "tensor"):
        return term
    return jnp.where(lax.axis_index("tensor") == 0, term, 0)


def constrain(array: Array, *axes: Any) -> Array:
    """Outside the shard_map: how a result is to lie, along its last axes; those that divide it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or inside():
        return array
    spec = rules.fitting(axes, array.shape, mesh.shape)
    return lax.with_sharding_constraint(array, spec)


def constrain_tree(tree: Any, *, name: str = "") -> Any:
    """`constrain` of every leaf by the rules: what leaves a step lies as what came in."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or inside():
        return tree
    found = rules.specs({name: tree} if name else tree, mesh.shape)
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, found, strict=True)
    return jax.tree.unflatten(
        structure, [lax.with_sharding_constraint(leaf, spec) for leaf, spec in pairs]
    )


def lookup(table: Float[Array, "v d"], ids: Int[Array, "B S"]) -> Float[Array, "B s D"]:
    """Rows of an embedding whose V is split over tensor and D over fsdp; 0 for id −1, NaN for less.

    Ids are exchanged and rows found where they lie: the table is never gathered. Where the devices
    of tensor divide S, each gets its positions alone.
    """
    columns, own = is_split(table, "fsdp"), is_split(ids, "fsdp")
    if columns and own:  # each device has rows of its own, and some columns of the table for all
        ids = lax.all_gather(ids, "fsdp", axis=0, tiled=True)
    at = ids - lax.axis_index("tensor") * table.shape[0] if is_split(table, "tensor") else ids
    here = (ids >= 0) & (at >= 0) & (at < table.shape[0])
    none = jnp.where(ids < -1, jnp.nan, 0.0).astype(table.dtype)[..., None]
    x = jnp.where(here[..., None], table[jnp.where(here, at, 0)], none)
    if is_split(table, "tensor"):
        x = summed(x, split_sequence=ids.shape[1] % lax.axis_size("tensor") == 0)
    if columns and own:
        return lax.all_to_all(x, "fsdp", split_axis=0, concat_axis=2, tiled=True)
    return gathered(x, axis=2)


def to_slots(routing: Routing, ranks: Array, num_slots: int) -> Routing:
    """Of a decision, what concerns the slots that lie here: −1 for those that do not.

    ranks  of any stack: its type says whether the bank is split. Where it is, tokens that are split
           over slots come together first.
    """
    if not is_split(ranks, "slots"):
        return routing
    ids, gates = (to_all_slots(jnp.asarray(each)) for each in (routing.adapter_ids, routing.gates))
    ids = ids - lax.axis_index("slots") * num_slots
    if ids.shape[1] <= num_slots:
        return Routing(jnp.where((ids >= 0) & (ids < num_slots), ids, -1), gates)
    # A token takes more adapters than there are slots here: one choice for each slot.
    slots = jnp.arange(num_slots)
    chosen = ids[:, :, None] == slots
    gates = jnp.where(chosen, gates[:, :, None], 0.0).sum(axis=1)
    return Routing(jnp.where(chosen.any(axis=1), slots, -1), gates)


def to_all_slots(rows: Array) -> Array:
    """The rows of all devices of the axis slots, where each has its own."""
    if not is_split(rows, "slots"):
        return rows
    return lax.all_gather(rows, "slots", axis=0, tiled=True)


def from_all_slots(rows: Array, like: Array) -> Array:
    """The sum over slots of partial rows; of it, the rows that belong here, as `like` has them."""
    if not is_split(like, "slots"):
        return lax.psum(rows, "slots")
    return lax.psum_scatter(rows, "slots", scatter_dimension=0, tiled=True)
