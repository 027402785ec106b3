"""What each pair of strategy and backend runs, forward and backward, on the same operands.

XLA's functions compute one projection of one layer and are called for each. The kernels take whole
stacks and all the projections that share x, so that no layer is sliced off and x is read once.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.all_slots.xla import all_slots
from pallas_kernels.arrays import Array
from pallas_kernels.bgmv.xla import bgmv
from pallas_kernels.grouped_gemm.xla import grouped, grouped_gradients
from pallas_kernels.numerics import accumulator_dtype, known_ids, layer_of
from pallas_kernels.reference import reference
from pallas_kernels.token_sort import adapter_order, token_sort
from pallas_kernels.types import Indices, Operands, Tiles


@dataclasses.dataclass(frozen=True)
class Path:
    """A strategy and who runs it; for a sorting one also the layout and height of its tiles."""

    strategy: str
    backend: str
    layout: str = "entries"
    block: int = 1


def forward(path: Path, operands: Operands, indices: Indices) -> tuple[Array, ...]:
    """y (N, F) of every projection, in the dtype of its base."""
    if operands.x.shape[0] == 0:
        return operands.base
    if path.backend != "xla":
        return _kernels_forward(operands, indices, path=path)
    if path.strategy == "grouped":  # one sort for all projections
        indices = indices._replace(tiles=_tiles(path, operands, indices))
    return tuple(
        _xla(path, indices, w)(operands.x, *weights, operands.gates, base)
        for w, (weights, base) in enumerate(
            zip(_layer(operands, indices), operands.base, strict=True)
        )
    )


def backward(path: Path, operands: Operands, indices: Indices, dy: tuple[Array, ...]) -> Operands:
    """The gradient of Σ dy·y in every operand; that of the bases is dy itself."""
    if operands.x.shape[0] == 0:
        return jax.tree.map(jnp.zeros_like, operands)
    if path.backend != "xla":
        return _kernels_backward(operands, indices, dy, path=path)
    sorts = path.strategy in ("grouped", "bgmv")
    tiles = _tiles(path, operands, indices) if sorts else None
    found = []
    for w, weights in enumerate(_layer(operands, indices)):
        if tiles is not None:
            gradients = grouped_gradients(
                operands.x, *weights, operands.gates, dy[w],
                ranks=layer_of(indices.ranks[w], indices.layer), tiles=tiles,
            )  # fmt: skip
        else:
            run = functools.partial(_xla(path, indices, w), base=operands.base[w])
            gradients = jax.vjp(run, operands.x, *weights, operands.gates)[1](dy[w])
        found.append(gradients)
    return _gathered(operands, indices, found, dy)


def _layer(operands: Operands, indices: Indices):
    return layer_of(list(zip(operands.lora_a, operands.lora_b, strict=True)), indices.layer)


def _xla(path: Path, indices: Indices, w: int):
    ranks = layer_of(indices.ranks[w], indices.layer)
    if path.strategy == "grouped":
        return functools.partial(grouped, ranks=ranks, tiles=indices.tiles)
    functions: dict[str, Callable[..., Array]] = {
        "all_slots": all_slots,
        "bgmv": bgmv,
        "reference": reference,
    }
    function = functions[path.strategy]
    return functools.partial(function, adapter_ids=indices.adapter_ids, ranks=ranks)


def sort(path: Path, adapter_ids: Array, num_slots: int) -> Tiles:
    """The tiles that a path works on."""
    return token_sort(
        adapter_ids, num_slots, layout=path.layout, block=path.block, backend=path.backend
    )


def _tiles(path: Path, operands: Operands, indices: Indices) -> Tiles:
    if indices.tiles is not None:
        return indices.tiles
    return sort(path, indices.adapter_ids, operands.lora_a[0].shape[-3])


def _gathered(operands: Operands, indices: Indices, found, dy) -> Operands:
    """Sums over the projections, and a layer's gradients set into those of its stack."""

    def stacked(stack, gradient):
        if indices.layer is None:
            return gradient
        return jnp.zeros_like(stack).at[indices.layer].set(gradient)

    def summed(which: int, like: Array) -> Array:
        wide = accumulator_dtype(like)
        return sum(each[which].astype(wide) for each in found).astype(like.dtype)

    return Operands(
        x=summed(0, operands.x),
        lora_a=tuple(stacked(a, each[1]) for a, each in zip(operands.lora_a, found, strict=True)),
        lora_b=tuple(stacked(b, each[2]) for b, each in zip(operands.lora_b, found, strict=True)),
        gates=summed(3, operands.gates),
        base=dy,
    )


# One trace for all the layers of a model that have the same shapes.
@functools.partial(jax.jit, static_argnames="path")
def _kernels_forward(operands: Operands, indices: Indices, *, path: Path):
    from pallas_kernels.all_slots.triton import all_slots as all_slots_kernels
    from pallas_kernels.bgmv.triton import bgmv as bgmv_kernels
    from pallas_kernels.grouped_gemm import triton as grouped_kernels

    stacks = _Stacks(operands, indices)
    if path.strategy == "grouped":
        update = _update(path, operands, indices, stacks)
        given = (operands.x, stacks.lora_a, stacks.lora_b, operands.base, stacks.ranks)
        return tuple(grouped_kernels.forward(update, *given))

    run = all_slots_kernels if path.strategy == "all_slots" else bgmv_kernels

    ids = indices.adapter_ids
    if ids.dtype != jnp.int32:  # a wider id may wrap onto a real slot
        ids = known_ids(ids, stacks.num_slots)

    def each(lora_a, lora_b, base, ranks):
        return run(
            operands.x,
            lora_a,
            lora_b,
            operands.gates,
            base,
            ids=ids,
            ranks=ranks,
            first_slot=stacks.first_slot,
            num_slots=stacks.num_slots,
            interpret=path.backend == "interpret",
        )

    return tuple(map(each, stacks.lora_a, stacks.lora_b, operands.base, stacks.ranks))


@functools.partial(jax.jit, static_argnames="path")
def _kernels_backward(operands: Operands, indices: Indices, dy, *, path: Path) -> Operands:
    from pallas_kernels.grouped_gemm import triton as grouped_kernels

    stacks = _Stacks(operands, indices)
    found = grouped_kernels.gradients(
        _update(path, operands, indices, stacks),
        operands.x,
        stacks.lora_a,
        stacks.lora_b,
        dy,
        stacks.ranks,
        ids=known_ids(indices.adapter_ids, stacks.num_slots),
        by_adapter=adapter_order(indices.adapter_ids, stacks.num_slots, backend=path.backend),
    )
    return _gathered(operands, indices, found, dy)


def _update(path: Path, operands: Operands, indices: Indices, stacks: "_Stacks"):
    from pallas_kernels.grouped_gemm.triton import Update

    return Update(
        tiles=_tiles(path, operands, indices),
        first_slot=stacks.first_slot,
        gates=operands.gates,
        interpret=path.backend == "interpret",
    )


class _Stacks:
    """Stacks as the kernels take them: (L·K, R, ·), with the layer as the first slot's number."""

    def __init__(self, operands: Operands, indices: Indices):
        self.lora_a = [a.reshape(-1, *a.shape[-2:]) for a in operands.lora_a]
        self.lora_b = [b.reshape(-1, *b.shape[-2:]) for b in operands.lora_b]
        self.num_slots = operands.lora_a[0].shape[-3]
        layer = jnp.int32(0) if indices.layer is None else indices.layer.astype(jnp.int32)
        self.first_slot = jnp.reshape(layer * self.num_slots, (1,))
        self.ranks = [
            jnp.full(a.shape[0], a.shape[1], jnp.int32)
            if ranks is None
            else ranks.reshape(-1).astype(jnp.int32)
            for a, ranks in zip(self.lora_a, indices.ranks, strict=True)
        ]
