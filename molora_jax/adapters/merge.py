"""Merging: several adapters into one, or into the arrays of a base, and truncation by SVD.

ΔW = Σ_i w_i · scale_i · B_i·A_i. As one adapter that is exactly the matrices side by side:
A = [A_1; A_2; …], B = [w_1·scale_1·B_1, w_2·scale_2·B_2, …], with the scale 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from molora_jax.adapters.adapter import Adapter, BaseShape, LoraPair
from molora_jax.adapters.lora_config import read_config
from molora_jax.adapters.lora_describe import new_config
from molora_jax.adapters.lowrank import truncated
from molora_jax.adapters.names import (
    BASE_PREFIX,
    module_name,
    nearest,
    split_module,
)
from molora_jax.adapters.report import public_base_name
from molora_jax.hub import same_model


@dataclass(frozen=True)
class Change:
    """What merging did to one projection of the base, over all layers.

    relative  ‖ΔW‖ / ‖W‖ (Frobenius)
    rounding  the part of ΔW that the dtype of the weights could not hold: ‖W' − W − ΔW‖ / ‖ΔW‖
    """

    projection: str
    modules: int
    relative: float
    rounding: float


def merge_adapters(
    adapters: Sequence[Adapter],
    *,
    weights: Mapping[str, float] | None = None,
    name: str,
    rank: int | None = None,
    base_name: str | None = None,
    num_layers: int | None = None,
) -> tuple[Adapter, dict[str, float]]:
    """Σ w_i · adapter_i as one adapter in float32, and the relative error of every module.

    weights    {name: w}; 1 where none is given
    rank       the largest rank that comes out; None: the sum of the ranks, and nothing is lost
    num_layers of the base, where known: the config can then name projections and not modules

    The errors are ‖ΔW − ΔW'‖ / ‖ΔW‖ of what truncation left out, 0 for a module that it did not
    touch. Raises ValueError where names repeat, weights name nobody, adapters are not of one base's
    sizes, or a weight is not finite before or after.
    """
    weights = _checked(adapters, weights)
    _check_sizes(adapters)
    modules, errors = {}, {}
    for module in sorted({m for each in adapters for m in each.modules}):
        parts = [(each.modules[module], weights[each.name]) for each in adapters
                 if module in each.modules]  # fmt: skip
        a = np.concatenate([pair.a.astype(np.float64) for pair, _ in parts])
        b = np.concatenate([w * pair.scale * pair.b.astype(np.float64) for pair, w in parts], 1)
        errors[module] = 0.0
        if rank is not None and len(a) > rank:
            a, b, errors[module] = truncated(a, b, rank)
        modules[module] = _pair(a, b, module)
    ranks = {module: pair.rank for module, pair in modules.items()}
    # alpha = rank, the scale 1 for all: right also where a reader overlooks both patterns.
    described = new_config(
        ranks, alpha=ranks, use_rslora=False, base_name=base_name, num_layers=num_layers
    )
    return Adapter(name, modules, described), errors


def truncate_adapter(
    adapter: Adapter, rank: int, *, num_layers: int | None = None
) -> tuple[Adapter, dict[str, float]]:
    """The nearest adapter (Frobenius) of at most this rank, and each module's relative error."""
    return merge_adapters(
        [adapter],
        name=adapter.name,
        rank=rank,
        base_name=adapter.config.get("base_model_name_or_path"),
        num_layers=num_layers,
    )


def merge_into(
    arrays: Mapping[str, np.ndarray],
    config: BaseShape,
    adapters: Sequence[Adapter],
    *,
    weights: Mapping[str, float] | None = None,
    dtype: str = "float32",
) -> tuple[dict[str, np.ndarray], list[Change]]:
    """The base's stacked arrays with W + ΔW in place of W, in `dtype`, and what changed.

    arrays  {"layers.self_attn.q_proj.weight": (L, F, D), …}; others are handed through as they are

    Raises ValueError where an adapter does not fit the base, or where a number is not finite in
    the adapters, in W, or in `dtype` after the sum.
    """
    weights = _checked(adapters, weights)
    for each in adapters:
        each.check_fits(config)
    merged, changes = dict(arrays), []
    for projection in dict.fromkeys(p for each in adapters for p in each.projections):
        key = f"layers.{module_name(0, projection).split('.', 2)[2]}.weight"
        merged[key], change = _merged_stack(arrays[key], projection, adapters, weights, dtype)
        changes.append(change)
    return merged, changes


def _merged_stack(
    stack: np.ndarray,
    projection: str,
    adapters: Sequence[Adapter],
    weights: Mapping[str, float],
    dtype: str,
) -> tuple[np.ndarray, Change]:
    result = np.empty(stack.shape, np.dtype(dtype))
    base_square = delta_square = lost_square = 0.0
    touched = 0
    for layer, old in enumerate(stack):
        module = module_name(layer, projection)
        old = old.astype(np.float32)
        if not np.isfinite(old).all():
            raise ValueError(f"the base has NaN or infinite weights in {module}; nothing is merged")
        pairs = [(each.modules[module], weights[each.name]) for each in adapters
                 if module in each.modules]  # fmt: skip
        delta = np.zeros_like(old)
        with np.errstate(over="ignore", invalid="ignore"):
            for pair, weight in pairs:
                scaled = pair.b.astype(np.float32) * np.float32(weight * pair.scale)
                delta += scaled @ pair.a.astype(np.float32)
            result[layer] = old + delta
            stored = result[layer].astype(np.float32)
        if not np.isfinite(stored).all():
            raise ValueError(
                f"{module}: {int((~np.isfinite(stored)).sum())} weights overflow "
                f"{dtype} after merging. Use float32 or bfloat16, or smaller weights"
            )
        touched += bool(pairs)
        base_square += _square(old)
        delta_square += _square(delta)
        lost_square += _square(stored - old - delta)
    norm = math.sqrt(delta_square)
    return result, Change(
        projection,
        touched,
        norm / math.sqrt(base_square) if base_square else math.inf,
        math.sqrt(lost_square) / norm if norm else 0.0,
    )


def _checked(adapters: Sequence[Adapter], weights: Mapping[str, float] | None) -> dict[str, float]:
    """A finite weight for every adapter by name."""
    names = [each.name for each in adapters]
    if not adapters:
        raise ValueError("no adapter to merge")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two adapters are called {twice[0]!r}: give each a name of its own")
    for name, weight in (weights or {}).items():
        if name not in names:
            near = nearest(name, names)
            raise ValueError(
                f"weights has {name!r}, which is none of the adapters"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + f" (they are {', '.join(names)})"
            )
        if not math.isfinite(weight) or weight == 0:
            raise ValueError(
                f"weights[{name!r}] is {weight}; expected a finite number that is not 0"
                + (" (leave the adapter out instead)" if weight == 0 else "")
            )
    for each in adapters:
        each.check_finite()
    return {name: float((weights or {}).get(name, 1.0)) for name in names}


def _check_sizes(adapters: Sequence[Adapter]) -> None:
    seen: dict[str, tuple[str, tuple[int, int]]] = {}
    for each in adapters:
        for module, pair in each.modules.items():
            projection = split_module(module)[1]
            size = (pair.a.shape[1], pair.b.shape[0])
            other, expected = seen.setdefault(projection, (each.name, size))
            if size != expected:
                raise ValueError(
                    f"adapters {other!r} and {each.name!r} are of different bases: {projection} is "
                    f"{expected[0]} to {expected[1]} wide in one and {size[0]} to {size[1]} in the "
                    "other"
                )


def _pair(a: np.ndarray, b: np.ndarray, module: str) -> LoraPair:
    with np.errstate(over="ignore"):
        pair = LoraPair(a.astype(np.float32), b.astype(np.float32), 1.0)
    if not (np.isfinite(pair.a).all() and np.isfinite(pair.b).all()):
        raise ValueError(f"{module} overflows float32 after merging; use smaller weights")
    if b.any() and not pair.b.any():
        raise ValueError(f"{module}: lora_B becomes all zero in float32; use larger weights")
    return pair


def _square(x: np.ndarray) -> float:
    return float(np.sum(np.square(x, dtype=np.float64)))


def common_base_name(adapters: Sequence[Adapter]) -> str | None:
    """The base that all of them state, a hub's name rather than a path; None where none does.

    Raises ValueError where they differ by more than where the model lies.
    """
    stated = {each.name: each.config.get("base_model_name_or_path") for each in adapters}
    names = sorted({name for name in stated.values() if name}, key=lambda name: name.count("/"))
    if any(not same_model(names[0], each) for each in names[1:]):
        listed = (f"{name} {public_base_name(base)!r}" for name, base in stated.items())
        raise ValueError(
            f"the adapters state different bases: {', '.join(listed)}. Merge those of one base, or "
            "give the base that they are to be merged into"
        )
    return next((name for name in names if public_base_name(name) == name), (names or [None])[0])


def layers_of_base(adapters: Sequence[Adapter]) -> int | None:
    """The number of layers, where a config says "in every layer" and so its tensors tell; or None.

    A config says so where it would adapt one layer more, if there were one.
    """
    for each in adapters:
        settings = read_config(each.config, where=f"adapter {each.name!r}")
        layers = max(split_module(module)[0] for module in each.modules) + 1
        if any(settings.targets(BASE_PREFIX + module_name(layers, p)) for p in each.projections):
            return layers
    return None
