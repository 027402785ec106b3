"""The local Hugging Face cache: where things lie in it, found by reading files alone."""

import os
import re
from pathlib import Path

# A revision is a branch, a tag or a commit; no part of any of the three may be "." or "..".
_PART = r"(?!\.{1,2}(?:[/@]|$))[\w.-]{1,96}"
HUB_NAME = re.compile(rf"({_PART})/({_PART})(?:@({_PART}(?:/{_PART}){{0,4}}))?", re.ASCII)


# Names of this project for models that the hub has under another.
HUB_NAMES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def hub_name(name: str) -> str:
    """The name by which others know a model; itself where it has one only."""
    return HUB_NAMES.get(name, name)


def same_model(one: str, other: str) -> bool:
    """Whether two names, paths or org/name@revision may mean one model: by their last part."""
    return _last_part(hub_name(one)) == _last_part(hub_name(other))


def _last_part(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1].split("@")[0].lower()


def hub_folder() -> Path:
    """Where huggingface-hub keeps models: HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache's."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(home) if home else Path(cache) / "huggingface").expanduser() / "hub"


def hub_repo(owner: str, model: str) -> Path:
    """The folder of owner/model in the cache, whether or not it is there."""
    return hub_folder() / f"models--{owner}--{model}"


def hub_snapshot(owner: str, model: str, revision: str | None) -> Path | None:
    """The files of a revision ("main" if None), or None where the cache has no such folder."""
    repo = hub_repo(owner, model)
    ref = repo / "refs" / (revision or "main")
    commit = revision
    if ref.is_file():
        with open(ref, encoding="utf-8", errors="replace") as file:
            commit = file.read(200).strip()
    # The text becomes part of a path, so a damaged one must not lead elsewhere.
    if not commit or not re.fullmatch(_PART, commit, re.ASCII):
        return None
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def hub_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to dial out."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def download_command(owner: str, model: str, revision: str | None) -> str:
    """What fills the cache where there is a network."""
    return f"hf download {owner}/{model}" + (f" --revision {revision}" if revision else "")


def cached_names() -> list[str]:
    """Every owner/model in the cache."""
    folders = hub_folder().glob("models--*--*")
    return sorted("/".join(folder.name.split("--", 2)[1:]) for folder in folders)
