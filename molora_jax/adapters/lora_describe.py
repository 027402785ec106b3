"""adapter_config.json for given modules, which PEFT and this package read back as they are."""

import math
import statistics
from collections.abc import Mapping
from itertools import product
from typing import Any

from molora_jax.adapters.lora_config import lora_scale, read_config
from molora_jax.adapters.names import BASE_PREFIX, PROJECTIONS, module_name, split_module


def new_config(
    ranks: Mapping[str, int],
    *,
    alpha: int | float | Mapping[str, int | float],
    use_rslora: bool,
    base_name: str | None,
    num_layers: int | None,
) -> dict[str, Any]:
    """A complete adapter_config.json for modules of the given ranks, with one alpha or one each."""
    alphas = alpha if isinstance(alpha, Mapping) else dict.fromkeys(ranks, alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "auto_mapping": None,
        "inference_mode": True,
        "use_rslora": use_rslora,
        **_per_module(ranks, alphas),
        "target_modules": _targets(ranks, num_layers),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "bias": "none",
        "lora_bias": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "layer_replication": None,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
    }


def fitted_config(
    config: Mapping[str, Any], modules: Mapping[str, tuple[int, float]], *, name: str
) -> dict[str, Any]:
    """`config` where it describes these modules {name: (rank, scale)}; else made to do so.

    Only what says ranks, scales and targets is changed; the rest (base, dropout, ...) is kept. It
    happens to an adapter that was put together in memory, or read under other key names.

    Raises ValueError where a scale is no alpha/r or alpha/√r of any floating-point alpha.
    """
    if config and _describes(config, modules, name):
        return dict(config)
    ranks = {module: rank for module, (rank, _) in modules.items()}
    first = config.get("use_rslora") is True
    for use_rslora in (first, not first):
        alphas = {
            module: alpha_of(scale, rank, use_rslora=use_rslora)
            for module, (rank, scale) in modules.items()
        }
        lost = [module for module, alpha in alphas.items() if alpha is None]
        if not lost:
            break
    else:
        rank, scale = modules[lost[0]]
        raise ValueError(
            f"adapter {name!r} is not saved: the scale {scale!r} of {lost[0]} (rank {rank}) is no "
            "lora_alpha / rank of any floating-point alpha, so a PEFT folder cannot hold it "
            "exactly. Choose an alpha and take scale = alpha / rank"
        )
    whole = new_config(
        ranks,
        alpha={module: alpha for module, alpha in alphas.items() if alpha is not None},
        use_rslora=use_rslora,
        base_name=None,
        num_layers=None,
    )
    decided = ("use_rslora", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules")
    narrowing = ("exclude_modules", "layers_to_transform", "layers_pattern")
    return {**whole, **config, **{field: whole[field] for field in (*decided, *narrowing)}}


def alpha_of(scale: float, rank: int, *, use_rslora: bool = False) -> int | float | None:
    """The alpha for which `lora_scale` gives exactly `scale`; None where no float does.

    One exists for a power of two as the rank, for any scale that began as an alpha, and for nine in
    ten others: division skips a float where alpha's own steps are the coarser ones.
    """
    near = scale * (math.sqrt(rank) if use_rslora else rank)
    if not math.isfinite(near):
        return None
    for alpha in (round(near), near):  # a whole number where it is as good
        if lora_scale(alpha, rank, use_rslora=use_rslora).hex() == scale.hex():
            return _whole(alpha)
    return None


def _describes(
    config: Mapping[str, Any], modules: Mapping[str, tuple[int, float]], name: str
) -> bool:
    """Whether reading the config under the names that are written gives back these modules."""
    settings = read_config({**config, "peft_type": "LORA"}, where=f"adapter {name!r}: its config")
    layers = max(split_module(module)[0] for module in modules) + 1
    possible = [module_name(*each) for each in product(range(layers), PROJECTIONS)]
    for module in possible:
        path = BASE_PREFIX + module
        if module not in modules:
            if settings.target_modules is not None and settings.targets(path):
                return False
            continue
        rank, scale = modules[module]
        # By their digits, since 0.0 == -0.0 and the digest tells them apart.
        same = settings.rank(path) == rank and settings.scale(path).hex() == scale.hex()
        if not same or not settings.targets(path):
            return False
    return True


def _per_module(
    ranks: Mapping[str, int], alphas: Mapping[str, int | float]
) -> dict[str, int | float | dict[str, int | float]]:
    """The commonest rank and alpha, and the others by whole name, which every PEFT matches."""
    # Some readers take whole numbers only.
    alphas = {module: _whole(each) for module, each in alphas.items()}
    r = statistics.mode(ranks.values()) if ranks else 1
    alpha = statistics.mode(alphas.values()) if alphas else 1
    return {
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {BASE_PREFIX + m: rank for m, rank in ranks.items() if rank != r},
        "alpha_pattern": {BASE_PREFIX + m: each for m, each in alphas.items() if each != alpha},
    }


def _targets(ranks: Mapping[str, int], num_layers: int | None) -> list[str]:
    """Projections where each is adapted in all layers; else whole names.

    With these PEFT adapts no module that has no tensors.
    """
    projections = [p for p in PROJECTIONS if any(name.endswith(f".{p}") for name in ranks)]
    everywhere = {module_name(*each) for each in product(range(num_layers or 0), projections)}
    return projections if everywhere == set(ranks) else [BASE_PREFIX + name for name in ranks]


def _whole(alpha: int | float) -> int | float:
    """A whole number as int; but -0.0 is none, and a long one would not be read back."""
    whole = float(alpha).is_integer() and abs(alpha) < 2**53
    return int(alpha) if whole and str(alpha) != "-0.0" else alpha
