"""One checkpoint on disk: named host arrays and a JSON object, in an Orbax folder of its own.

The sha256 of both stands in the JSON object: Orbax does not see a changed byte inside an array.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

_FOLDER = re.compile(r"step_(\d{8})$")
DIGEST = "sha256"


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies; absolute, as Orbax wants it."""
    return folder.resolve() / f"step_{step:08d}"


def is_step(path: Path) -> bool:
    """Whether `path` is itself a checkpoint's folder, if a damaged one."""
    return bool(_FOLDER.match(path.name)) and any((path / n).is_dir() for n in ("state", "meta"))


def written_steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, its folder), oldest first. Half-written ones have another name still."""
    found = [(_FOLDER.match(path.name), path) for path in folder.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def half_written(folder: Path) -> list[Path]:
    """What a kill or a full disk left under the name that Orbax writes to first."""
    return sorted(folder.glob("step_????????.orbax-checkpoint-tmp*"))


def write_step(path: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
    """Writes under another name and renames at the end; replaces what is at `path`."""
    meta = {**meta, DIGEST: content_digest(arrays, meta)}
    with _orbax() as (checkpointer, args):
        what = args.Composite(state=args.PyTreeSave(dict(arrays)), meta=args.JsonSave(meta))
        checkpointer.save(path, args=what, force=True)


def read_step(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """(arrays, meta); needs no device.

    Raises ValueError where the digest does not fit, or whatever Orbax makes of a damaged file.
    """
    with _orbax() as (checkpointer, args):
        what = args.Composite(state=args.PyTreeRestore(), meta=args.JsonRestore())
        restored = checkpointer.restore(path.resolve(), args=what)
    arrays, meta = dict(restored.state), dict(restored.meta)
    stated = meta.pop(DIGEST, None)
    if stated is None:
        logging.warning("%s is older than digests of checkpoints: not verified", path)
    elif stated != content_digest(arrays, meta):
        raise ValueError("its content is not what was written: the sha256 differs")
    return arrays, meta


def newest_whole(folder: Path) -> tuple[Path, dict[str, np.ndarray], dict] | None:
    """The newest checkpoint that can be read, (its folder, arrays, meta); None where none can.

    A damaged one is skipped with a message: an older one gives the same numbers, only later.
    """
    for _, path in reversed(written_steps(folder)):
        try:
            return path, *read_step(path)
        except MemoryError:  # the machine's fault and not the file's
            raise
        except Exception as error:  # damaged bytes end in any exception of Orbax or what it uses
            said = (str(error).splitlines() or [""])[0]
            logging.warning("%s cannot be read: skipped (%s: %s)", path, type(error).__name__, said)
    return None


def remove_all_but(folder: Path, keep: int, *, newest: int) -> None:
    """Keeps `newest` and what comes before it, `keep` in all. Later steps were skipped, damaged."""
    steps = written_steps(folder)
    kept = {path for _, path in [each for each in steps if each[0] <= newest][-keep:]}
    for _, path in steps:
        if path not in kept:
            shutil.rmtree(path)


def content_digest(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> str:
    """sha256 of names, dtypes, shapes and bytes, and of the JSON object."""
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """Orbax's checkpointer and its args, for process 0 alone: it waits for no other process."""
    import orbax.checkpoint as ocp  # a second or two that only a run with checkpoints needs

    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        state=ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        meta=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        yield checkpointer, ocp.args
