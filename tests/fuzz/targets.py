"""The fuzzed entry points: what goes in, how it is called, and how an acceptance is verified."""

import atexit
import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from tests.fuzz.mutate import FOLDER, Files

# Stands beside the case's folder: what must never be read.
SECRET = b'{"r": 1, "secret": true}'


@dataclass(frozen=True)
class Target:
    """One entry point.

    inputs  the strategy of its cases
    check   (case, an empty folder) → whether it was accepted, and then verified; False: refused
    share   of all inputs, in parts
    """

    name: str
    inputs: st.SearchStrategy
    check: Callable[[Any, Path], bool]
    share: int = 1


@functools.cache
def workplace() -> Path:
    """A folder of this process's own, in memory where the system has such a place."""
    shm = Path("/dev/shm")
    place = shm if shm.is_dir() and os.access(shm, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="molora-fuzz-", dir=place))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "secret").write_bytes(SECRET)
    return folder


_numbers = itertools.count()


def run_case(target: Target, case: Any) -> bool:
    """Checks one case in a folder of its own: names are never used twice, as caches go by them."""
    folder = workplace() / f"case{next(_numbers)}"
    folder.mkdir()
    # Digests of the files that are read go to a cache that nobody else has.
    before = os.environ.get("MOLORA_CACHE")
    os.environ["MOLORA_CACHE"] = str(workplace() / "cache")
    try:
        return target.check(case, folder)
    except (AssertionError, hypothesis.errors.HypothesisException):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise AssertionError(f"accepted what cannot be verified: {kind}: {error}") from error
    finally:
        if before is None:
            del os.environ["MOLORA_CACHE"]
        else:
            os.environ["MOLORA_CACHE"] = before
        shutil.rmtree(folder, ignore_errors=True)


def laid_out(files: Files, folder: Path) -> Path:
    """Writes a case's files, links and folders."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content == FOLDER:
            path.mkdir()
        elif isinstance(content, tuple):
            path.symlink_to(content[1])
        else:
            path.write_bytes(content)
    return folder


def seen_content(folder: Path, name: str) -> bytes:
    """What reading the file through its links gives, which must not leave the folder."""
    path = (folder / name).resolve()
    assert path.is_relative_to(folder.resolve()), f"{name} was read from outside"
    return path.read_bytes()


def all_targets() -> dict[str, Target]:
    """Every target by name."""
    from tests.fuzz import target_adapters, target_command, target_models

    found = [
        *target_adapters.targets(),
        *target_models.targets(),
        *target_command.targets(),
    ]
    return {target.name: target for target in found}
