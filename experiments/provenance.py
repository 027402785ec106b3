"""Where a number came from: JAX, device, cores, and which source code made it."""

import functools
import hashlib
import os
import pathlib
import subprocess
from typing import Any

import jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE = ("experiments", "molora_jax", "pallas_kernels")  # run.py is not in a wheel


@functools.cache
def environment() -> dict[str, Any]:
    """What result.json says of the machine and the code."""
    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cpu_count": os.cpu_count(),
        "source": source_digest(),
        "commit": _commit(),
    }


@functools.cache
def source_digest() -> str:
    """Hash of the project's own Python files, by content and not by commit."""
    digest = hashlib.sha256()
    for name in CODE:
        for path in sorted((ROOT / name).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str | None:
    """The commit checked out, None where this is no checkout: installed into an environment that
    lies in another repository, it would be that one's."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    top, commit = done.stdout.splitlines()
    return commit if pathlib.Path(top).resolve() == ROOT else None
