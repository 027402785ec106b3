"""The decoder's arrays: names and shapes, stacking over layers, and reading of safetensors folders.

Names are Hugging Face's without the layer index, and arrays of the layers carry a leading L axis:
"layers.self_attn.q_proj.weight" is (L, F, D), stored (out, in) so that products contract last axes.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from molora_jax.models.config import ModelConfig

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

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
        arrays[name][... if layer is None else layer] = sources[name, layer].read()
    return arrays


def _check(expected, sources, where, unexpected, config) -> None:
    def label(key: tuple[str, int | None]) -> str:
        return key[0] if key[1] is None else key[0].replace("layers.", f"layers.{key[1]}.", 1)

    missing = [label(key) for key in expected if key not in sources]
    # A tied model's output may be stored all the same; transformers does not use it either.
    unexpected += [
        label(key) for key in sources if key not in expected and key[0] != "lm_head.weight"
    ]
    wrong = [
        f"{label(key)} {tuple(sources[key].shape)} instead of {shape}"
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
    from safetensors import safe_open

    sources, unexpected = {}, []
    for path in safetensors_files(folder):
        file = safe_open(path, framework="numpy")
        for name in file.keys():  # noqa: SIM118 - the handle is no dict
            target = _target(name)
            if target:
                sources[target] = Source(
                    shape=tuple(file.get_slice(name).get_shape()),
                    read=functools.partial(file.get_tensor, name),
                )
            elif not name.endswith("rotary_emb.inv_freq"):  # a buffer that old files carry
                unexpected.append(name)
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
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    absent = [name for name in shards if not (folder / name).exists()]
    if absent:
        raise ValueError(
            f"{index}: {len(absent)} of {len(shards)} shards are missing "
            f"({', '.join(absent[:4])}). The download is incomplete; fetch it again."
        )
    return [folder / name for name in shards]


def model_files(folder: str | Path) -> list[Path]:
    """Every file of a Hugging Face folder that decides what the model computes or reads."""
    settings = [Path(folder) / name for name in SETTINGS_FILES]
    return [*safetensors_files(folder), *(path for path in settings if path.exists())]


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
    if parts[0] == "layers" and len(parts) == 3 and parts[1].isdigit():
        return None if "rotary_emb" in name else (f"layers.{parts[2]}", int(parts[1]))
    return (name, None) if parts[0] in ("embed_tokens", "norm", "lm_head") else None
