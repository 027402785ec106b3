"""Files that others wrote, read with care: paths that stay in their folder, JSON and safetensors.

All errors are one line that begins with `where`, the caller's name for the file. ValueError: what
is there cannot be used; FileNotFoundError: nothing is there. Sizes in a file are believed only
after they were held against its length, so a damaged header cannot ask for memory.
"""

import collections
import contextlib
import difflib
import errno
import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

MAX_TEXT_BYTES = 2**24  # of a JSON file or header: parsed, it takes some ten times as much memory
MAX_DEPTH = 64  # objects and arrays inside each other
# Of tensors, as safetensors spells them: those that it makes numpy arrays of.
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
MAX_DIGITS = 300  # an integer of more is not a float64; some tokenizer files do write 10**30


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
        raise FileNotFoundError(
            f"{where}: there is no file {one_line(str(path))}{near_path(path)}"
        ) from None
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


def near_path(path: str | Path) -> str:
    """The end of a message that `path` is not there: what beside it is named most alike, or ""."""
    near = nearest_path(path)
    return f"; did you mean {near}?" if near else ""


def nearest_path(path: str | Path) -> str:
    """What beside a path that is not there is named most alike, on one line; "" for none."""
    path = Path(path)
    try:
        absent = next(each for each in (*reversed(path.parents), path) if not os.path.lexists(each))
        with os.scandir(absent.parent) as entries:  # of a huge folder a part: each takes a while
            names = [entry.name for entry in itertools.islice(entries, 2000)]
        near = difflib.get_close_matches(absent.name, filter(str.isprintable, names), n=1)
        if not near:
            return ""
        beside = absent.with_name(near[0])
        whole = beside / path.relative_to(absent)
        return one_line(str(whole if whole.exists() else beside))
    except (OSError, ValueError, StopIteration):  # too long a name, a folder that may not be listed
        return ""


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
            counts = collections.Counter(key for key, _ in pairs)
            ((twice, _),) = counts.most_common(1)
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


@contextlib.contextmanager
def naming_path(path: str | Path) -> Iterator[None]:
    """A full disk inside names `path`, and so does every OSError that names no file."""
    try:
        yield
    except shutil.Error as error:  # of copytree: (source, copy, why) of each file
        raise OSError(f"{path} cannot be written: {error.args[0][0][2]}") from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not full and (error.errno is None or error.filename is not None):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class StoredTensors:
    """The tensors of a safetensors file: what its header says, and their values when asked for."""

    def __init__(self, stored: Any, where: str):
        self._stored, self._where = stored, where
        self.metadata: dict[str, str] = dict(stored.metadata() or {})

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._stored.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._stored.get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """As the format spells it: "F32", "BF16", …; one of DTYPES, if it is to be read."""
        return self._stored.get_slice(key).get_dtype()

    def get(self, key: str) -> np.ndarray:
        """The values, an array of its own that no longer depends on the file."""
        if (dtype := self.dtype(key)) not in DTYPES:
            raise ValueError(
                f"{self._where}: tensor {one_line(key)!r} is {dtype}; known are {', '.join(DTYPES)}"
            )
        try:
            return self._stored.get_tensor(key)
        except (SafetensorError, ValueError) as error:  # a shape that numpy cannot have
            raise ValueError(
                f"{self._where}: tensor {one_line(key)!r} of shape "
                f"{one_line(repr(self.shape(key)))} cannot be read ({one_line(str(error))})"
            ) from error


def read_safetensors(
    path: str | Path, *, where: str, root: str | Path | None = None
) -> StoredTensors:
    """Checks the header of a safetensors file and maps its tensors, not yet read.

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
    try:
        # Of a name that stands twice the library would take the last.
        header = parse_json(raw.decode("utf-8"), where=f"the header of {where}")
    except UnicodeDecodeError as error:
        raise ValueError(f"the header of {where} is no UTF-8 text ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"the header of {where} holds {_kind(header)}; expected a JSON object")
    try:
        return StoredTensors(safe_open(path, framework="numpy"), where)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{where} is cut short or damaged ({one_line(str(error))}); copy it again"
        ) from error


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
