"""Reading a PEFT folder: every tensor finds its place, or the load says which one does not."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from safetensors import SafetensorError, safe_open

from molora_jax.adapters.adapter import FLOAT_TYPES, Adapter, BaseShape, LoraPair
from molora_jax.adapters.lora_config import CONFIG_FILE, LoraSettings, read_config
from molora_jax.adapters.names import (
    BASE_PREFIX,
    PROJECTIONS,
    TENSOR_PREFIX,
    is_module,
    module_name,
    nearest,
    shortened,
    split_module,
    tensor_key,
)
from molora_jax.adapters.report import LoadReport, public_base_name

WEIGHTS_FILE = "adapter_model.safetensors"
CARD_FILE = "README.md"
PEFT_FILES = frozenset({CONFIG_FILE, WEIGHTS_FILE, CARD_FILE})

_KEY = re.compile(re.escape(TENSOR_PREFIX) + r"(layers\..+)\.lora_([AB])(?:\.default)?\.weight")
# What else PEFT may write, so that a refusal can say what it met.
_KINDS = {
    r"lora_magnitude_vector": "DoRA magnitudes",
    r"lora_embedding_[AB]": "LoRA on an embedding",
    r"\.bias$": "biases",
    r"lm_head.*\.lora_[AB]": "LoRA on the output layer",
    r"modules_to_save|(lm_head|embed_tokens|norm)[\w.]*\.weight$": "full weights of a module",
}


def load_adapter(
    path: str | Path,
    *,
    name: str | None = None,
    config: BaseShape | None = None,
    base_name: str | None = None,
    allow_nonfinite: bool = False,
) -> tuple[Adapter, LoadReport]:
    """Reads a PEFT folder, or refuses it: every tensor is used, or none.

    path       the folder, or a file in it
    name       the adapter's label; the folder's name if None
    config     the base model's config: sizes and layers are checked against it
    base_name  the base's name, compared with the one in the file; a mismatch is a warning
    allow_nonfinite  reads NaN and infinite weights with a warning, to inspect a broken adapter

    Tensors keep the dtype of the file, each its own; a bank converts them to its one dtype.
    Raises ValueError (FileNotFoundError where there is nothing), naming file, key and remedy.
    """
    folder = _find_folder(Path(path))
    name = folder.resolve().name if name is None else name
    where = f"adapter {name!r}: {CONFIG_FILE}"
    stored_config = _read_json(folder / CONFIG_FILE, where)
    settings = read_config(stored_config, where=where)
    tensors = _read_tensors(folder / WEIGHTS_FILE, name)
    num_layers = None if config is None else config.num_layers
    found = _match(tensors, name, num_layers)
    warnings = [*settings.warnings, *_check_targets(settings, list(found), name, num_layers)]
    modules = {}
    for module, (a, b) in found.items():
        _check_rank(settings, module, a, b, name)
        modules[module] = LoraPair(a, b, settings.scale(module))
    adapter = Adapter(name, modules, stored_config)
    if config is not None:
        adapter.check_fits(config)
    if not allow_nonfinite:
        adapter.check_finite()
    elif broken := adapter.nonfinite():
        warnings.append(f"NaN or infinite: {shortened(f'{m} ({n})' for m, n in broken.items())}")
    if unused := settings.unused_keys(modules):
        warnings.append(f"matches no module of the adapter: {shortened(unused)}")
    stated = settings.base_name
    if base_name and stated and _last_part(stated) != _last_part(base_name):
        warnings.append(f"trained on {public_base_name(stated)}, used with {base_name}")
    for text in warnings:
        logging.warning("adapter %r: %s", name, text)
    report = LoadReport.of(adapter, source=str(path), notes=settings.notes, warnings=warnings)
    return adapter, report


def _find_folder(path: Path) -> Path:
    folder = path.parent if path.is_file() and path.name in PEFT_FILES else path
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no adapter at {path}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    if not (folder / CONFIG_FILE).is_file():
        inside = sorted(each.parent.name for each in folder.glob(f"*/{CONFIG_FILE}"))
        hint = (
            f" Its sub-folders have one: {shortened(inside)}; load one of these." if inside else ""
        )
        raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}, so it is no PEFT adapter.{hint}")
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = sorted(f.name for s in ("*.bin", "*.pt", "*.pth") for f in folder.glob(s))
        if pickled:
            raise ValueError(
                f"{folder} holds its weights as {pickled[0]}, a pickle, which can run code when "
                f"read; only {WEIGHTS_FILE} is read. If you trust it, load it with PEFT and save "
                "it again: save_pretrained(folder, safe_serialization=True)"
            )
        raise FileNotFoundError(f"{folder} has no {WEIGHTS_FILE}")
    return folder


def _read_json(file: Path, where: str) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{where} holds a {type(config).__name__}; expected an object")
    return config


def _read_tensors(file: Path, name: str) -> dict[str, np.ndarray]:
    try:
        with safe_open(file, framework="numpy") as stored:
            tensors = {}
            for key in stored.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                dtype = stored.get_slice(key).get_dtype()
                if dtype not in ("F16", "BF16", "F32", "F64"):
                    raise ValueError(
                        f"adapter {name!r}: tensor {key!r} is {dtype}; expected one of "
                        f"{', '.join(FLOAT_TYPES)}. Save the adapter again unquantised"
                    )
                tensors[key] = stored.get_tensor(key)
    except SafetensorError as error:
        raise ValueError(
            f"adapter {name!r}: {file} is damaged or cut short ({error}); copy it again"
        ) from error
    if not tensors:
        raise ValueError(
            f"adapter {name!r}: {WEIGHTS_FILE} holds 0 tensors. Its training saved nothing: the "
            "base would run unchanged"
        )
    return tensors


def _match(
    tensors: dict[str, np.ndarray], name: str, num_layers: int | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{module: (A, B)} from all tensors, or an error that lists those with no place."""
    found: dict[str, dict[str, np.ndarray]] = {}
    unmatched = []
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or not is_module(match[1]):
            unmatched.append(key)
        elif match[2] in found.setdefault(match[1], {}):
            raise ValueError(
                f"adapter {name!r}: {match[1]} has two lora_{match[2]} tensors, with and without "
                "'.default'. Save one adapter per file"
            )
        else:
            found[match[1]][match[2]] = tensor
    if unmatched:
        raise ValueError(_unmatched_message(unmatched, found, name, num_layers))
    for module, pair in found.items():
        for here, missing in ("AB", "BA"):
            if missing not in pair:
                raise ValueError(
                    f"adapter {name!r}: {module} has lora_{here} but no lora_{missing}; the file "
                    f"is incomplete: {tensor_key(module, missing)!r} is expected"
                )
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _unmatched_message(
    unmatched: list[str], found: dict[str, Any], name: str, num_layers: int | None
) -> str:
    layers = num_layers or max((split_module(m)[0] for m in found), default=0) + 1
    known = [
        tensor_key(module_name(layer, projection), matrix)
        for layer in range(layers)
        for projection in PROJECTIONS
        for matrix in "AB"
    ]
    lines = []
    for key in sorted(unmatched)[:5]:
        kind = next((text for pattern, text in _KINDS.items() if re.search(pattern, key)), None)
        near = nearest(key, known)
        hint = f" ({kind})" if kind else f" (nearest known: {near[0]!r})" if near else ""
        lines.append(f"{key!r}{hint}")
    if len(unmatched) > 5:
        lines.append(f"and {len(unmatched) - 5} more")
    others = {key.split(".lora_")[0] for key in unmatched} - {TENSOR_PREFIX + m for m in found}
    return (
        f"adapter {name!r} is refused: matched {len(found)} of {len(found) + len(others)} modules. "
        f"{len(unmatched)} tensors of {WEIGHTS_FILE} have no place: {'; '.join(lines)}. Expected "
        f"LoRA matrices of {', '.join(PROJECTIONS)}, named as {known[0]!r}. Without these tensors "
        "it would be another adapter: merge it into its base with PEFT, correct the names, or "
        "train on these projections only"
    )


def _check_targets(
    settings: LoraSettings, modules: list[str], name: str, num_layers: int | None
) -> list[str]:
    """Holds target_modules against the tensors: warnings, or an error where some are missing."""
    layers = num_layers or max(split_module(module)[0] for module in modules) + 1
    possible = [module_name(layer, p) for layer in range(layers) for p in PROJECTIONS]
    targets = settings.target_modules
    if targets is None:
        return []
    missing = [m for m in possible if m not in modules and settings.targets(m)]
    if missing:
        raise ValueError(
            f"adapter {name!r}: {CONFIG_FILE} targets {len(missing)} modules for which "
            f"{WEIGHTS_FILE} has no tensors: {shortened(missing)}. They would run as the base. If "
            "that is meant, narrow target_modules (or layers_to_transform) to what was trained"
        )
    warnings = []
    if extra := [module for module in modules if not settings.targets(module)]:
        warnings.append(
            f"{len(extra)} modules have tensors but are not in target_modules; used all the same: "
            + shortened(extra)
        )
    if isinstance(targets, list):
        names = [BASE_PREFIX + module for module in possible]
        idle = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
        if idle:
            warnings.append(f"target_modules without tensors, not applied: {shortened(idle)}")
    return warnings


def _check_rank(
    settings: LoraSettings, module: str, a: np.ndarray, b: np.ndarray, name: str
) -> None:
    stated = settings.rank(module)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != stated or b.shape[1] != stated:
        raise ValueError(
            f"adapter {name!r}: {module} has lora_A {a.shape} and lora_B {b.shape}, but "
            f"{CONFIG_FILE} gives it rank {stated} (r or rank_pattern): expected ({stated}, in) "
            f"and (out, {stated}). The scale depends on the rank, so correct the config"
        )


def _last_part(name: str) -> str:
    """Of org/name or org/name@revision the name, of a path its last folder."""
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1].split("@")[0].lower()
