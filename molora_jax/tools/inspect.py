"""`inspect`: what an adapter, composition or checkpoint holds, and whether it would load here."""

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax.adapters import Adapter, LoraPair, load_adapter
from molora_jax.adapters.composition_record import (
    ADAPTERS_FOLDER,
    RECORD_FILE,
    ROUTER_FILE,
    read_record,
    seal,
)
from molora_jax.adapters.lora_config import LoraSettings, read_config
from molora_jax.adapters.lora_fields import READ, refused_fields
from molora_jax.adapters.lowrank import update_norm
from molora_jax.adapters.names import split_module
from molora_jax.adapters.peft_folder import WEIGHTS_FILE, PeftFolder, read_peft_folder
from molora_jax.adapters.peft_keys import parse_key
from molora_jax.adapters.report import public_base_name
from molora_jax.display import show
from molora_jax.files import inside, read_safetensors
from molora_jax.models import BaseModel, ModelConfig, load_base
from molora_jax.models.digest import file_digest
from molora_jax.tools.compose_check import size_warning
from molora_jax.tools.inspect_text import adapter_tables, checkpoint_tables, composition_tables
from molora_jax.tools.report import check_there, next_step, print_json, relative_updates
from molora_jax.training.checkpoint import describe_checkpoint, find_checkpoints

# A LoRA matrix of any architecture: what stands before it names the module.
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 where what it is of would not load."""
    path = Path(args.path).expanduser()
    is_composition = (path / RECORD_FILE).is_file()
    checkpoints = None if is_composition else find_checkpoints(path)
    if not is_composition and checkpoints is None:
        check_there([args.path])
    base = load_base(args.base) if args.base and checkpoints is None else None
    if is_composition:
        found = inspect_composition(path, base)
        tables = composition_tables(found)
    elif checkpoints is not None:
        if args.base:
            raise ValueError(
                f"{args.path} is a training checkpoint, which is not compared with a base: convert "
                "it to an adapter first (convert SRC DST)"
            )
        found = {"kind": "checkpoint", **describe_checkpoint(checkpoints)}
        tables = checkpoint_tables(found)
    else:
        found = inspect_adapter(args.path, base)
        tables = adapter_tables(found)
    if args.json:
        print_json(found)
    else:
        show(*tables)
        if base and found.get("loads"):
            _say_next(args, found)
    return 0 if found.get("loads", True) else 1


def _say_next(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """The way to a routed answer, from where this is."""
    if found["kind"] == "composition":
        given = ["--composition", args.path, "--prompt", "TEXT"]
        next_step(args, "generate", "--base", args.base, *given)
    elif not (found["statistics"] or {}).get("of_this_base"):
        given = ["--base", args.base, "--data", "FILE"]
        next_step(args, "statistics", args.path, *given, why="to have it in a composition")


def inspect_adapter(
    path: str | Path, base: BaseModel | None = None, *, name: str | None = None
) -> dict[str, Any]:
    """All that can be said of a PEFT folder of any architecture, whether or not it would load.

    Raises ValueError or FileNotFoundError only where the files cannot be read at all.
    """
    folder = read_peft_folder(path, name=name)
    config = folder.config
    adapter, report, refusal = None, None, None
    try:
        adapter, report = load_adapter(
            path,
            name=name,
            config=base and base.config,
            base_name=base and base.name,
            allow_nonfinite=True,
        )
    except ValueError as error:
        refusal = str(error)
    broken = {key: int((~np.isfinite(tensor)).sum()) for key, tensor in folder.tensors.items()
              if tensor.dtype.kind in "fV" and not np.isfinite(tensor).all()}  # fmt: skip
    pairs, others = _pairs(folder, adapter)
    relative = relative_updates(adapter, base.decoder) if adapter and base else None
    warnings = list(report.warnings) if report else []
    if relative and (large := size_warning(relative)):
        warnings.append(large)
    weights = folder.path / WEIGHTS_FILE
    found = {
        "kind": "adapter",
        "name": name or folder.label,
        "type": config.get("peft_type"),
        "variants": refused_fields(config),
        "base": public_base_name(_text_or_none(config.get("base_model_name_or_path"))),
        "r": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "use_rslora": bool(config.get("use_rslora")),
        "rank_pattern": config.get("rank_pattern") or {},
        "alpha_pattern": config.get("alpha_pattern") or {},
        "target_modules": config.get("target_modules"),
        "tensors": len(folder.tensors),
        "parameters": sum(tensor.size for tensor in folder.tensors.values()),
        "bytes": weights.stat().st_size,
        "dtypes": dict(Counter(tensor.dtype.name for tensor in folder.tensors.values())),
        "nonfinite": broken,
        "projections": _projections(pairs, relative),
        "other_tensors": others,
        "loads": refusal is None and not broken,
        "refusal": refusal or ("it has NaN or infinite weights" if broken else None),
        "statistics": _statistics(adapter, base) if adapter else None,
        "digest": adapter and adapter.digest,
        "file_sha256": file_digest(weights),
        "notes": list(report.notes) if report else [],
        "warnings": warnings,
    }
    if base:
        unmatched = _unmatched(folder, base.config)
        count = len(folder.tensors)
        found["against"] = {
            "base": base.name,
            "matched": count - len(unmatched),
            "of": count,
            "unmatched": unmatched,
            "relative_updates": relative,
        }
    return found


def _statistics(adapter: Adapter, base: BaseModel | None) -> dict[str, Any] | None:
    """What the router statistics beside an adapter are of; None where it has none of its own."""
    packed = adapter.statistics
    if packed is None:
        return None
    return {
        "tokens": packed.count,
        "features": packed.num_features or packed.d_model,
        "base": packed.base,
        "of_this_base": packed.base == base.digest if base else None,
    }


def inspect_composition(path: Path, base: BaseModel | None = None) -> dict[str, Any]:
    """The record, router and adapters of a composition's folder, and what does not agree.

    Raises ValueError only where its molora.json cannot be read.
    """
    record = read_record(path)
    problems, adapters = [], []
    for entry in record.adapters:
        try:
            folder = inside(path / ADAPTERS_FOLDER / entry.name, path)
            found = inspect_adapter(folder, base, name=entry.name)
        except (ValueError, FileNotFoundError) as error:
            problems.append(f"adapter {entry.name!r}: {error}")
            continue
        if not found["loads"]:
            problems.append(f"adapter {entry.name!r} would not load: {found['refusal']}")
        elif found["digest"] != entry.sha256:
            problems.append(f"adapter {entry.name!r} is not the one saved: its digest differs")
        adapters.append({"slot": entry.slot, **found})
    # Without a digest it does not load, beside another base for example, and may be the right one.
    there = {each["name"]: each["digest"] for each in adapters}
    names = {
        each.sha256: each.name
        for each in record.adapters
        if there.get(each.name, "gone") in (None, each.sha256)
    }
    columns = [names.get(digest) for digest in record.columns]
    problems += [f"column {i} has no adapter" for i, name in enumerate(columns) if name is None]
    arrays, values = {}, {}
    try:
        stored = read_safetensors(path / ROUTER_FILE, where=ROUTER_FILE, root=path)
        for key in stored.keys():  # noqa: SIM118 (no mapping)
            value = values[key] = stored.get(key)
            arrays[key] = {"dtype": value.dtype.name, "shape": list(value.shape)}
            if not np.isfinite(value).all():
                problems.append(f"router: {key} has NaN or infinite numbers")
        if seal(record.content, values) != record.sha256:
            problems.append(f"{RECORD_FILE} and {ROUTER_FILE} are not those saved together")
    except (ValueError, FileNotFoundError) as error:
        problems.append(str(error))
    if base and record.base_sha256 != base.digest:
        problems.append(f"made for another base than {base.name}: its digest differs")
    return {
        "kind": "composition",
        "base": {"name": record.base_name, "sha256": record.base_sha256},
        "bank": record.bank,
        "router": record.router,
        "router_arrays": arrays,
        "columns": columns,
        "labels_used": record.labels_used,
        "metrics": record.metrics,
        "adapters": adapters,
        "loads": not problems,
        "problems": problems,
    }


def _pairs(
    folder: PeftFolder, adapter: Adapter | None
) -> tuple[dict[str, LoraPair], dict[str, list[int]]]:
    """LoRA pairs by module, of any architecture, and the shapes of all other tensors."""
    halves: dict[str, dict[str, tuple[str, np.ndarray]]] = {}
    others = {key: list(tensor.shape) for key, tensor in folder.tensors.items()}
    for key, tensor in folder.tensors.items():
        if match := _MATRIX.fullmatch(key):
            halves.setdefault(match[1], {})[match[2]] = key, tensor
    pairs, settings = {}, _settings(folder.config)
    for module, pair in halves.items():
        if settings is None:
            break
        try:
            (key_a, a), (key_b, b) = pair["A"], pair["B"]
            pairs[module] = LoraPair(a, b, settings.scale(module))
        except (KeyError, ValueError):  # a half, or shapes that make no product: an other tensor
            continue
        del others[key_a], others[key_b]
    # What loads says itself how it is scaled.
    return (pairs if adapter is None else dict(adapter.modules)), others


def _settings(config: Mapping[str, Any]) -> LoraSettings | None:
    """What the config says of ranks and scales, other kinds left aside; None if it is no sense."""
    plain = {name: value for name, value in config.items() if name in READ}
    try:
        return read_config({**plain, "peft_type": "LORA", "task_type": None}, where="here")
    except ValueError:
        return None


def _projections(pairs: Mapping[str, LoraPair], relative: Any) -> dict[str, dict[str, Any]]:
    """Per kind of module (the last part of its name), over all layers: Frobenius norms."""
    groups: dict[str, list[LoraPair]] = {}
    for module, pair in pairs.items():
        groups.setdefault(module.rpartition(".")[2], []).append(pair)

    def norm(matrices: list[np.ndarray]) -> float:
        with np.errstate(invalid="ignore", over="ignore"):
            return math.sqrt(sum(float(np.square(m.astype(np.float64)).sum()) for m in matrices))

    return {
        projection: {
            "modules": len(group),
            "in": sorted({pair.a.shape[1] for pair in group}),
            "out": sorted({len(pair.b) for pair in group}),
            "ranks": sorted({pair.rank for pair in group}),
            "scales": sorted({pair.scale for pair in group}),
            "norm_a": norm([pair.a for pair in group]),
            "norm_b": norm([pair.b for pair in group]),
            "norm_update": math.sqrt(sum(update_norm(pair) ** 2 for pair in group)),
            **({"relative": _span(relative[projection].values())} if relative else {}),
        }
        for projection, group in groups.items()
    }


def _span(values: Any) -> list[float]:
    return [min(values), max(values)]


def _unmatched(folder: PeftFolder, config: ModelConfig) -> list[str]:
    """The tensors that have no place in this base, by name or by shape."""
    sizes = config.projection_sizes()

    def fits(key: str, tensor: np.ndarray) -> bool:
        parsed = parse_key(key)
        if parsed is None or tensor.ndim != 2:
            return False
        layer, projection = split_module(parsed.module)
        width = tensor.shape[1] if parsed.matrix == "A" else tensor.shape[0]
        return layer < config.num_layers and width == sizes[projection][parsed.matrix == "B"]

    return [key for key, tensor in folder.tensors.items() if not fits(key, tensor)]


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None
