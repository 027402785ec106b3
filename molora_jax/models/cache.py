"""Where fetched models and trained artifacts lie: MOLORA_CACHE, or the user's cache folder."""

import os
import sys
import tempfile
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


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a small file so that a reader sees the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
