"""A PEFT folder as it stands on disk, of any architecture: found, read, and not yet understood."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax.adapters.names import nearest, shortened
from molora_jax.files import near_path, read_json, read_safetensors
from molora_jax.hub import HUB_NAME, cached_names, download_command, hub_repo, hub_snapshot
from molora_jax.routing.statistics_file import STATISTICS_FILE

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
CARD_FILE = "README.md"
PEFT_FILES = frozenset({CONFIG_FILE, WEIGHTS_FILE, CARD_FILE})
# What may lie in an adapter's folder and goes with it: statistics of an adapter that is replaced
# would be refused by whoever reads them.
ADAPTER_FILES = PEFT_FILES | {STATISTICS_FILE}

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Other layouts by a file that tells them: what it is, and the way out.
_OTHER_LAYOUTS = {
    "molora.json": (
        "a composition, which --composition, --add_to and Composition.load take; its adapters are "
        "the folders in its adapters/"
    ),
    "adapters.safetensors": (
        "an MLX adapter, whose matrices are transposed and whose scale is stored otherwise: "
        "convert it to PEFT (transpose lora_a and lora_b, lora_alpha = scale * rank)"
    ),
    "pytorch_lora_weights.safetensors": (
        "a LoRA for diffusers, made for image models: this package adapts language models"
    ),
    "*.gguf": (
        "a GGUF file: as an adapter (llama.cpp's) it has lost PEFT's config, so load the PEFT "
        "folder it was converted from; as a model give it to load_base"
    ),
    "result.json": "the run of an experiment: its adapter or composition is a folder in it",
    "config.json": "a whole model, not an adapter: it is what --base and load_base take",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class PeftFolder:
    """What the files of an adapter hold, before anything is matched, checked or refused.

    path      the folder that was read
    label     what the adapter is called where nobody says otherwise
    config    adapter_config.json
    tensors   {name in the file: array}, each with its own shape and dtype, in the file's order
    metadata  of the safetensors file
    """

    path: Path
    label: str
    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]


def read_peft_folder(path: str | Path, *, name: str | None = None) -> PeftFolder:
    """Reads a PEFT folder of any architecture.

    path  the folder, a file in it, or org/name[@revision] of the local Hugging Face cache; what
          exists as a path is taken as one, and nothing is ever downloaded
    name  what the adapter is called in error messages; by default after the folder

    Raises FileNotFoundError where there is none, with where was looked and how to fill it, and
    ValueError for files of another format or damaged, empty or linked to outside the folder.
    """
    folder, label = find_peft_folder(path)
    where = f"adapter {label if name is None else name!r}"
    config = read_json(folder / CONFIG_FILE, where=f"{where}: {CONFIG_FILE}", root=folder)
    stored = read_safetensors(folder / WEIGHTS_FILE, where=f"{where}: {WEIGHTS_FILE}", root=folder)
    return PeftFolder(
        path=folder,
        label=label,
        config=config,
        tensors={key: stored.get(key) for key in stored.keys()},  # noqa: SIM118 (no mapping)
        metadata=stored.metadata,
    )


def find_peft_folder(path: str | Path) -> tuple[Path, str]:
    """The folder of an adapter, named as for `read_peft_folder`, and the label that follows."""
    given = Path(path)
    folder = given.parent if given.is_file() and given.name in PEFT_FILES else given
    label = folder.resolve().name
    if given.is_file() and folder is given:
        raise ValueError(f"{given} is {_kind_of_file(given)}")
    if not folder.exists() and (match := HUB_NAME.fullmatch(str(path))):
        folder, label = _in_hub(str(path), *match.groups()), match[2]
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no adapter at {given}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or "
            f"org/name of the Hugging Face cache{near_path(given)}"
        )
    _check_files(folder)
    return folder, label


def _in_hub(name: str, owner: str, model: str, revision: str | None) -> Path:
    snapshot = hub_snapshot(owner, model, revision)
    remedy = (
        "Nothing is downloaded here: fill the cache with "
        f"'{download_command(owner, model, revision)}' where there is a network (HF_HUB_CACHE "
        "names another cache), or give a folder's path"
    )
    if snapshot is None:
        at = f", revision {revision}" if revision else ""
        near = nearest(f"{owner}/{model}", cached_names())
        hint = f" Did you mean {near[0]!r}?" if near and near[0] != f"{owner}/{model}" else ""
        raise FileNotFoundError(
            f"no adapter at {name}: there is no such folder, and none of that name in the Hugging "
            f"Face cache ({hub_repo(owner, model)}{at}).{hint} {remedy}{near_path(name)}"
        )
    try:
        _check_files(snapshot)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. {remedy}") from None
    return snapshot


def _check_files(folder: Path) -> None:
    """Both files are there, or the words that say what is there instead."""
    lacking = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).exists()]
    if not lacking:
        return
    if lacking == [WEIGHTS_FILE] and (pickled := _pickles(folder)):
        raise ValueError(f"{folder} holds its weights as {pickled[0]}, {_PICKLE_WORDS}")
    if inside := sorted(each.parent.name for each in folder.glob(f"*/{CONFIG_FILE}")):
        raise FileNotFoundError(
            f"{folder} has no {lacking[0]}. Its sub-folders have one: {shortened(inside)}; load "
            "one of these"
        )
    for pattern, words in _OTHER_LAYOUTS.items():
        if found := sorted(folder.glob(pattern)):
            raise ValueError(f"{folder} has no {lacking[0]}; its {found[0].name} makes it {words}")
    if lacking == [WEIGHTS_FILE]:
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS_FILE}, only its config: the copy or the training's save was "
            "not complete"
        )
    raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}, so it is no PEFT adapter")


_PICKLE_WORDS = (
    f"a pickle, which can run code when read; only {WEIGHTS_FILE} is read. If you trust it, load "
    "it with PEFT and save it again: save_pretrained(folder, safe_serialization=True)"
)


def _pickles(folder: Path) -> list[str]:
    return sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))


def _kind_of_file(file: Path) -> str:
    if any(file.match(pattern) for pattern in _PICKLES):
        return _PICKLE_WORDS
    for pattern, words in _OTHER_LAYOUTS.items():
        if file.match(pattern):
            return words
    single = " (one file of weights, as image tools save it, has no config)" * (
        file.suffix == ".safetensors"
    )
    return f"a file{single}; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
