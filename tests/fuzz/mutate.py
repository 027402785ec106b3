"""Strategies: JSON trees and texts, safetensors files and folders, each damaged in its way."""

import copy
import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

Link = tuple[str, str]  # ("link", where to)
FOLDER = ("folder", "")
Files = dict[str, bytes | Link]

HUGE = (2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**400)
WEIRD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 8, 64, 0.5, -0.0, 1.0, 1e-45, 1e308, float("nan"),
    float("inf"), float("-inf"), "", " ", "\0", "\n", "é🙂", "\ud83d", "64", "0.1", "true", "null",
    "none", "all", "../../etc/passwd", "/etc/passwd", "%s%n{0}", "a" * 5000, [], {}, [[]], [None],
    [1, "a", None], {"": None}, {"a": {"b": {}}}, [2**40] * 3, (-1) * 2**63, *HUGE,
)  # fmt: skip
SMALL = st.recursive(
    st.sampled_from(WEIRD) | st.integers(-5, 300) | st.floats(width=32) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


def _places(tree: Any, place: tuple = ()) -> list[tuple]:
    found = [place]
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in list(items)[:40]:
            found += _places(value, (*place, key))
    return found


def _at(tree: Any, place: tuple) -> Any:
    for key in place:
        tree = tree[key]
    return tree


@st.composite
def json_trees(draw, tree: Any, keys: Sequence[str] = ()) -> Any:
    """`tree` with one to three of its parts replaced, moved, renamed, wrapped or removed.

    `keys` are names that such a tree may also have; values are drawn for them.
    """
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        places = _places(tree)[1:]
        if keys and isinstance(tree, dict) and (not places or draw(st.integers(0, 3)) == 0):
            tree[draw(st.sampled_from(keys))] = copy.deepcopy(draw(SMALL))
            continue
        if not places:
            return copy.deepcopy(draw(SMALL))
        place = draw(st.sampled_from(places))
        parent, key = _at(tree, place[:-1]), place[-1]
        value = parent[key]
        match draw(st.sampled_from(("weird", "weird", "near", "drop", "rename", "wrap", "swap"))):
            case "weird":
                parent[key] = copy.deepcopy(draw(SMALL))
            case "near" if type(value) in (int, float) and abs(value) < 1e300:
                steps = (1, -1, value, -2 * value, 0.5, 10**9)
                parent[key] = value + draw(st.sampled_from(steps))
            case "near" if isinstance(value, str):
                parent[key] = draw(
                    st.sampled_from(
                        (value.upper(), value + " ", value[:-1], value * 2, f"{value}.x")
                    )
                )
            case "near" if isinstance(value, bool | list):
                parent[key] = value + value[:1] if isinstance(value, list) else not value
            case "drop":
                del parent[key]
            case "rename" if isinstance(parent, dict):
                parent[draw(st.text(max_size=5) | st.sampled_from((f"{key} ", *keys, key)))] = (
                    parent.pop(key)
                )
            case "wrap":
                new = draw(st.sampled_from((0, 1, 2)))
                parent[key] = ([value], {"value": value}, [value, copy.deepcopy(value)])[new]
            case _:
                other = draw(st.sampled_from(places))
                try:
                    parent[key] = copy.deepcopy(_at(tree, other))
                except (KeyError, IndexError, TypeError):
                    parent[key] = None
    return tree


def dumped(tree: Any) -> bytes:
    """JSON as Python writes it, NaN and half characters included."""
    return json.dumps(tree).encode()


@st.composite
def json_texts(draw, tree: Any, keys: Sequence[str] = ()) -> bytes:
    """A mutated tree as a file, now and then damaged as text, too."""
    text = dumped(draw(json_trees(tree, keys)))
    match draw(st.integers(0, 19)):
        case 0:
            return draw(damaged(text))
        case 1:
            return draw(st.sampled_from(STAND_INS))
        case 2:  # a key twice
            first = text.find(b"{") + 1
            return text[:first] + b'"r": 4, "r": 9, ' + text[first:]
        case 3:
            deep = draw(st.sampled_from((5, 63, 66, 3000, 100_000)))
            return b'{"a": ' + b"[" * deep + b"]" * deep + b", " + text[1:]
        case 4:
            return b"\xef\xbb\xbf" + text
        case 5:
            return json.dumps(tree, ensure_ascii=False).encode("utf-16")
    return text


@st.composite
def damaged(draw, data: bytes) -> bytes:
    """Bytes cut, flipped, overwritten with telling numbers, repeated or taken out."""
    size = len(data)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.integers(0, 5)):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
            case 2:
                number = draw(st.sampled_from(HUGE[:6]) | st.integers(0, 2**16))
                width = draw(st.sampled_from((4, 8)))
                raw = (number % 2 ** (8 * width)).to_bytes(width, "little")
                data = data[:at] + raw + data[at + width :]
            case 3:
                data = data[:at] + draw(st.binary(max_size=9)) + data[at:]
            case 4:
                data = data[:at] + data[at + draw(st.integers(1, 16)) :]
            case 5:
                end = at + draw(st.integers(1, 64))
                data = data[:end] + data[at:end] + data[end:]
    return data[: 4 * size + 100]


# --- safetensors ---------------------------------------------------------------------------------
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1}


def safetensors_bytes(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A good file, written here once more on purpose."""
    names = {"float32": "F32", "float64": "F64", "float16": "F16", "int32": "I32"}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return packed(dumped(header), data)


def packed(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + data


@st.composite
def safetensors_files(draw, good: bytes, keys: Sequence[str] = ()) -> bytes:
    """A good file with its header changed: names, types, shapes, offsets, order, length."""
    length = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    style = draw(st.integers(0, 9))
    if style == 0:
        return draw(damaged(good))
    if style == 1:
        return draw(st.sampled_from(STAND_INS))
    if style == 2:
        wrong = draw(st.sampled_from((0, length - 1, length + 1, length + 8, *HUGE)))
        return packed(dumped(header), data, wrong)
    if style == 3:
        return packed(dumped(draw(json_trees(header, keys))), data)
    names = [name for name in header if name != "__metadata__"]
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 3)))):
        name, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        entry = header.get(name)
        if entry is None or other not in header:
            continue
        match draw(st.integers(0, 9)):
            case 0:  # two tensors change names
                header[name], header[other] = header[other], header[name]
            case 1:
                header[draw(st.sampled_from((*keys, *names)) | st.text(max_size=6))] = header.pop(
                    name
                )
            case 2:
                entry["dtype"] = draw(
                    st.sampled_from((*ITEM_BYTES, "BOOL", "f32", "F128", "F4", ""))
                )
            case 3:
                entry["shape"] = entry["shape"][::-1]
            case 4:
                entry["shape"] = draw(
                    st.lists(st.sampled_from((0, 1, 2, 3, 5, 6, 10, 12, 2**31, 2**62)), max_size=4)
                )
            case 5:
                entry["data_offsets"] = list(header[other]["data_offsets"])
            case 6:
                step = draw(st.sampled_from((-8, -4, -1, 1, 4, 2**31, 2**62)))
                entry["data_offsets"] = [each + step for each in entry["data_offsets"]]
            case 7:  # the same bytes as one long axis, or with another type of the same width
                begin, end = entry["data_offsets"]
                dtype = draw(st.sampled_from(tuple(ITEM_BYTES)))
                entry |= {"dtype": dtype, "shape": [(end - begin) // ITEM_BYTES[dtype]]}
            case 8:
                del header[name]
            case 9:  # NaN, infinity, or other numbers
                begin = entry["data_offsets"][0]
                raw = draw(st.sampled_from((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\0\0")))
                data = data[:begin] + raw + data[begin + 4 :]
    text = dumped(dict(draw(st.permutations(list(header.items())))))
    if draw(st.integers(0, 9)) == 0:  # an entry twice
        name = names[0]
        text = text[:-1] + b", " + dumped({name: header.get(name, 0)})[1:-1] + b"}"
    if draw(st.integers(0, 9)) == 0:
        text = text.ljust(len(text) + draw(st.integers(1, 20)))
    return packed(text, data)


# --- folders -------------------------------------------------------------------------------------
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 12345\n"
STAND_INS = (
    b"",
    LFS,
    pickle.dumps({"a": [1]}, protocol=2),
    b"PK\x03\x04" + bytes(60),
    b"<!DOCTYPE html><html>404</html>",
    b"GGUF\x03\0\0\0" + bytes(16),
    safetensors_bytes({"a": np.ones(3, np.float32)}),
    b'{"r": 8}',
    b"[]",
    b"null",
    bytes(64),
    b"\x80",
)


@st.composite
def folders(draw, good: Files, others: Sequence[bytes] = ()) -> Files:
    """A good folder with one or two files swapped, removed, linked away or replaced."""
    files: Files = dict(good)
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        name, other = draw(st.sampled_from(sorted(good))), draw(st.sampled_from(sorted(good)))
        match draw(st.integers(0, 8)):
            case 0:
                files[name] = draw(st.sampled_from(STAND_INS))
            case 1:
                files.pop(name, None)
            case 2:
                outside = (
                    "../secret",
                    "/etc/passwd",
                    "..",
                    name,
                    "../../../nowhere",
                    "/dev/zero",
                    ".",
                )
                files[name] = ("link", draw(st.sampled_from(outside)))
            case 3:
                files[name] = FOLDER
            case 4:
                files[name], files[other] = good[other], good[name]
            case 5:
                if isinstance(content := files.get(name), bytes):
                    files[name] = content[: draw(st.integers(0, len(content)))]
            case 6:
                files[name] = draw(st.sampled_from((*others, b"{}")))
            case 7:  # through a link inside the folder, which is allowed
                if isinstance(files.get(name), bytes):
                    files[f"{name}.real"], files[name] = files[name], ("link", f"{name}.real")
            case 8:
                pickled = draw(st.sampled_from(("adapter_model.bin", "pytorch_model.bin", "x.pt")))
                files[pickled] = pickle.dumps({"a": 1})
                if draw(st.booleans()):
                    files.pop(name, None)
    return files
