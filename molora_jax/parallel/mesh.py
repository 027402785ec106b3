"""The mesh of devices as a context, and what is placed on it by the rules."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from molora_jax.parallel import rules
from molora_jax.parallel.processes import fetch
from molora_jax.parallel.rules import AXES, TOKENS

_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
_TOLD: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("told", default=None)


def parse_mesh(text: str) -> dict[str, int]:
    """{"data": 2, "tensor": 4} of "data=2,tensor=4"; ValueError names what cannot be read."""
    sizes: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1 or axis in sizes:
            raise ValueError(
                f"mesh {text!r}: {part!r} is not one axis with a number of devices: expected some "
                f"of {', '.join(AXES)}, each once, as data=2,fsdp=2,tensor=2"
            )
        sizes[axis] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int] | str, *, devices: Any = None) -> Mesh:
    """A mesh with all of AXES; one that is not named has size 1, data what is left over.

    devices  of the mesh; None: all of all processes

    Raises ValueError where the sizes do not make up the devices.
    """
    sizes = parse_mesh(sizes) if isinstance(sizes, str) else dict(sizes)
    if unknown := sorted(sizes.keys() - set(AXES)):
        raise ValueError(f"mesh axis {unknown[0]!r} is unknown: expected {', '.join(AXES)}")
    devices = list(jax.devices() if devices is None else devices)
    others = math.prod(size for axis, size in sizes.items() if axis != "data")
    sizes.setdefault("data", max(len(devices) // others, 1))
    whole = {axis: sizes.get(axis, 1) for axis in AXES}
    if math.prod(whole.values()) != len(devices):
        said = " × ".join(f"{axis} {size}" for axis, size in whole.items() if size > 1) or "1"
        raise ValueError(
            f"a mesh of {said} needs {math.prod(whole.values())} devices, and there are "
            f"{len(devices)}: name sizes whose product is {len(devices)}, or leave data out"
        )
    # Auto: types carry no sharding, so that one program is written for any mesh and for none.
    return jax.make_mesh(
        tuple(whole.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None, *, explain: Callable[[str], None] | None = None) -> Iterator[None]:
    """What is loaded, trained, evaluated or served inside is split over the mesh; None: as without.

    It holds in the thread that enters it and in no thread started inside; what is made inside, as
    an Engine, keeps its mesh wherever it is used.

    explain  is told, as a table of text, how every tree that is placed was split
    """
    tokens = _MESH.set(mesh), _TOLD.set(explain)
    try:
        yield
    finally:
        _MESH.reset(tokens[0])
        _TOLD.reset(tokens[1])


def current_mesh() -> Mesh | None:
    """The mesh of `use_mesh`."""
    return _MESH.get()


def computing(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Around a call of a compiled function: the model in it is split over the mesh."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def place(tree: Any, mesh: Mesh | None, *, title: str = "") -> Any:
    """The tree with every leaf split by the rules; as it is without a mesh.

    Every process gives the same values and keeps its part of them.
    """
    if mesh is None:
        return tree
    if title and (explain := _TOLD.get()) is not None:
        explain(explained(title, rules.table(tree, mesh)))
    return jax.tree.map(put, tree, rules.shardings(tree, mesh))


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """A host array, or one that is here, under a sharding that may span processes."""
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=sharding)(array)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def whole(tree: Any, mesh: Mesh | None) -> Any:
    """The other way: every leaf whole, as an array of this process; as it is without a mesh."""
    return tree if mesh is None else jax.tree.map(jnp.asarray, fetch(tree))


def place_rows(batch: Any, mesh: Mesh | None, *, axis: int = 0) -> Any:
    """A batch with its rows (along `axis`) split over the devices; each process keeps its own.

    Raises ValueError where they do not divide.
    """
    if mesh is None:
        return batch

    def split(leaf):
        check_rows(leaf.shape[axis], mesh)
        return put(leaf, NamedSharding(mesh, P(*[None] * axis, TOKENS)))

    return jax.tree.map(split, batch)


def token_shards(mesh: Mesh | None) -> int:
    """Parts that the rows of a batch are split into."""
    return 1 if mesh is None else rules.axis_size(TOKENS, mesh.shape)


def check_rows(rows: int, mesh: Mesh | None, *, what: str = "batch rows") -> None:
    """ValueError where a number of rows cannot be split over the mesh."""
    if rows % token_shards(mesh):
        assert mesh is not None
        said = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in TOKENS)
        raise ValueError(
            f"{rows} {what} cannot be split over {token_shards(mesh)} groups of devices ({said}): "
            f"expected a multiple of {token_shards(mesh)}"
        )


def tell_pass(config: Any, B: int, S: int, *, itemsize: int) -> None:
    """Explains a pass over B rows of S tokens where it is compiled."""
    mesh, explain = jax.sharding.get_abstract_mesh(), _TOLD.get()
    if explain is not None and not mesh.empty:
        lines = rules.table_of_pass(config, B, S, mesh.shape, itemsize=itemsize)
        explain(explained(f"a pass over {B} x {S} tokens, a layer", lines))


def explained(title: str, lines: list[rules.Line]) -> str:
    """Lines as a table, with their sum."""
    total = sum(line[2] for line in lines), sum(line[3] for line in lines)
    rows = [f"{what:38} {split:30} {whole:>15,} {part:>15,}" for what, split, whole, part in lines]
    header = f"{title:38} {'split over':30} {'bytes':>15} {'on a device':>15}"
    return "\n".join([header, *rows, f"{'in all':69} {total[0]:>15,} {total[1]:>15,}"])
