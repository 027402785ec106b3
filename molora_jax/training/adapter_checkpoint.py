"""Adapters and training checkpoints: one read as the other, and training started from either."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import Adapter, TrainableAdapter, load_adapter
from molora_jax.adapters.folders import new_folder
from molora_jax.adapters.lora_describe import alpha_of
from molora_jax.adapters.names import PROJECTIONS, module_name, shortened
from molora_jax.hub import hub_name
from molora_jax.training.checkpoint import find_checkpoints, read_checkpoint, save_checkpoint

_FIELDS = ("name", "base_name", "rank", "alpha", "use_rslora", "projections")


@dataclass(frozen=True, kw_only=True)
class AdapterCheckpoint:
    """A checkpoint of an adapter's training.

    left_out  names of the arrays that are not the adapter's (the optimiser's moments)
    """

    adapter: Adapter
    step: int
    num_arrays: int
    left_out: tuple[str, ...]


def stated_name(base_name: str) -> str:
    """A base's name for others to read: of a path only its last part, for checkpoints and adapters
    travel and the folders of this machine do not."""
    path = Path(base_name).expanduser()
    return path.name if path.exists() else hub_name(base_name)


def about_adapter(trainable: TrainableAdapter, *, name: str, base_name: str) -> dict[str, Any]:
    """What a checkpoint says of its adapter, so that nobody has to say it again."""
    return {
        "kind": "adapter",
        "name": name,
        "base_name": base_name,
        "rank": trainable.rank,
        "alpha": trainable.alpha,
        "use_rslora": trainable.use_rslora,
        "projections": list(trainable.lora_a),
    }


def read_adapter_checkpoint(path: str | Path, *, name: str | None = None) -> AdapterCheckpoint:
    """The adapter in one step_... folder, or in the newest of a run or its checkpoints/.

    Raises ValueError where that is no adapter's training, or one from before checkpoints said what
    they hold.
    """
    folder = find_checkpoints(Path(path))
    if folder is None:
        raise FileNotFoundError(
            f"no training checkpoint at {path}: expected a folder like step_00000040"
        )
    arrays, meta = read_checkpoint(folder)
    about = meta.get("about") or {}
    if about.get("kind", "adapter") != "adapter" or any(k not in about for k in _FIELDS):
        raise ValueError(
            f"{folder}: the checkpoint does not say which adapter it holds (about: "
            f"{shortened(sorted(about)) or 'nothing'}; expected {', '.join(_FIELDS)}). It is a "
            "router's, or older than that record: finish the run, which exports its adapter"
        )
    keys = {
        (part, projection): f"['params'].lora_{part}['{projection}']"
        for projection in about["projections"]
        for part in "ab"
    }
    if lacking := [key for key in keys.values() if key not in arrays]:
        raise ValueError(f"{folder}: the checkpoint lacks {shortened(lacking)}; it is damaged")
    left_out = tuple(sorted(arrays.keys() - set(keys.values())))
    # Anything of the parameters that is not an A or B here would be lost without a word.
    if lost := [key for key in left_out if key.startswith("['params']")]:
        raise ValueError(f"{folder}: cannot be an adapter's, for it also trains {shortened(lost)}")
    trainable = TrainableAdapter(
        {p: jnp.asarray(arrays[keys["a", p]]) for p in about["projections"]},
        {p: jnp.asarray(arrays[keys["b", p]]) for p in about["projections"]},
        alpha=about["alpha"],
        use_rslora=about["use_rslora"],
    )
    adapter = trainable.to_adapter(name or about["name"], base_name=about["base_name"])
    return AdapterCheckpoint(
        adapter=adapter, step=meta["step"], num_arrays=len(arrays), left_out=left_out
    )


def write_adapter_checkpoint(
    adapter: Adapter, path: str | Path, *, overwrite: bool = False
) -> tuple[Path, TrainableAdapter]:
    """A folder with a checkpoint of step 0 that holds an adapter and no optimiser.

    `train_adapter(start=load_start(path))` goes on from it. Raises ValueError as `trainable_of`.
    """
    trainable = trainable_of(adapter)
    stated = adapter.config.get("base_model_name_or_path") or ""
    about = about_adapter(trainable, name=adapter.name, base_name=stated)
    steps = {f"step_{0:08d}"}
    with new_folder(path, owned=steps, overwrite=overwrite) as folder:
        save_checkpoint(
            folder, 0, {"params": trainable}, meta={"about": about, "origin": "a PEFT folder"}
        )
    return Path(path), trainable


def load_start(path: str | Path) -> Adapter:
    """The adapter of a PEFT folder or of a training checkpoint, to start training from."""
    folder = Path(path).expanduser()
    if find_checkpoints(folder) is not None:
        return read_adapter_checkpoint(folder).adapter
    return load_adapter(path)[0]


def start_settings(start: Adapter) -> dict[str, Any]:
    """Of AdapterTrainConfig, what an adapter to start from decides."""
    trainable = trainable_of(start)
    return {
        "rank": trainable.rank,
        "alpha": float(trainable.alpha),
        "use_rslora": trainable.use_rslora,
        "projections": tuple(trainable.lora_a),
    }


def trainable_of(adapter: Adapter) -> TrainableAdapter:
    """The adapter in training's layout, in float32: one rank, one scale, every layer.

    Raises ValueError with what does not fit in there: nothing is padded, dropped or averaged.
    """
    layers = max(int(module.split(".")[1]) for module in adapter.modules) + 1
    missing = [
        module
        for projection in adapter.projections
        for layer in range(layers)
        if (module := module_name(layer, projection)) not in adapter.modules
    ]
    if missing:
        raise ValueError(
            f"adapter {adapter.name!r} has no weights for {len(missing)} modules that training "
            f"would have: {shortened(missing)}. Training adapts a projection in every layer; the "
            "PEFT folder serves as it is"
        )
    ranks = {module: pair.rank for module, pair in adapter.modules.items()}
    scales = {module: pair.scale for module, pair in adapter.modules.items()}
    for what, values in (("ranks", ranks), ("scales", scales)):
        if len(set(values.values())) > 1:
            raise ValueError(
                f"adapter {adapter.name!r} has several {what}: {_examples(values)}. Training has "
                "one for all modules; the PEFT folder serves as it is"
            )
    rank, scale = adapter.rank, next(iter(scales.values()))
    first = adapter.config.get("use_rslora") is True
    for use_rslora in (first, not first):
        alpha = alpha_of(scale, rank, use_rslora=use_rslora)
        if alpha is not None:
            break
    else:
        raise ValueError(
            f"adapter {adapter.name!r}: its scale {scale!r} at rank {rank} is no alpha / rank of "
            "any alpha, which training is given"
        )

    def stacked(projection: str, matrix: str) -> np.ndarray:
        pairs = [adapter.modules[module_name(layer, projection)] for layer in range(layers)]
        return np.stack([getattr(pair, matrix).astype(np.float32) for pair in pairs])

    projections = [p for p in PROJECTIONS if p in adapter.projections]
    return TrainableAdapter(
        {p: jnp.asarray(stacked(p, "a")) for p in projections},
        {p: jnp.asarray(stacked(p, "b").swapaxes(1, 2)) for p in projections},
        alpha=alpha,
        use_rslora=use_rslora,
    )


def _examples(values: Mapping[str, Any]) -> str:
    first = {value: module for module, value in reversed(list(values.items()))}
    return shortened(f"{value:g} ({module})" for value, module in sorted(first.items()))
