"""Base models from GGUF files: metadata, and weights dequantised into the decoder's stacked arrays.

The container is read here and only its blocks are decoded by the `gguf` package: the package's own
reader makes several numpy objects for every token and merge of the vocabulary, which takes longer
than reading the weights.
"""

import contextlib
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from molora_jax.files import naming, one_line, open_file
from molora_jax.models.config import ModelConfig
from molora_jax.models.weights import Source, layer_index, stack_weights

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
MAX_AXES, MAX_NESTING = 4, 4  # four axes are what ggml has; arrays in arrays nobody writes
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
        try:
            return dequantize(self.rows, self.kind).reshape(self.shape)
        except NotImplementedError:
            raise ValueError(
                f"GGUF: tensors of the type {self.kind.name} cannot be decoded here; take a file "
                "in another quantisation (Q8_0, Q4_K_M, F16, …)"
            ) from None


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """Metadata as plain Python values, and the tensors by name, mapped and not yet read."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def config(self) -> ModelConfig:
        with _naming(self.path):
            factors = self.tensors.get("rope_freqs.weight")
            numbers = np.ones(0) if factors is None else factors.decoded().ravel()
            if not np.isfinite(numbers).all():
                raise ValueError("GGUF: rope_freqs.weight has NaN or infinite numbers")
            shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
            return ModelConfig.from_gguf(self.fields, shapes, rope_factors=tuple(numbers.tolist()))

    def quantisation(self) -> str:
        """The types in the file with their number of tensors, e.g. '210 Q4_1, 61 F32, 1 Q8_0'."""
        kinds = [tensor.kind.name for tensor in self.tensors.values()]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def read_gguf(path: str | Path) -> GgufFile:
    """Reads the header of a little-endian GGUF file (versions 2 and 3) and maps its tensors.

    Raises ValueError, which names the file, where it is damaged, cut short or of another format,
    and FileNotFoundError where there is none. A count or a length in the file is believed only as
    far as the file goes on, so none asks for memory that the file does not fill.
    """
    path = Path(path)
    with open_file(path, where=f"the GGUF file {path}") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data)
    with _naming(path):
        version, num_tensors, num_fields = cursor.numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} cannot be read, expected 2 or 3")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = cursor.string()
            if name in fields:
                raise ValueError(f"the metadata key {one_line(name)!r} stands twice")
            fields[name] = cursor.value(cursor.number("I"))
        headers = [cursor.tensor_header() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(
                f"general.alignment is {one_line(repr(alignment))}; expected a power of two"
            )
        start = -(-cursor.position // alignment) * alignment
        tensors = {}
        end, before = 0, ""
        for name, shape, kind, offset in sorted(headers, key=lambda header: header[3]):
            block, block_bytes = GGML_QUANT_SIZES[kind]
            row_bytes, num_rows = shape[-1] // block * block_bytes, math.prod(shape[:-1])
            problem = None
            if name in tensors:
                problem = "stands twice"
            elif shape[-1] % block:
                problem = f"has rows of {shape[-1]} numbers, and {kind.name} packs {block} together"
            elif offset % alignment:
                problem = f"lies at {offset}, which is no multiple of the alignment {alignment}"
            elif offset < end:
                problem = f"overlaps {before!r}"
            if problem:
                raise ValueError(f"the tensor {one_line(name)!r} {problem}: the file is damaged")
            end, before = offset + num_rows * row_bytes, one_line(name)
            if start + end > len(data):
                raise struct.error
            rows = np.frombuffer(data, np.uint8, num_rows * row_bytes, start + offset)
            rows = rows.reshape(num_rows, row_bytes)
            tensors[name] = GgufTensor(kind=kind, shape=shape, rows=rows)
    return GgufFile(
        path=path, fields=fields, tensors={header[0]: tensors[header[0]] for header in headers}
    )


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors inside name the file; to read behind its end says that it is cut short."""
    try:
        with naming(path):
            yield
    except struct.error:
        raise ValueError(
            f"{path} ends too early ({path.stat().st_size} bytes): the download is incomplete. "
            "Fetch the file again."
        ) from None


def load_gguf(
    file: GgufFile, config: ModelConfig, *, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """The decoder's arrays, dequantised row by row into place; checks every name and shape."""
    sources, unexpected = {}, []
    with _naming(file.path):
        for name, tensor in file.tensors.items():
            target = _target(name)
            if target:
                arch = file.fields["general.architecture"]
                sources[target] = _source(tensor, target[0], arch, config)
            elif name != "rope_freqs.weight":
                unexpected.append(name)
        return stack_weights(sources, config, dtype=dtype, where="GGUF", unexpected=unexpected)


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
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        layer = layer_index(parts[1])
        return None if layer is None else (f"layers.{LAYER_NAMES[parts[2]]}.{kind}", layer)
    return None


class _Cursor:
    """Reads values one after another from the mapped file; struct.error where it ends before."""

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
        self._check_left(size)
        raw = self.data[self.position : self.position + size]
        self.position += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"a text of the metadata is no UTF-8 ({error})") from None

    def value(self, kind: int, *, depth: int = 0) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            if depth == MAX_NESTING:
                raise ValueError(f"the metadata has arrays nested more than {MAX_NESTING} deep")
            kind, size = self.numbers("IQ")
            if kind in _SCALARS:
                code = _SCALARS[GGUFValueType(kind)]
                self._check_left(size * struct.calcsize("<" + code))
                return list(self.numbers(f"{size}{code}"))
            return [self.value(kind, depth=depth + 1) for _ in range(size)]
        if kind not in _SCALARS:
            raise ValueError(f"the metadata has a value of the unknown type {kind}")
        return self.number(_SCALARS[GGUFValueType(kind)])

    def tensor_header(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, num_axes = self.string(), self.number("I")
        label = f"the tensor {one_line(name)!r}"
        if not 1 <= num_axes <= MAX_AXES:
            raise ValueError(f"{label} has {num_axes} axes; expected 1 to {MAX_AXES}")
        shape = tuple(reversed(self.numbers(f"{num_axes}Q")))
        kind, offset = self.numbers("IQ")
        if kind not in list(GGMLQuantizationType):
            raise ValueError(
                f"{label} has the unknown type {kind}: the file is too new, or damaged"
            )
        if not 0 < math.prod(shape) < 2**62:
            raise ValueError(f"{label} has the shape {shape}, which no weight can have")
        return name, shape, GGMLQuantizationType(kind), offset

    def _check_left(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise struct.error
