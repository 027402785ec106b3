"""Base models from GGUF files: metadata, and weights dequantised into the decoder's stacked arrays.

The container is read here and only its blocks are decoded by the `gguf` package: the package's own
reader makes several numpy objects for every token and merge of the vocabulary, which takes longer
than reading the weights.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from molora_jax.models.config import ModelConfig
from molora_jax.models.weights import Source, stack_weights

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
TOP_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor as it lies in the file: its type, its shape (out, in) and its rows as bytes."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    rows: np.ndarray

    def decoded(self) -> np.ndarray:
        """The values in float32, shape (out, in)."""
        if self.kind == GGMLQuantizationType.F64:
            return self.rows.view(np.float64).astype(np.float32).reshape(self.shape)
        return dequantize(self.rows, self.kind).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """Metadata as plain Python values, and the tensors by name, mapped and not yet read."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def config(self) -> ModelConfig:
        factors = self.tensors.get("rope_freqs.weight")
        return ModelConfig.from_gguf(
            self.fields,
            {name: tensor.shape for name, tensor in self.tensors.items()},
            rope_factors=() if factors is None else tuple(factors.decoded().tolist()),
        )

    def quantisation(self) -> str:
        """The types in the file with their number of tensors, e.g. '210 Q4_1, 61 F32, 1 Q8_0'."""
        kinds = [tensor.kind.name for tensor in self.tensors.values()]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def read_gguf(path: str | Path) -> GgufFile:
    """Reads the header of a little-endian GGUF file (versions 2 and 3) and maps its tensors."""
    path = Path(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data)
    try:
        version, num_tensors, num_fields = cursor.numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version} cannot be read, expected 2 or 3")
        fields = {}
        for _ in range(num_fields):
            name = cursor.string()
            fields[name] = cursor.value(cursor.number("I"))
        headers = [cursor.tensor_header() for _ in range(num_tensors)]
    except struct.error as error:
        raise ValueError(_truncated(path, len(data))) from error
    alignment = fields.get("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in headers:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // block * block_bytes
        num_rows = int(np.prod(shape[:-1], dtype=np.int64))
        if start + offset + num_rows * row_bytes > len(data):
            raise ValueError(_truncated(path, len(data)))
        rows = np.frombuffer(data, np.uint8, num_rows * row_bytes, start + offset)
        tensors[name] = GgufTensor(kind=kind, shape=shape, rows=rows.reshape(num_rows, row_bytes))
    return GgufFile(path=path, fields=fields, tensors=tensors)


def load_gguf(
    file: GgufFile, config: ModelConfig, *, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """The decoder's arrays, dequantised row by row into place; checks every name and shape."""
    sources, unexpected = {}, []
    for name, tensor in file.tensors.items():
        target = _target(name)
        if target:
            sources[target] = _source(
                tensor, target[0], file.fields["general.architecture"], config
            )
        elif name != "rope_freqs.weight":
            unexpected.append(name)
    return stack_weights(sources, config, dtype=dtype, where=str(file.path), unexpected=unexpected)


def _source(tensor: GgufTensor, name: str, arch: str, config: ModelConfig) -> Source:
    heads = {
        "layers.self_attn.q_proj": config.num_heads,
        "layers.self_attn.k_proj": config.num_kv_heads,
    }.get(name.rpartition(".")[0])
    if arch != "llama" or heads is None:
        return Source(shape=tensor.shape, read=tensor.decoded)
    # Converters store rows i and i + Dh/2 of each llama head side by side, for rotary embedding of
    # neighbours; ours is half-split. The wrong order still writes text, 1.5 nats worse.
    return Source(shape=tensor.shape, read=lambda: unpermuted(tensor.decoded(), heads))


def unpermuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from interleaved pairs (0, Dh/2, 1, Dh/2 + 1, …) to half-split order."""
    split = rows.reshape(num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _target(name: str) -> tuple[str, int | None] | None:
    """GGUF tensor name → our stacked name and the layer, or None where it is not the decoder's."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}", None
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in LAYER_NAMES:
        return f"layers.{LAYER_NAMES[parts[2]]}.{kind}", int(parts[1])
    return None


def _truncated(path: Path, size: int) -> str:
    return (
        f"{path} ends too early ({size} bytes): the download is incomplete. Fetch the file again."
    )


class _Cursor:
    """Reads values one after another from the mapped file."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 4

    def numbers(self, codes: str) -> tuple:
        layout = struct.Struct("<" + codes)
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def string(self) -> str:
        size = self.number("Q")
        text = self.data[self.position : self.position + size]
        self.position += size
        return text.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            kind, size = self.numbers("IQ")
            if kind in _SCALARS:
                return list(self.numbers(f"{size}{_SCALARS[GGUFValueType(kind)]}"))
            return [self.value(kind) for _ in range(size)]
        return self.number(_SCALARS[GGUFValueType(kind)])

    def tensor_header(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, rank = self.string(), self.number("I")
        shape = self.numbers(f"{rank}Q")
        kind, offset = self.numbers("IQ")
        return name, tuple(reversed(shape)), GGMLQuantizationType(kind), offset
