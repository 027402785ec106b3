"""The decoder's arrays: names and shapes, stacking over layers, and reading of safetensors folders.

Names are Hugging Face's without the layer index, and arrays of the layers carry a leading L axis:
"layers.self_attn.q_proj.weight" is (L, F, D), stored (out, in) so that products contract last axes.
"""

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from molora_jax.files import inside, one_line, read_json, read_safetensors
from molora_jax.models.config import ModelConfig

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # FP8 means nothing without its scales
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_EXPONENTS: dict[str, tuple] = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}

# Beside the weights: a changed rope_theta or chat template makes another model of the same weights.
SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One tensor of a file: its shape, and `read`, which returns its values."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def array_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every array that `Decoder(config, arrays)` takes, by name."""
    c = config
    shapes = {
        "embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "norm.weight": (c.hidden_size,),
        "layers.input_layernorm.weight": (c.num_layers, c.hidden_size),
        "layers.post_attention_layernorm.weight": (c.num_layers, c.hidden_size),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    if c.qk_norm:
        shapes["layers.self_attn.q_norm.weight"] = (c.num_layers, c.head_dim)
        shapes["layers.self_attn.k_norm.weight"] = (c.num_layers, c.head_dim)
    biased = {"q_proj": c.qkv_bias, "k_proj": c.qkv_bias, "v_proj": c.qkv_bias, "o_proj": c.o_bias}
    for name, (d_in, d_out) in c.projection_sizes().items():
        path = f"layers.{'self_attn' if name in biased else 'mlp'}.{name}"
        shapes[f"{path}.weight"] = (c.num_layers, d_out, d_in)
        if biased.get(name, c.mlp_bias):
            shapes[f"{path}.bias"] = (c.num_layers, d_out)
    return shapes


def stack_weights(
    sources: Mapping[tuple[str, int | None], Source],
    config: ModelConfig,
    *,
    dtype: str = "float32",
    where: str,
    unexpected: Iterable[str] = (),
) -> dict[str, np.ndarray]:
    """Checks that `sources` {(name, layer or None): Source} are just the model's, and stacks them.

    Each tensor is read straight into its place, so the model lies in memory once. Raises ValueError
    with the names that are missing, unexpected or of another shape.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype {dtype!r} is not supported for weights; choose {', '.join(DTYPES)}"
        )
    shapes = array_shapes(config)
    expected: dict[tuple[str, int | None], tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name.startswith("layers."):
            expected.update({(name, layer): shape[1:] for layer in range(config.num_layers)})
        else:
            expected[name, None] = shape
    _check(expected, sources, where, list(unexpected), config)
    arrays = {name: aligned_empty(shape, DTYPES[dtype]) for name, shape in shapes.items()}
    for name, layer in expected:
        place = arrays[name][... if layer is None else layer]
        with np.errstate(all="ignore"):  # what does not fit the dtype is counted here
            place[...] = sources[name, layer].read()
        if count := _nonfinite(place):
            label = _label((name, layer))
            raise ValueError(
                f"{where}: {label} has {count} values that are NaN, infinite or too large for "
                f"{dtype}. The file is damaged, or needs the wider range: dtype='float32' or "
                "'bfloat16'"
            )
    _check_tied(arrays, sources, config, where)
    return arrays


def _check_tied(arrays, sources, config, where) -> None:
    """ValueError where a model is called tied and holds an output of its own that differs."""
    stored = sources.get(("lm_head.weight", None))
    if stored is None or not config.tie_word_embeddings:
        return
    embedding = sources["embed_tokens.weight", None].read()
    head = stored.read()
    if head.shape != embedding.shape or (head != embedding).any():
        raise ValueError(
            f"{where}: tie_word_embeddings is true, and yet lm_head.weight is not the embedding; "
            "readers differ in which of them counts. Set tie_word_embeddings to false if the "
            "output was trained on its own, or remove lm_head.weight"
        )


def _nonfinite(array: np.ndarray) -> int:
    """How many values are NaN or infinite: their exponent's bits are all set (np.isfinite takes
    five times as long, and a second for a small model in bfloat16).
    """
    kind, mask = _EXPONENTS[array.dtype.name]
    exponents = array.view(kind) & kind(mask)
    return int((exponents == mask).sum()) if exponents.max(initial=0) == mask else 0


def _label(key: tuple[str, int | None]) -> str:
    full = key[0] if key[1] is None else key[0].replace("layers.", f"layers.{key[1]}.", 1)
    return one_line(full if len(full) < 80 else full[:80] + "…")


def _check(expected, sources, where, unexpected, config) -> None:
    missing = [_label(key) for key in expected if key not in sources]
    # A tied model's output may be stored all the same (`_check_tied`).
    unexpected += [
        _label(key) for key in sources if key not in expected and key[0] != "lm_head.weight"
    ]
    wrong = [
        f"{_label(key)} {tuple(sources[key].shape)} instead of {shape}"
        for key, shape in expected.items()
        if key in sources and tuple(sources[key].shape) != shape
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", wrong),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"{where}: the tensors are not those of the {config.model_type} model that its "
            f"configuration describes. {'; '.join(problems)}. Check that weights and configuration "
            "belong together and that the download is complete."
        )


def load_safetensors(
    folder: str | Path, config: ModelConfig, *, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """The decoder's arrays from model.safetensors, or from the shards that its index names."""
    sources: dict[tuple[str, int | None], Source] = {}
    unexpected = []
    for path in safetensors_files(folder):
        file = read_safetensors(path, where=str(path), root=folder)
        for name in file.keys():  # noqa: SIM118 - the handle is no dict
            target = _target(name)
            if target in sources:
                raise ValueError(
                    f"{path}: {one_line(name)!r} is in the model's files a second time"
                )
            if target:
                if file.dtype(name) not in FLOAT_TYPES:
                    raise ValueError(
                        f"{path}: {one_line(name)!r} is stored as {file.dtype(name)}; expected "
                        f"{', '.join(FLOAT_TYPES)}. Quantised weights are read from GGUF alone"
                    )
                read = functools.partial(file.get, name)
                sources[target] = Source(shape=file.shape(name), read=read)
            elif not name.endswith("rotary_emb.inv_freq"):  # a buffer that old files carry
                unexpected.append(one_line(name))
    return stack_weights(sources, config, dtype=dtype, where=str(folder), unexpected=unexpected)


def safetensors_files(folder: str | Path) -> list[Path]:
    """The weight files of a Hugging Face folder, all of them there, in order of their names."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if not index.exists():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        raise ValueError(
            f"{folder}: neither model.safetensors nor model.safetensors.index.json is there"
            + (
                f" but {pickled[0]} is. Pickle files can run code when opened and are not read: "
                "save the model with transformers' save_pretrained(..., safe_serialization=True)."
                if pickled
                else ". Point to the folder that holds the model's weights."
            )
        )
    weight_map = read_json(index, where=str(index), root=folder).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: expected 'weight_map', an object of tensor and file names")
    shards = (
        set(weight_map.values()) if all(isinstance(n, str) for n in weight_map.values()) else {}
    )
    strange = [name for name in shards if not re.fullmatch(r"[\w.-]+\.safetensors", name)]
    if strange or not shards:
        raise ValueError(
            f"{index}: weight_map has values that name no .safetensors file of the folder"
            + (f", such as {one_line(min(strange))!r}" if strange else "")
        )
    absent = sorted(name for name in shards if not (folder / name).exists())
    if absent:
        raise ValueError(
            f"{index}: {len(absent)} of {len(shards)} shards are missing "
            f"({one_line(', '.join(absent[:4]))}). The download is incomplete; fetch it again."
        )
    return [folder / name for name in sorted(shards)]


def model_files(folder: str | Path) -> list[Path]:
    """Every file of a Hugging Face folder that decides what the model computes or reads."""
    settings = [Path(folder) / name for name in SETTINGS_FILES]
    files = [*safetensors_files(folder), *(path for path in settings if os.path.lexists(path))]
    for path in files:
        inside(path, folder)
    return files


def random_arrays(config: ModelConfig, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights that keep activations near unit size, float32; the same for the same seed.

    Matrices are N(0, 1/in), so logits have a spread of about 1; norms and biases are off 1 and 0 by
    a tenth, so that a test sees when one is left out.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in array_shapes(config).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            noise = 1 + 0.1 * noise
        elif name.endswith("bias"):
            noise = 0.1 * noise
        elif name != "embed_tokens.weight" or config.tie_word_embeddings:
            noise = noise * np.float32(shape[-1] ** -0.5)
        arrays[name] = noise
    return arrays


def aligned_empty(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An uninitialised array at an address that JAX on CPU takes over without a copy (64 bytes)."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def _target(name: str) -> tuple[str, int | None] | None:
    """Hugging Face tensor name → our stacked name and the layer, or None where it is not ours."""
    name = name.removeprefix("model.")
    parts = name.split(".", 2)
    if parts[0] == "layers" and len(parts) == 3 and (layer := layer_index(parts[1])) is not None:
        return None if "rotary_emb" in name else (f"layers.{parts[2]}", layer)
    return (name, None) if parts[0] in ("embed_tokens", "norm", "lm_head") else None


def layer_index(text: str) -> int | None:
    """The number of a layer as a tensor's name spells it; "01" and "²" are none."""
    return int(text) if re.fullmatch(r"0|[1-9][0-9]{0,5}", text) else None
