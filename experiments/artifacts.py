"""Trained things (adapters, routers, bases) kept between runs, under a hash of what made them."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from absl import logging

from molora_jax.models.cache import cache_folder, write_atomically
from molora_jax.parallel.processes import broadcast, is_primary, together

T = TypeVar("T")

MANIFEST = "artifact.json"
CHECKPOINTS = "checkpoints"


def plain(value: Any) -> Any:
    """A dataclass or mapping as JSON-able data, without the fields that say where things lie."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not field.metadata.get("place")
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def digest_of(value: Any) -> str:
    """sha256, shortened to 16 hex digits, of `plain(value)` as canonical JSON."""
    text = json.dumps(plain(value), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def lock(path: pathlib.Path, *, wait: bool) -> Iterator[None]:
    """Holds `path` for this process; the kernel lets go of it when the process dies, however.

    Raises:
      BlockingIOError: another process holds it and `wait` is False.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            logging.info("waiting for the process that holds %s", path)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def cached(
    kind: str,
    *,
    config: Any,
    digests: Mapping[str, str],
    make: Callable[[pathlib.Path], None],
    load: Callable[[pathlib.Path], T],
    remake: bool = False,
    cache: pathlib.Path | None = None,
) -> T:
    """`load(folder)` of the artifact with this config and these digests, made first if need be.

    make(folder) writes its files into `folder`. That folder outlives a kill, so a checkpoint under
    `folder / "checkpoints"` is there for the next try; the sub-folder goes when make returns. Then
    the folder is published in one rename, with the sha256 of every file; an entry whose files do
    not match is made anew. `load` runs in either case, so that a first run and a cached one see
    the same.

    Args:
      kind: a folder of the cache, such as "adapter".
      config: the artifact's own training config: a dataclass or a JSON-able mapping.
      digests: content digests of its data and base model.
      remake: forget the entry, and what an earlier try left, and make it anew.
      cache: folder to keep it in; `MOLORA_CACHE`, or the user's cache folder, unless given.
    """
    if not re.fullmatch(r"[a-z0-9_-]+", kind):
        raise ValueError(f"artifact kind {kind!r}: expected lower-case letters, digits, - and _")
    made_from = {"kind": kind, "config": plain(config), "digests": dict(digests)}
    key = digest_of(made_from)
    folder = (cache or cache_folder()) / "artifacts" / kind / key
    partial = folder.with_name(f"{key}.partial")
    if not is_primary():
        return _of_the_primary(folder, make, load)
    with lock(folder.with_name(f"{key}.lock"), wait=True):
        if remake:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)
        if folder.exists() and (damage := _damage(folder)):
            logging.warning("cached %s %s is damaged (%s); making it anew", kind, key, damage)
            shutil.rmtree(folder)
        if broadcast(str(folder) if folder.exists() else ""):
            logging.info("%s %s: from the cache", kind, key)
        else:
            partial.mkdir(parents=True, exist_ok=True)
            make(partial)
            shutil.rmtree(partial / CHECKPOINTS, ignore_errors=True)
            manifest = {**made_from, "files": _file_digests(partial)}
            if not manifest["files"]:
                raise ValueError(f"make() of artifact {kind!r} wrote no file into {partial}")
            write_atomically(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
            os.replace(partial, folder)
        return together(lambda: load(folder))


def _of_the_primary(
    folder: pathlib.Path, make: Callable[[pathlib.Path], None], load: Callable[[pathlib.Path], T]
) -> T:
    """What another process than the first makes of an artifact: the same, and keeps no file of it.

    Processes compute together, so all of them make it where one does.
    """
    there = broadcast(None)
    if not there:
        with tempfile.TemporaryDirectory() as scratch:
            make(pathlib.Path(scratch))
            return together(lambda: load(pathlib.Path(scratch)))

    def load_shared() -> T:
        if not folder.exists():
            raise FileNotFoundError(
                f"process 0 has {there} in its cache, and process {jax.process_index()} has no "
                f"{folder}: MOLORA_CACHE has to name a folder that all hosts share"
            )
        return load(folder)

    return together(load_shared)


def _damage(folder: pathlib.Path) -> str | None:
    """What is wrong with a published entry, or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"
    found = _file_digests(folder)
    wrong = sorted(name for name in {*files, *found} if files.get(name) != found.get(name))
    return f"changed, missing or new: {', '.join(wrong)}" if wrong else None


def _file_digests(folder: pathlib.Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as handle:
                digest = hashlib.file_digest(handle, "sha256").hexdigest()
            digests[path.relative_to(folder).as_posix()] = digest
    return digests
