"""Files that others wrote, read with care: paths that stay in their folder, JSON and safetensors.

All errors are one line that begins with `where`, the caller's name for the file. ValueError: what
is there cannot be used; FileNotFoundError: nothing is there. Sizes in a file are believed only
after they were held against its length, so a damaged header cannot ask for memory.
"""

import contextlib
import json
import math
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

MAX_TEXT_BYTES = 2**24  # of a JSON file or header: parsed, it takes some ten times as much memory
MAX_DEPTH = 64  # objects and arrays inside each other
MAX_DIGITS = 300  # an integer of more is not a float64; some tokenizer files do write 10**30
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def inside(path: str | Path, root: str | Path) -> Path:
    """`path` with its symlinks followed, which must end in the folder `root`.

    Raises ValueError where they leave it. A snapshot of the Hugging Face cache consists of links
    into its own models--*/blobs, so a root in models--*/snapshots/<commit> may reach its models--*.
    """
    try:
        found, allowed = Path(path).resolve(), Path(root).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no path at all
        raise ValueError(
            f"{one_line(str(path))} cannot be followed: {one_line(str(error))}"
        ) from error
    for folder in (allowed, *allowed.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            allowed = folder.parent.parent
            break
    if not found.is_relative_to(allowed):
        raise ValueError(
            f"{one_line(str(path))} leads out of {one_line(str(root))} (to "
            f"{one_line(str(found))}) and is not read: put a copy of the file in its place"
        )
    return found


def open_file(path: str | Path, *, where: str, root: str | Path | None = None) -> BinaryIO:
    """An ordinary file, opened for its bytes; it must lie in the folder `root` where one is given.

    Raises ValueError for a folder, a pipe (it would be waited for), a device (read for ever), and
    for what a clone or copy leaves in the place of a file; FileNotFoundError as the module says.
    """
    path = Path(path) if root is None else inside(path, root)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{where}: there is no file {one_line(str(path))}") from None
    except (OSError, ValueError) as error:  # too long a name, a loop of links, a zero byte
        name = one_line(repr(str(path)))
        raise ValueError(f"{where}: {name} is no path: {one_line(str(error))}") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise ValueError(f"{where}: {one_line(str(path))} is {what}; expected a file")
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    head = file.peek(64)[:64]
    problem = None
    if not head:
        problem = "is empty (0 bytes): copy it again"
    elif head.startswith(b"version https://git-lfs.github.com/spec/"):
        problem = "is a Git-LFS pointer, not the file itself: run 'git lfs pull' in its folder"
    if problem:
        file.close()
        raise ValueError(f"{where} {problem}")
    return file


def read_text(
    path: str | Path,
    *,
    where: str,
    root: str | Path | None = None,
    max_bytes: int = MAX_TEXT_BYTES,
) -> str:
    """The text of a UTF-8 file of at most `max_bytes`, which must lie in `root` where one is given.

    Raises ValueError, FileNotFoundError as the module says; refuses a Git-LFS pointer.
    """
    with open_file(path, where=where, root=root) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{where} has more than {max_bytes} bytes; it cannot be what it should be")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no UTF-8 text ({error}){_hint(data)}") from error


def read_json(path: str | Path, *, where: str, root: str | Path | None = None) -> dict[str, Any]:
    """The object in a JSON file, as `parse_json` reads it, which must lie in `root` if given."""
    text = read_text(path, where=where, root=root)
    value = parse_json(text, where=where)
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds {_kind(value)}; expected a JSON object {{…}}")
    return value


def parse_json(text: str, *, where: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for what JSON forbids or leaves open and later code would stumble over: NaN
    and Infinity, numbers beyond float64, a key twice in one object, half a character (a lone
    \\ud83d) and more than MAX_DEPTH levels.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"the number {digits[:12]}… has {len(digits)} digits")
        return int(digits)

    def real(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"the number {digits[:24]} is too large")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in found if keys.count(key) > 1)
            raise ValueError(f"the key {one_line(twice)!r} stands twice in one object")
        return found

    try:
        value = json.loads(
            text,
            parse_constant=refuse,
            parse_int=integer,
            parse_float=real,
            object_pairs_hook=unique,
        )
        _check_tree(value)
    except RecursionError:
        raise ValueError(f"{where} cannot be read: it is nested too deep") from None
    except ValueError as error:
        hint = _hint(text[:64].encode("utf-8", "replace"))
        raise ValueError(f"{where} cannot be read as JSON: {error}{hint}") from error
    return value


def _check_tree(value: Any) -> None:
    """Refuses what is nested too deep, and text that UTF-8 cannot hold."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, str) and not each.isascii():
                try:
                    each.encode("utf-8")
                except UnicodeEncodeError:
                    raise ValueError(f"the text {one_line(each)!r} has half a character") from None
        if not below:
            return
        level = below
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def one_line(text: str, *, limit: int = 200) -> str:
    """The text on one line, cut in its middle to `limit` characters, for a message."""
    text = " ".join(text.split()) if len(text.splitlines()) > 1 else text
    return text if len(text) <= limit else f"{text[: limit * 4 // 5]} … {text[-limit // 8 :]}"


@contextlib.contextmanager
def naming(where: object) -> Iterator[None]:
    """ValueErrors inside begin with `where`, the file's path, if they do not hold it already."""
    try:
        yield
    except ValueError as error:
        text = one_line(str(error), limit=1000)
        if str(where) in text:
            raise
        raise ValueError(f"{where}: {text}") from error


class StoredTensors:
    """The tensors of a safetensors file: what its header says, and their values when asked for."""

    def __init__(self, data: mmap.mmap, header: Mapping[str, Any], start: int):
        self._data, self._header, self._start = data, header, start
        self.metadata: dict[str, str] = dict(header.get("__metadata__") or {})

    def keys(self) -> list[str]:
        """Names of the tensors, in the header's order."""
        return [key for key in self._header if key != "__metadata__"]

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._header[key]["shape"])

    def dtype(self, key: str) -> str:
        """As the format spells it: "F32", "BF16", …; a key of DTYPES."""
        return self._header[key]["dtype"]

    def get(self, key: str) -> np.ndarray:
        """The values, an array of its own that no longer depends on the file."""
        begin, end = self._header[key]["data_offsets"]
        raw = np.frombuffer(self._data, np.uint8, end - begin, self._start + begin).copy()
        return raw.view(DTYPES[self.dtype(key)]).reshape(self.shape(key))


def read_safetensors(
    path: str | Path, *, where: str, root: str | Path | None = None
) -> StoredTensors:
    """Checks the whole header of a safetensors file and maps its tensors, not yet read.

    The file must lie in `root` where one is given. Raises ValueError, FileNotFoundError as the
    module says: for a Git-LFS pointer, an empty, cut or damaged file, and one of another format.
    """
    with open_file(path, where=where, root=root) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(64)
        length = int.from_bytes(head[:8], "little")
        if length > MAX_TEXT_BYTES or size < 8 + length:
            raise ValueError(
                f"{where} is cut short, damaged or no safetensors file: its header would have "
                f"{length} bytes, the file has {size}{_hint(head) or '; copy it again'}"
            )
        file.seek(8)
        raw = file.read(length)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        header = parse_json(raw.decode("utf-8"), where=f"the header of {where}")
    except UnicodeDecodeError as error:
        raise ValueError(f"the header of {where} is no UTF-8 text ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"the header of {where} holds {_kind(header)}; expected a JSON object")
    _check_header(header, size - 8 - length, where)
    return StoredTensors(data, header, 8 + length)


def _check_header(header: dict[str, Any], size: int, where: str) -> None:
    """Every tensor's type, shape and bytes; they must fill the `size` bytes behind the header."""
    spans = []
    for key, entry in header.items():
        if key == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(v, str) for v in entry.values()):
                raise ValueError(f"{where}: __metadata__ is no object of texts")
            continue
        label = f"{where}: tensor {one_line(key)!r}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{label}: expected an object of dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{label} is {one_line(repr(dtype))}; known are {', '.join(DTYPES)}")
        for name, numbers in (("shape", shape), ("data_offsets", offsets)):
            if not isinstance(numbers, list) or not all(
                type(n) is int and 0 <= n < 2**63 for n in numbers
            ):
                raise ValueError(f"{label} has {name} {one_line(repr(numbers))}; expected integers")
        if len(offsets) != 2:
            raise ValueError(f"{label} has {len(offsets)} data_offsets; expected begin and end")
        # numpy counts the bytes of an array without its empty axes, and holds 64 axes at most.
        itemsize = np.dtype(DTYPES[dtype]).itemsize
        if len(shape) > 32 or math.prod(n for n in shape if n) * itemsize >= 2**63:
            raise ValueError(
                f"{label} has the shape {one_line(repr(shape))}, which no array can have"
            )
        wanted = math.prod(shape) * itemsize
        begin, end = offsets
        if end - begin != wanted:
            raise ValueError(
                f"{label}, {dtype} of shape {one_line(repr(shape))}, has {end - begin} "
                f"bytes instead of {one_line(str(wanted))}; the file is damaged: copy it again"
            )
        spans.append((begin, end, key))
    position = 0
    for begin, end, key in sorted(spans):
        if begin != position or end > size:
            raise ValueError(
                f"{where} is cut short or damaged: tensor {one_line(key)!r} lies at bytes "
                f"{begin} to {end} of {size}, and the one before ends at "
                f"{position}; copy it again"
            )
        position = end
    if position != size:
        raise ValueError(f"{where}: {size - position} bytes follow its last tensor; copy it again")


def _hint(head: bytes) -> str:
    """What a file is that begins so, where that is clear; to be added to an error."""
    if head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5"):
        return (
            ". It looks like a pickle of torch.save, which can run code and is never read: save "
            "the weights as safetensors"
        )
    if head.startswith(b"GGUF"):
        return ". It is a GGUF file"
    if head.lstrip()[:1] == b"<":
        return ". It looks like a web page: the download failed; fetch it again"
    if head[8:9] == b"{" and not any(head[4:8]):
        return ". It looks like a safetensors file"
    return ""


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
