"""Base models by name: a path, one of this project's own, or org/name of the Hugging Face hub."""

import dataclasses
import difflib
import os
import sys
import time
from pathlib import Path

import jax
from absl import logging

from molora_jax.adapters.peft_folder import CONFIG_FILE
from molora_jax.adapters.report import public_base_name
from molora_jax.display.progress import waiting
from molora_jax.files import naming, near_path, nearest_path, one_line, read_json
from molora_jax.hub import (
    HUB_NAME,
    cached_names,
    download_command,
    hub_folder,
    hub_offline,
    hub_repo,
    hub_snapshot,
)
from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder
from molora_jax.models.digest import files_digest, params_digest
from molora_jax.models.gguf import load_gguf, read_gguf
from molora_jax.models.smollm2 import fetch_smollm2
from molora_jax.models.tiny import tiny_arrays, tiny_config, tiny_tokenizer
from molora_jax.models.tokenizer import Tokenizer
from molora_jax.models.weights import DTYPES, load_safetensors, model_files, safetensors_files
from molora_jax.parallel import check_fits, check_same, current_mesh, place

NAMES = ("smollm2-135m", "tiny-random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A frozen base: the name it was asked for, and `digest`, the sha256 of its files.

    Of a folder these are weights, configuration and tokenizer; a GGUF file holds all of them.

        >>> base
        base tiny-random: llama, 4 layers of width 64, vocabulary 260, sha256:dcf20c07355b
        >>> base.tokenizer.encode("hi")
        [104, 105]
    """

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    digest: str

    def __str__(self) -> str:
        c = self.config
        return (
            f"base {self.name}: {c.model_type}, {c.num_layers} layers of width {c.hidden_size}, "
            f"vocabulary {c.vocab_size}, sha256:{self.digest[:12]}"
        )

    __repr__ = __str__


def load_base(name: str, *, dtype: str = "float32") -> BaseModel:
    """Loads a base model with its tokenizer.

    `name` is a folder in Hugging Face's layout or a .gguf file; else "smollm2-135m" or
    "tiny-random"; else "org/name" or "org/name@revision", read from the Hugging Face cache and
    downloaded into it where missing (never with HF_HUB_OFFLINE=1). `dtype` is what the parameters
    are kept in: "float32", "bfloat16" or "float16".

    Raises ValueError for a name that is none of these, with the nearest that is, and for files that
    are not a model this decoder computes; OSError where a model cannot be fetched.

        >>> base = mj.load_base("tiny-random")
        >>> base.config.num_layers, base.config.hidden_size
        (4, 64)
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
    start = time.monotonic()
    path = _located(name)
    with waiting(f"loading {name}"):
        if path is None:
            base = _tiny(name, dtype)
        elif path.is_dir():
            base = _from_folder(name, path, dtype)
        else:
            base = _from_gguf(name, path, dtype)
    if current_mesh() is not None:
        check_same("base model", lambda: {"digest": base.digest})
    if base.tokenizer.vocab_size > base.config.vocab_size:
        logging.warning(
            "base %s: its tokenizer has %d tokens, its embedding %d rows; ids from %d on have no "
            "embedding. Check that tokenizer and weights belong together",
            name,
            base.tokenizer.vocab_size,
            base.config.vocab_size,
            base.config.vocab_size,
        )
    logging.info("base %s: loaded in %.1f s as %s", name, time.monotonic() - start, dtype)
    return base


def base_digest(name: str) -> str:
    """`load_base(name).digest` without loading the model (fetching it, where it is not here)."""
    path = _located(name)
    if path is None:
        return params_digest(tiny_arrays())
    return files_digest(model_files(path) if path.is_dir() else [path])


def base_path(name: str) -> Path | None:
    """The folder or GGUF file that `load_base(name)` reads; None for the random model."""
    return _located(name)


def _located(name: str) -> Path | None:
    """The folder or GGUF file of a name, fetched if need be; None for the random model."""
    try:
        path = Path(name).expanduser()
        there = path.exists()
    except (OSError, RuntimeError, ValueError):  # too long, an unknown ~user, a zero byte
        there = False
    if there:
        return _model_at(path, name)
    if name == "smollm2-135m":
        return fetch_smollm2()
    if name == "tiny-random":
        return None
    if (match := HUB_NAME.fullmatch(name)) and not name.endswith(".gguf"):
        return _model_at(_hub_snapshot(*match.groups()), name)
    near = difflib.get_close_matches(name, [*NAMES, *cached_names()], n=3, cutoff=0.5)
    near = [each for each in (nearest_path(name), *near) if each]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(
        f"base model {one_line(name)!r} is neither a path that exists nor a known name"
        + (hint or ".")
        + f" Known are {', '.join(NAMES)}, a folder or .gguf file, and 'org/name' of the hub."
    )


def _model_at(path: Path, name: str) -> Path:
    """`path` itself, or the one GGUF file in it where it is no Hugging Face folder."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ValueError(
            f"base model {name!r} is a file without the ending .gguf; expected a GGUF file or the "
            "folder that holds config.json and model.safetensors"
        )
    if (path / "config.json").exists():
        if (path / CONFIG_FILE).exists():
            raise ValueError(
                f"base model {name!r}: {path} also holds an adapter (adapter_config.json), which "
                "transformers would add to the model. Move its two files to a folder of their own "
                "and load that as an adapter"
            )
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if (path / CONFIG_FILE).exists():
        raise ValueError(
            f"base model {name!r}: {path} is an adapter (adapter_config.json){_its_base(path)}. "
            "Load its base here, and the folder as an adapter: load_adapter(FOLDER), --adapter"
        )
    inside = sorted(each.parent.name for each in path.glob("*/config.json"))
    if inside and not ggufs:
        raise ValueError(
            f"base model {name!r}: {path} holds no config.json, but its sub-folder {inside[0]} "
            f"does{f', as {len(inside) - 1} more do' if len(inside) > 1 else ''}: name "
            f"{path / inside[0]}"
        )
    raise ValueError(
        f"base model {name!r}: {path} holds no config.json"
        + (f" and {len(ggufs)} GGUF files; name one of them." if ggufs else ".")
        + " Expected config.json, model.safetensors (or its shards and index) and tokenizer.json."
    )


def _its_base(folder: Path) -> str:
    """What an adapter's config says that it was trained on, in words to follow, or ""."""
    try:
        config = read_json(folder / CONFIG_FILE, where=str(folder), root=folder)
    except (ValueError, OSError):
        return ""
    stated = config.get("base_model_name_or_path")
    base = public_base_name(stated if isinstance(stated, str) else None)
    return f", trained on {one_line(base)}" if base else ""


def _from_folder(name: str, path: Path, dtype: str) -> BaseModel:
    config = read_model_config(path)
    arrays = load_safetensors(path, config, dtype=dtype)
    with naming(path):
        tokenizer = Tokenizer.from_folder(path, eos_ids=config.eos_ids)
    return BaseModel(
        name=name,
        config=config,
        decoder=_decoder(config, arrays),
        tokenizer=tokenizer,
        digest=files_digest(model_files(path)),
    )


def read_model_config(folder: Path) -> ModelConfig:
    """The config of a Hugging Face folder, from config.json and generation_config.json."""
    found = {}
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if name == "config.json" or os.path.lexists(file):
            found[name] = read_json(file, where=str(file), root=folder)
    with naming(folder):
        return ModelConfig.from_hf(
            found["config.json"], generation=found.get("generation_config.json")
        )


def _from_gguf(name: str, path: Path, dtype: str) -> BaseModel:
    file = read_gguf(path)
    config = file.config()
    logging.info("base %s: %s, tensors: %s", name, path, file.quantisation())
    with naming(path):
        tokenizer = Tokenizer.from_gguf(file.fields, eos_ids=config.eos_ids)
    return BaseModel(
        name=name,
        config=config,
        decoder=_decoder(config, load_gguf(file, config, dtype=dtype)),
        tokenizer=tokenizer,
        digest=files_digest([path]),
    )


def _tiny(name: str, dtype: str) -> BaseModel:
    config, arrays = tiny_config(), tiny_arrays()
    return BaseModel(
        name=name,
        config=config,
        decoder=_decoder(config, {k: v.astype(DTYPES[dtype]) for k, v in arrays.items()}),
        tokenizer=tiny_tokenizer(),
        digest=params_digest(arrays),
    )


def _decoder(config: ModelConfig, arrays: dict) -> Decoder:
    mesh = current_mesh()
    if mesh is not None:  # each device gets its part alone
        check_fits(config, mesh.shape)
        return Decoder(config, place(arrays, mesh, title="base"))
    # device_put takes aligned host memory over on CPU; jnp.asarray would copy it.
    return Decoder(config, jax.device_put(arrays))


def _hub_snapshot(owner: str, model: str, revision: str | None) -> Path:
    """The folder of a model in the Hugging Face cache, found by reading files; else downloaded."""
    snapshot = hub_snapshot(owner, model, revision)
    if snapshot and _complete(snapshot):
        return snapshot
    name = f"{owner}/{model}"
    if hub_offline():
        at = f" at revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"base model {name}{at} is not complete in {hub_repo(owner, model)}, and "
            "HF_HUB_OFFLINE is set. Fill the folder where there is a network with "
            f"'{download_command(owner, model, revision)}' and copy it here (HF_HUB_CACHE names "
            "another folder), unset HF_HUB_OFFLINE, or give the path of a folder that holds the "
            "model."
        )
    return _download(name, revision)


def _complete(snapshot: Path) -> bool:
    """Whether everything that loading reads is there; an interrupted download leaves a part."""
    if not (snapshot / "config.json").exists():
        return len(list(snapshot.glob("*.gguf"))) == 1
    try:
        safetensors_files(snapshot)
    except ValueError:
        return False
    return (snapshot / "tokenizer.json").exists()


def _download(name: str, revision: str | None) -> Path:
    import huggingface_hub

    # huggingface_hub shows how far it is. Standard output may be one JSON object.
    print(f"base {name}: downloading into {hub_folder()}", file=sys.stderr, flush=True)
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=hub_folder(),
            allow_patterns=["*.json", "*.safetensors", "*.jinja"],
        )
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        words = str(error).strip().splitlines()
        raise ConnectionError(
            f"base model {name!r} is neither a path that exists nor in {hub_folder()}, and the "
            f"download failed: {words[0] if words else type(error).__name__}. Check the name and "
            f"the network, or use one of {', '.join(NAMES)}{near_path(name) or '.'}"
        ) from error
    return Path(folder)
