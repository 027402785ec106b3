"""What a base model is, as a sha256: of the files it was read from, or of its arrays in memory."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from molora_jax.files import read_json
from molora_jax.models.cache import cache_folder, remember
from molora_jax.parallel.processes import fetch


def file_digest(path: str | Path) -> str:
    """sha256 of a file's content.

    Hashing takes a second for half a gigabyte, so the result is kept in MOLORA_CACHE and holds as
    long as the file's place and size and the times of its last changes do. The time of change
    (ctime) cannot be set back, as that of modification is by tools that copy files.
    """
    path = Path(path).resolve()
    stat = path.stat()
    seen = {
        "path": str(path),
        "inode": stat.st_ino,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
    }
    name = hashlib.sha256(str(path).encode()).hexdigest()[:24]
    record = cache_folder() / "digests" / f"{name}.json"
    with contextlib.suppress(ValueError, OSError):  # absent, or damaged
        known = read_json(record, where=str(record))
        digest = known.pop("sha256", None)
        if known == seen and isinstance(digest, str):
            return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    remember(record, json.dumps(seen | {"sha256": digest}))
    return digest


def files_digest(paths: Sequence[str | Path]) -> str:
    """Digest of a model: that of its one file, or the sha256 of names and digests of several."""
    if len(paths) == 1:
        return file_digest(paths[0])
    lines = [f"{file_digest(path)}  {Path(path).name}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def params_digest(tree: Any) -> str:
    """sha256 over every array of a decoder (or any pytree): its path, dtype, shape and bytes.

    Two trees share it only if they hold the same numbers, so it shows that training left a base
    untouched. A second for half a gigabyte.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.ascontiguousarray(fetch(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
