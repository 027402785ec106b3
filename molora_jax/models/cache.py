"""Where fetched models and trained artifacts lie: MOLORA_CACHE, or the user's cache folder."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """MOLORA_CACHE if set, else the platform's cache folder for a user, with /molora_jax."""
    if folder := os.environ.get("MOLORA_CACHE"):
        return Path(folder).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "molora_jax"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "molora_jax"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "molora_jax"


def write_atomically(path: Path, text: str) -> None:
    """A reader, or a kill, sees the old file or the new one and never half of it."""
    from molora_jax.files import naming_path  # numpy, which `molora --help` need not wait for

    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming_path(path):
            half.write_text(text, encoding="utf-8")
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def remember(path: Path, text: str) -> None:
    """Writes what need not be computed again into the cache; one that cannot be written is passed
    over, with a warning."""
    from absl import logging

    try:
        write_atomically(path, text)
    except OSError as error:
        logging.warning("nothing is kept in the cache (MOLORA_CACHE): %s", error)
