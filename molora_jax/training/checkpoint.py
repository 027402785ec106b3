"""Checkpoints of a training run: written beside it, whole or not at all, and found again.

The tree is stored flat, {"params['q_proj']['b']": host array, ...}, without shardings: what eight
devices wrote, one can read and describe, and the reader's own arrays say where the values go.

Of several processes the first alone reads and writes. All of them call `CheckpointWriter` and
`restore_newest` together, because what is split over them is gathered for it and handed out again.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from molora_jax.parallel import broadcast, fetch, is_primary
from molora_jax.training.step_folder import (
    half_written,
    is_step,
    newest_whole,
    read_step,
    remove_all_but,
    step_path,
    write_step,
    written_steps,
)

T = TypeVar("T")


class CheckpointWriter:
    """Writes `folder`/step_<step> beside training, one at a time, and keeps the newest `keep`.

    A context manager: leaving it waits for the last one. The digest, the write and the removal of
    older ones are one job of one thread, so that training waits for the copy to the host alone.
    """

    def __init__(self, folder: Path, *, keep: int = 2):
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
            elif self._writing is not None and (error := self._writing.exception()):
                # Something else went wrong first, and that is what the caller gets to see.
                logging.error("%s", error)
        finally:
            self._thread.shutdown()

    def save(self, step: int, tree: Any, *, meta: Mapping[str, Any]) -> None:
        """Takes a copy of the tree and returns; `meta` is any JSON object.

        Raises OSError if the checkpoint before this one could not be written.
        """
        self.wait()
        whole = _flatten(fetch(tree))
        if is_primary():
            # Copies of our own: the next step is given the tree's memory.
            arrays = {name: np.array(leaf) for name, leaf in whole.items()}
            job = (self.folder, step, arrays, {**meta, "step": step}, self.keep)
            self._writing = self._thread.submit(_write, *job)

    def wait(self) -> None:
        """Returns once the last checkpoint is written; raises OSError if it could not be."""
        writing, self._writing = self._writing, None
        on_primary(lambda: None if writing is None else writing.result())


def save_checkpoint(folder: Path, step: int, tree: Any, *, meta: dict, keep: int = 2) -> None:
    """Writes one checkpoint and waits for it: `CheckpointWriter.save`."""
    with CheckpointWriter(folder, keep=keep) as writer:
        writer.save(step, tree, meta=meta)


def restore_newest(
    folder: Path, template: Any, *, check: Callable[[dict], None] | None = None
) -> tuple[Any, dict] | None:
    """(tree, meta) of the newest whole checkpoint, None where there is none.

    What a kill or a full disk left half-written, and what was damaged, is skipped with a message.
    `template` gives the structure, shapes, dtypes and, by its arrays' shardings, the devices.
    `check` sees the meta first, and may raise.

    Raises ValueError if the checkpoint holds another tree, listing what differs.
    """

    def read():
        for leftover in half_written(folder):
            logging.warning("%s is half-written (the run was killed): skipped, removed", leftover)
            shutil.rmtree(leftover)
        found = newest_whole(folder)
        if found is None and written_steps(folder):
            logging.warning("%s holds no whole checkpoint: training starts anew", folder)
        return found

    found = on_primary(read)
    if found is None:
        return None
    path, arrays, meta = found
    if check is not None:
        check(meta)
    return _fill(template, arrays, path), meta


def describe_checkpoint(path: Path) -> dict:
    """Step, meta and {name: (shape, dtype)} of what `read_checkpoint` reads; needs no device."""
    arrays, meta = read_checkpoint(path)
    described = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
    return {**meta, "arrays": described}


def read_checkpoint(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """({name: array}, meta) of one step_... folder, or of the newest in a folder.

    It may hold any tree; no device is needed. Raises ValueError where it is damaged: only a run
    that is resumed takes an older one instead.
    """
    steps = [path] if is_step(path) else [step for _, step in written_steps(path)]
    if not steps:
        raise ValueError(f"{path} holds no checkpoint: expected a folder like step_00000040")
    try:
        return read_step(steps[-1])
    except MemoryError:
        raise
    except Exception as error:  # as in newest_whole
        older = f"; older ones: {', '.join(step.name for step in steps[:-1])}" if steps[1:] else ""
        raise ValueError(
            f"{steps[-1]} cannot be read, it is damaged ({_first_line(error)}){older}"
        ) from error


def find_checkpoints(path: Path) -> Path | None:
    """`path` if it is a step_... folder or holds some, or its checkpoints/; None otherwise."""
    if is_step(path):
        return path
    folders = (path, path / "checkpoints")
    return next((folder for folder in folders if folder.is_dir() and written_steps(folder)), None)


def on_primary(work: Callable[[], T]) -> T:
    """What `work` returns in the first process, in all of them; what it raises is raised in all."""
    value, error = None, None
    if is_primary():
        try:
            value = work()
        except Exception as raised:
            error = raised
    shared, failed = broadcast((value, error))
    if error or failed:
        raise error or failed  # the first process's own has the traceback
    return shared


def _write(
    folder: Path, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any], keep: int
) -> None:
    path = step_path(folder, step)
    try:
        write_step(path, arrays, meta)
    except Exception as error:
        for half in half_written(folder):
            shutil.rmtree(half, ignore_errors=True)
        raise OSError(_not_written(path, arrays, error)) from error
    try:
        remove_all_but(folder, keep, newest=step)
    except OSError as error:
        logging.warning("%s: an older checkpoint could not be removed (%s)", folder, error)


def _not_written(path: Path, arrays: dict[str, np.ndarray], error: Exception) -> str:
    reason = _first_line(error)
    if _is_full(error):
        need = sum(array.nbytes for array in arrays.values()) / 1e6
        there = next(folder for folder in path.parents if folder.exists())
        free = shutil.disk_usage(there).free / 1e6
        reason = f"the disk is full ({free:.1f} MB free, up to {need:.1f} MB needed): make room"
    steps = written_steps(path.parent)
    stays = f"that of step {steps[-1][0]} stays, the same run goes on from there" if steps else ""
    return f"{path} could not be written: {reason}; {stays or 'there is no earlier checkpoint'}"


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left" in str(error) or "quota exceeded" in str(error):
            return True  # as TensorStore says it
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _flatten(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _fill(template: Any, names: dict[str, np.ndarray], path: Path) -> Any:
    wanted = _flatten(template)
    problems = [f"missing {name}" for name in sorted(wanted.keys() - names.keys())]
    problems += [f"unexpected {name}" for name in sorted(names.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & names.keys()):
        leaf, stored = wanted[name], names[name]
        if (leaf.shape, leaf.dtype) != (stored.shape, stored.dtype):
            there, here = f"{stored.dtype}{stored.shape}", f"{leaf.dtype}{leaf.shape}"
            problems.append(f"{name} is {there}, expected {here}")
    if problems:
        raise ValueError(
            f"{path} holds another tree than this run trains: {'; '.join(problems)}. "
            "Resume with the settings it was started with, or choose another folder."
        )
    leaves = [_placed(names[name], leaf.sharding) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _placed(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array where `sharding` wants it, which may be on devices of several processes."""
    array = jax.make_array_from_callback(
        value.shape, sharding, lambda index: np.asarray(value[index])
    )
    # A copy: a donated step must not write into memory that numpy still owns.
    return jnp.array(array)
