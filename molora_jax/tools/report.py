"""What the verbs share: JSON without NaN, folders to write, norms beside those of a base."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition_record import read_record
from molora_jax.adapters.folders import check_writable
from molora_jax.adapters.lowrank import update_norm
from molora_jax.adapters.names import split_module
from molora_jax.adapters.peft_folder import find_peft_folder
from molora_jax.display.terminal import painted
from molora_jax.files import read_text
from molora_jax.models.decoder import Decoder


def print_json(value: Any) -> None:
    """One object on standard output; what is not finite is null."""
    print(json.dumps(_plain(value), indent=1, allow_nan=False, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_there(adapters: Iterable[str | Path] = (), composition: str | None = None) -> None:
    """Raises where a folder to read is none, before a base is loaded, which takes long."""
    for path in adapters:
        find_peft_folder(path)
    if composition is not None:
        read_record(Path(composition))


def next_step(args: argparse.Namespace, *words: str, why: str = "") -> None:
    """The command that comes next, as it would be typed here."""
    line = f"{args.prog} {shlex.join(words)}"
    print(f"next{f', {why}' if why else ''}: {painted(line, 'bold', sys.stdout)}", flush=True)


def check_free(out: str | Path, *, overwrite: bool, sources: Iterable[str | Path] = ()) -> None:
    """Raises where the folder to write is there, or cannot be, before anything is computed for it.

    ValueError, and OSError where the system refuses; `new_folder` looks again.

    `sources` is what is read for it: even with `overwrite` nothing is written over its own source.
    """
    path = Path(out)
    for source in sources:
        if Path(source).expanduser().resolve().is_relative_to(path.expanduser().resolve()):
            raise ValueError(f"{out} is read and would be overwritten: write to another folder")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{out} is a file; expected a folder to write. Choose another path")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise ValueError(f"{out} exists already. Choose another path, or pass --overwrite")
    check_writable(path)


def text_of(text: str | None, file: Path | None, default: str = "") -> str:
    """The text given, or that of the file. Raises ValueError where there is none in it.

    An editor ends a file with a line break, which as a part of the prompt would change the answer.
    """
    if file is not None:
        text = read_text(file, where=str(file))
        text = text.removesuffix("\n").removesuffix("\r")
    text = default if text is None else text
    if not text.strip():
        raise ValueError("the text is empty" if file is None else f"{file} holds no text")
    return text


def relative_updates(
    adapter: Adapter, decoder: Decoder, *, norms: dict[str, float] | None = None
) -> dict[str, dict[int, float]]:
    """{projection: {layer: ‖scale·B·A‖ / ‖W‖}} of the modules it adapts.

    norms  {module: ‖W‖} that are known, and are added to: several adapters read a base once
    """
    found: dict[str, dict[int, float]] = {projection: {} for projection in adapter.projections}
    norms = {} if norms is None else norms
    for module, pair in adapter.modules.items():
        layer, projection = split_module(module)
        if module not in norms:
            weight = np.asarray(getattr(decoder.layers, projection).weight[...][layer], np.float32)
            norms[module] = math.sqrt(float(np.sum(np.square(weight, dtype=np.float64))))
        norm = norms[module]
        found[projection][layer] = update_norm(pair) / norm if norm else math.inf
    return found


def percent(value: float) -> str:
    """A share of 1 in per cent; NaN and infinity as they are."""
    return f"{value:.2%}" if math.isfinite(value) else str(value)
