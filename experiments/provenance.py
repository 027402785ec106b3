"""Where a number came from: JAX, device, cores, and which source code made it."""

import functools
import hashlib
import os
import pathlib
import subprocess
from typing import Any

import jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE = ("run.py", "experiments", "molora_jax", "pallas_kernels")


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
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str | None:
    """The commit checked out, None outside a git work tree."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
