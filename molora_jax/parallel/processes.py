"""Several processes that run one program in step: who writes, and how values reach all of them."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

T = Any


def start_processes(
    coordinator: str | None = None,
    *,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins this process to the others, before JAX is used for anything else.

    coordinator  host:port of process 0. With none of the three, Slurm's variables (or those of
                 another cluster that JAX knows) say all of them

    Every process then sees the devices of all, and has to run the same program: a computation over
    them starts once all of them have called it.

    Raises ValueError where they are given in part, RuntimeError where the others do not come.
    """
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(
            f"{', '.join(missing)} missing: give coordinator (host:port of process 0), "
            "num_processes and process_id together, or none of them under Slurm"
        )
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise ValueError(
            f"process_id {process_id} of num_processes {num_processes}: expected 0 to "
            f"{max(num_processes - 1, 0)}"
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator {coordinator!r}: expected host:port, as 10.0.0.1:9876")
    jax.distributed.initialize(coordinator, num_processes, process_id)


def is_primary() -> bool:
    """Whether this is process 0, the one that writes files; true of a single process."""
    return jax.process_index() == 0


def fetch(tree: T) -> T:
    """Every leaf as a whole numpy array, on every process: all of them have to call it."""
    return jax.tree.map(_whole, tree)


def broadcast(value: T) -> T:
    """A picklable value of process 0, on every process: all of them have to call it."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    packed = np.frombuffer(pickle.dumps(value), np.uint8) if is_primary() else np.zeros(0, np.uint8)
    parts = np.array(divmod(packed.size, 1 << 30), np.int32)  # JAX has no 64 bits by default
    high, low = np.asarray(multihost_utils.broadcast_one_to_all(parts))
    size = (int(high) << 30) + int(low)
    # The others' content is ignored, but has to have the shape.
    padded = packed if is_primary() else np.zeros(size, np.uint8)
    return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


def gather(value: Any) -> list[Any]:
    """A picklable value of every process, by their order, on all: all of them have to call it."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    packed = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(packed.size)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: packed.size] = packed
    all_packed = np.asarray(multihost_utils.process_allgather(padded))
    return [
        pickle.loads(each[:size].tobytes()) for each, size in zip(all_packed, sizes, strict=True)
    ]


def check_same(what: str, told: Callable[[], Mapping[str, Any]]) -> None:
    """Raises ValueError, in all processes, where they were told different things by some name.

    They would compute together all the same, and what comes out would be neither's. A single
    process is not asked what it was told.
    """
    if jax.process_count() == 1:
        return
    everywhere = gather(dict(told()))
    for index, each in enumerate(everywhere):
        for name in sorted(everywhere[0].keys() | each.keys()):
            first, other = everywhere[0].get(name), each.get(name)
            if first != other:
                raise ValueError(
                    f"the processes do not agree on the {what}: {name} is {first!r} in process 0 "
                    f"and {other!r} in process {index}. Start all of them with the same command, "
                    "on hosts that see the same files"
                )


def together(work: Callable[[], T]) -> T:
    """What `work` returns here, once it has returned in every process.

    What it raises in one is raised in all, so that none waits for another that has given up.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        error = raised
    failed = gather(None if error is None else (isinstance(error, ValueError), str(error)))
    if error is not None:
        raise error
    for index, each in enumerate(failed):
        if each is not None:
            raise (ValueError if each[0] else OSError)(f"process {index}: {each[1]}")
    return value


def _whole(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0))
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)
