"""Reading an adapter: every tensor of a PEFT folder finds its place, or the load says which not."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import logging

from molora_jax.adapters.adapter import FLOAT_TYPES, Adapter, BaseShape, LoraPair
from molora_jax.adapters.lora_config import LoraSettings, read_config
from molora_jax.adapters.names import (
    PROJECTIONS,
    brief,
    check_label,
    module_name,
    shortened,
    tensor_key,
)
from molora_jax.adapters.peft_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftFolder,
    read_peft_folder,
)
from molora_jax.adapters.peft_keys import (
    UNUSED,
    check_one_spelling,
    last_layer,
    parse_key,
    spelling_notes,
    unmatched_message,
)
from molora_jax.adapters.report import LoadReport, public_base_name
from molora_jax.hub import same_model
from molora_jax.routing.statistics_file import STATISTICS_FILE, read_packed


def load_adapter(
    path: str | Path,
    *,
    name: str | None = None,
    config: BaseShape | None = None,
    base_name: str | None = None,
    allow_nonfinite: bool = False,
) -> tuple[Adapter, LoadReport]:
    """Reads a PEFT folder, or refuses it: every tensor is used, or none.

    path       the folder, a file in it, or org/name[@revision] of the local Hugging Face cache
               (which is read and never filled; what exists as a path is taken as one)
    name       the adapter's label; the folder's name if None
    config     the base model's config: sizes and layers are checked against it
    base_name  the base's name, compared with the one in the file; a mismatch is a warning
    allow_nonfinite  reads NaN and infinite weights with a warning, to inspect a broken adapter

    Tensors keep the dtype of the file, each its own; a bank converts them to its one dtype.
    Raises ValueError (FileNotFoundError where there is nothing), naming file, key and remedy.

        >>> folder = mj.save_adapter(code, tmp / "code")
        >>> adapter, report = mj.load_adapter(folder, config=base.config)
        >>> adapter.digest == code.digest, len(report.matched)
        (True, 16)
    """
    folder = read_peft_folder(path, name=name)
    name = check_label(folder.label if name is None else name)
    settings = read_config(folder.config, where=f"adapter {name!r}: {CONFIG_FILE}")
    stated = settings.base_name
    other_base = bool(base_name and stated and not same_model(stated, base_name))
    shown = public_base_name(stated), public_base_name(base_name)
    try:
        adapter, notes, warnings = _adapter_of(folder, settings, name, config)
    except ValueError as error:
        if not other_base:
            raise
        # That is why it does not fit; the modules follow from it.
        rest = str(error).removeprefix(f"adapter {name!r}").removeprefix(" is refused")
        raise ValueError(
            f"adapter {name!r} was trained on {shown[0]} and does not fit {shown[1]}: "
            f"{rest.lstrip(': ')}"
        ) from None
    try:
        adapter = adapter.with_statistics(read_packed(folder.path))
    except FileNotFoundError:
        pass
    except ValueError as error:  # another tool may leave the file where it writes another adapter
        warnings.append(f"{STATISTICS_FILE} is not used: {error}")
    if not allow_nonfinite:
        adapter.check_finite()
    elif broken := adapter.nonfinite():
        warnings.append(f"NaN or infinite: {shortened(f'{m} ({n})' for m, n in broken.items())}")
    if other_base:
        warnings.append(f"trained on {shown[0]}, used with {shown[1]}")
    for text in warnings:
        logging.warning("adapter %r: %s", name, text)
    skipped = [key for key in folder.tensors if UNUSED.fullmatch(key)]
    report = LoadReport.of(
        adapter,
        source=str(path),
        notes=[*settings.notes, *notes],
        warnings=warnings,
        unmatched=skipped,
    )
    return adapter, report


def _adapter_of(
    folder: PeftFolder, settings: LoraSettings, name: str, config: BaseShape | None
) -> tuple[Adapter, list[str], list[str]]:
    """The adapter, notes and warnings; ValueError for a tensor that has no place (in the base)."""
    num_layers = None if config is None else config.num_layers
    found, notes = _match(folder.tensors, name, num_layers)
    paths = {module: module_path for module, (module_path, _, _) in found.items()}
    modules = {}
    for module, (module_path, a, b) in found.items():
        _check_rank(settings.rank(module_path), module, a, b, name)
        modules[module] = LoraPair(a, b, settings.scale(module_path))
    adapter = Adapter(name, modules, folder.config)
    if config is not None:
        # Before the targets: of another base's layers the file has no tensors, and need not.
        adapter.check_fits(config)
    warnings = [*settings.warnings, *_check_targets(settings, paths, name, num_layers)]
    if unused := settings.unused_keys(paths.values()):
        warnings.append(f"matches no module of the adapter: {shortened(unused)}")
    return adapter, notes, warnings


def _match(
    tensors: Mapping[str, np.ndarray], name: str, num_layers: int | None
) -> tuple[dict[str, tuple[str, np.ndarray, np.ndarray]], list[str]]:
    """{module: (its name in the file's base, A, B)} of all tensors, and notes on their names."""
    if not tensors:
        raise ValueError(
            f"adapter {name!r}: {WEIGHTS_FILE} holds 0 tensors. Its training saved nothing: the "
            "base would run unchanged"
        )
    parsed = {key: parse_key(key) for key in tensors}
    keys = {key: each for key, each in parsed.items() if each is not None}
    modules = {each.module for each in keys.values()}
    skipped = [key for key in parsed if UNUSED.fullmatch(key)]
    if unmatched := [key for key in parsed if key not in keys and key not in skipped]:
        layers = num_layers or last_layer(modules) + 1
        problem = unmatched_message(unmatched, keys, modules, layers=layers)
        raise ValueError(f"adapter {name!r} is refused: {WEIGHTS_FILE}: {problem}")
    if not keys:
        raise ValueError(f"adapter {name!r} is refused: {WEIGHTS_FILE} holds no LoRA matrices")
    try:
        check_one_spelling(keys)
    except ValueError as error:
        raise ValueError(f"adapter {name!r}: {WEIGHTS_FILE}: {error}") from None
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for key, each in keys.items():
        if tensors[key].dtype.name not in FLOAT_TYPES:
            raise ValueError(
                f"adapter {name!r}: tensor {brief(key, limit=200)} is {tensors[key].dtype}; "
                f"expected one of {', '.join(FLOAT_TYPES)}. Save the adapter again unquantised"
            )
        pairs.setdefault(each.module, {})[each.matrix] = tensors[key]
    for module, pair in pairs.items():
        for here, missing in ("AB", "BA"):
            if missing not in pair:
                raise ValueError(
                    f"adapter {name!r}: {module} has lora_{here} but no lora_{missing}; the file "
                    f"is incomplete: {tensor_key(module, missing)!r} is expected"
                )
    notes = spelling_notes(keys)
    if skipped:
        notes.append(f"{len(skipped)} buffers of VeLoRA's training are not used")
    prefix = next(iter(keys.values())).prefix
    return {m: (prefix + m, pair["A"], pair["B"]) for m, pair in pairs.items()}, notes


def _check_targets(
    settings: LoraSettings, paths: Mapping[str, str], name: str, num_layers: int | None
) -> list[str]:
    """Holds target_modules against the tensors: warnings, or an error where some are missing.

    paths  {module: its name in the file's own base}
    """
    targets = settings.target_modules
    if targets is None:
        return []
    module, path = next(iter(paths.items()))
    prefix = path.removesuffix(module)
    layers = num_layers or last_layer(paths) + 1
    possible = [module_name(layer, p) for layer in range(layers) for p in PROJECTIONS]
    missing = [m for m in possible if m not in paths and settings.targets(prefix + m)]
    if missing:
        raise ValueError(
            f"adapter {name!r}: {CONFIG_FILE} targets {len(missing)} modules for which "
            f"{WEIGHTS_FILE} has no tensors: {shortened(missing)}. They would run as the base. If "
            "that is meant, narrow target_modules (or layers_to_transform) to what was trained"
        )
    warnings = []
    if extra := [m for m, path in paths.items() if not settings.targets(path)]:
        warnings.append(
            f"{len(extra)} modules have tensors, but target_modules, exclude_modules or "
            "layers_to_transform leave them out. They are used all the same, where PEFT would "
            f"drop them: {shortened(extra)}"
        )
    if isinstance(targets, list):
        names = [prefix + module for module in possible]
        idle = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
        if idle:
            warnings.append(f"target_modules without tensors, not applied: {shortened(idle)}")
    return warnings


def _check_rank(stated: int, module: str, a: np.ndarray, b: np.ndarray, name: str) -> None:
    if not a.size or not b.size:
        raise ValueError(
            f"adapter {name!r}: {module} has lora_A {a.shape} and lora_B {b.shape}, without a "
            "number in them. Sharded training (ZeRO-3, FSDP) saves such where it does not gather "
            "the weights first: save it again with the whole state dict"
        )
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] == stated != a.shape[0]:
        raise ValueError(
            f"adapter {name!r}: {module} has lora_A {a.shape} and lora_B {b.shape}, which are "
            f"transposed: PEFT stores A ({stated}, in) and B (out, {stated}). Save them so"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != stated or b.shape[1] != stated:
        raise ValueError(
            f"adapter {name!r}: {module} has lora_A {a.shape} and lora_B {b.shape}, but "
            f"{CONFIG_FILE} gives it rank {stated} (r or rank_pattern): expected ({stated}, in) "
            f"and (out, {stated}). The scale depends on the rank, so correct the config"
        )
