"""Checkpoints of a training run: one Orbax folder a step, written whole or not at all.

The tree is stored flat, {"params['q_proj']['b']": host array, ...}, without shardings: what eight
devices wrote, one can read and describe, and the reader's own arrays say where the values go.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

_FOLDER = re.compile(r"step_(\d{8})$")


def save_checkpoint(folder: Path, step: int, tree: Any, *, meta: dict, keep: int = 2) -> None:
    """Writes `folder`/step_<step>, then removes all but the newest `keep`.

    Orbax writes under another name and renames at the end, so that a kill leaves no half checkpoint
    under this one. `meta` is any JSON object.
    """
    ocp = _orbax()
    names = {name: np.asarray(leaf) for name, leaf in _flatten(tree).items()}
    path = folder.resolve() / f"step_{step:08d}"
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(names), meta=ocp.args.JsonSave({"step": step, **meta})
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=args, force=True)
    for _, old in _written(folder)[:-keep]:
        shutil.rmtree(old)


def restore_newest(folder: Path, template: Any) -> tuple[Any, dict] | None:
    """(tree, meta) of the newest whole checkpoint, None where there is none.

    What a kill or a full disk left half-written is skipped with a message. `template` gives the
    structure, shapes, dtypes and, by its arrays' shardings, the devices.

    Raises ValueError if the checkpoint holds another tree, listing what differs.
    """
    for leftover in folder.glob("step_*tmp*"):
        logging.warning("%s is half-written (the run was killed): skipped, removed", leftover)
        shutil.rmtree(leftover)
    for _, path in reversed(_written(folder)):
        try:
            names, meta = _read(path)
        except (OSError, ValueError, KeyError) as error:
            # A damaged file; an older checkpoint gives the same numbers, only later.
            logging.warning("%s cannot be read: skipped (%s)", path, str(error).splitlines()[0])
            continue
        return _fill(template, names, path), meta
    return None


def describe_checkpoint(folder: Path) -> dict:
    """Step, meta and {name: (shape, dtype)} of the newest checkpoint; needs no device."""
    names, meta = read_newest(folder)
    arrays = {name: (array.shape, str(array.dtype)) for name, array in names.items()}
    return {**meta, "arrays": arrays}


def read_newest(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """({name: array}, meta) of the newest checkpoint, whatever tree it holds; needs no device."""
    written = _written(folder)
    if not written:
        raise ValueError(f"{folder} holds no checkpoint: expected a folder like step_00000040")
    return _read(written[-1][1])


def find_checkpoints(path: Path) -> Path | None:
    """The folder of step_... folders that `path` is, or a run folder's; None where it is neither.

    Of one step_... folder it is the parent, if that step is its newest.
    """
    if _FOLDER.match(path.name) and (path / "state").is_dir():
        newest = _written(path.parent)[-1][1]
        if newest.name != path.name:
            raise ValueError(f"{path} is not the newest checkpoint beside {newest.name}; move it")
        return path.parent
    folders = (path, path / "checkpoints")
    return next((folder for folder in folders if folder.is_dir() and _written(folder)), None)


def _orbax():
    import orbax.checkpoint  # a second or two that only a run with checkpoints needs

    return orbax.checkpoint


def _written(folder: Path) -> list[tuple[int, Path]]:
    found = [(_FOLDER.match(path.name), path) for path in folder.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    ocp = _orbax()
    args = ocp.args.Composite(state=ocp.args.PyTreeRestore(), meta=ocp.args.JsonRestore())
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(path.resolve(), args=args)
    return restored.state, restored.meta


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
    # jnp.array copies: a donated step must not write into memory that numpy still owns.
    leaves = [jax.device_put(jnp.array(names[name]), wanted[name].sharding) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)
