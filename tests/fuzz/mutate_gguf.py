"""Strategies: GGUF files whose fields, counts, types, shapes and offsets lie."""

import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.mutate import HUGE, damaged

STRING, ARRAY = 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(raw)) + raw
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, i) for i in items)
    if kind not in _CODES:
        return b"\0" * 8
    code = _CODES[kind]
    if code in "fd":
        return struct.pack("<" + code, value)
    width = struct.calcsize(code)
    return (int(value) % 2 ** (8 * width)).to_bytes(width, "little")


def gguf_bytes(
    fields: Sequence[tuple[str, int, Any]],
    tensors: Sequence[tuple[str, Sequence[int], int, int]],
    data: bytes,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file from fields (key, type, value) and tensors (name, dims, type, offset)."""
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    out = b"GGUF" + struct.pack("<IQQ", version, num_tensors % 2**64, num_fields % 2**64)
    for key, kind, value in fields:
        out += _value(STRING, key) + struct.pack("<I", kind) + _value(kind, value)
    for name, dims, kind, offset in tensors:
        out += _value(STRING, name) + struct.pack("<I", len(dims))
        out += b"".join(struct.pack("<Q", dim % 2**64) for dim in dims)
        out += struct.pack("<IQ", kind, offset % 2**64)
    return out.ljust(-(-len(out) // alignment) * alignment, b"\0") + data


@st.composite
def gguf_files(draw, fields, tensors, data: bytes) -> bytes:
    """A good GGUF file with fields, counts, types, shapes or offsets changed, or damaged."""
    fields, tensors = list(fields), list(tensors)
    options: dict[str, Any] = {}
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        at, tensor_at = (
            draw(st.integers(0, len(fields) - 1)),
            draw(st.integers(0, len(tensors) - 1)),
        )
        key, kind, value = fields[at]
        name, dims, tensor_kind, offset = tensors[tensor_at]
        match draw(st.integers(0, 13)):
            case 0:
                number = draw(st.sampled_from((0, 1, -1, 2, 3, 7, *HUGE)) | st.integers(0, 99))
                if kind in _CODES:
                    fields[at] = (
                        key,
                        kind,
                        float(min(number, 2**64)) if kind in (6, 12) else number,
                    )
            case 1:
                fields[at] = (key, draw(st.sampled_from((4, 5, 7, 10, 11, 13, 255))), 1)
            case 2:
                texts = ("", "llama", "qwen2", "gpt2", "\ud83d", "é", b"\xff\xfe", "x" * 3000)
                fields[at] = (key, STRING, draw(st.sampled_from(texts)))
            case 3:
                fields[at] = (key, ARRAY, draw(st.sampled_from(_ARRAYS)))
            case 4:
                del fields[at]
                if not fields:
                    fields = [("x", 4, 1)]
            case 5:
                fields.append((key, kind, value))
            case 6:
                numbers = draw(st.sampled_from((0, 1, 8, 33, 64, 100, 2**31, 2**32 - 1)))
                fields.append(("general.alignment", 4, numbers))
            case 7:
                options["counts"] = (
                    draw(st.sampled_from((0, len(tensors) - 1, len(tensors) + 1, *HUGE))),
                    draw(st.sampled_from((0, len(fields) - 1, len(fields), *HUGE))),
                )
            case 8:
                options["version"] = draw(st.sampled_from((0, 1, 2, 4, 2**31, 3 << 24)))
            case 9:
                sizes = st.sampled_from((0, 1, 2, 4, 8, 31, 32, 2**31, 2**62, 2**63))
                tensors[tensor_at] = (name, draw(st.lists(sizes, max_size=6)), tensor_kind, offset)
            case 10:
                types = (0, 1, 2, 3, 8, 12, 24, 28, 30, 99, 2**31)
                tensors[tensor_at] = (name, dims, draw(st.sampled_from(types)), offset)
            case 11:
                offsets = (0, 1, 32, 64, 8192, offset + 32, offset - 32, *HUGE)
                tensors[tensor_at] = (name, dims, tensor_kind, draw(st.sampled_from(offsets)))
            case 12:
                names = [each[0] for each in tensors]
                new = draw(
                    st.sampled_from((*names, "blk.01.attn_q.weight", "blk.².ffn_up.weight", ""))
                )
                tensors[tensor_at] = (new, dims, tensor_kind, offset)
            case 13:
                if isinstance(value, tuple):
                    inner, items = value
                    items = list(items)
                    where = draw(st.integers(0, len(items) - 1)) if items else 0
                    new = [
                        *items[:where],
                        *draw(st.sampled_from(([], items[:1], items[where:] * 2))),
                    ]
                    fields[at] = (key, kind, (inner, new))
    file = gguf_bytes(fields, tensors, data, **options)
    return draw(damaged(file)) if draw(st.integers(0, 4)) == 0 else file


def _nested(depth: int) -> tuple:
    return (4, [1]) if depth == 0 else (ARRAY, [_nested(depth - 1)])


_ARRAYS = (
    (4, []), (4, [1, 2]), (STRING, ["a", "a"]), (STRING, []), (7, [1, 0]), (99, [1]), _nested(2),
    _nested(60), (ARRAY, []), (6, [float("nan")]),
)  # fmt: skip
