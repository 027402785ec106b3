"""Files that others wrote: what is refused, in one line, and that the rest is read exactly."""

import errno
import json
import os
import pickle
import re
import shutil
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from molora_jax.files import (
    DTYPES,
    inside,
    naming_path,
    near_path,
    read_json,
    read_safetensors,
    read_text,
)


def stored(header, data=b"", *, length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(read, path, kind=ValueError) -> str:
    """The message of the error that reading raises: one line, not long, naming the file."""
    with pytest.raises(kind) as caught:
        read(path, where="the file")
    text = str(caught.value)
    assert "the file" in text and len(text.splitlines()) == 1 and len(text) < 900, text
    return text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ('{"r": NaN}', "NaN"),
        ('{"r": -Infinity}', "Infinity"),
        ('{"r": 1e999}', "too large"),
        ('{"r": ' + "9" * 5000 + "}", "5000 digits"),
        ('{"r": 1, "r": 2}', "'r' stands twice"),
        ('{"a": [{"r": 1, "r": 1}]}', "'r' stands twice"),
        ('{"a": "\\ud83d"}', "half a character"),
        ('{"\\ud83d": 1}', "half a character"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "64 levels"),
        ('{"a": ' + "[" * 100_000, "nested too deep"),
        ("[1]", "holds a list"),
        ("null", "holds null"),
        ("{", "line 1"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("<!DOCTYPE html><html>", "web page"),
        (b"\xff\xfe{}", "UTF-8"),
        (stored({"a": entry([1], 0, 4)}, b"\0\0\x80\xbf"), "safetensors"),
        (pickle.dumps({"r": 1}, protocol=2), "pickle"),
    ],
)
def test_json_that_means_nothing_certain_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said in refusal(read_json, path)


def test_json_is_read_as_it_stands(tmp_path):
    value = {"r": 16, "α": [1.5, None, True, {"deep": "é🙂"}], "model_max_length": 10**30}
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(value).encode())  # with a byte order mark
    assert read_json(path, where="it", root=tmp_path) == value


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_type_are_read_as_they_were_written(tmp_path, dtype):
    rng = np.random.default_rng(0)
    bits = re.sub(r"\D", "", dtype)
    kind = {"BF16": ml_dtypes.bfloat16, "BOOL": np.bool_}.get(dtype)
    kind = kind or np.dtype(f"{dtype[0].lower()}{int(bits) // 8}")
    arrays = {
        "a": rng.integers(0, 2, (3, 5)).astype(kind),
        "é": np.zeros((0, 4), kind),
        "scalar": np.ones((), kind),
    }
    path = tmp_path / "x.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    tensors = read_safetensors(path, where="it", root=tmp_path)
    assert sorted(tensors.keys()) == sorted(arrays) and tensors.metadata == {"format": "pt"}
    for key, expected in arrays.items():
        found = tensors.get(key)
        assert found.dtype == expected.dtype and tensors.dtype(key) == dtype
        assert found.shape == tensors.shape(key) == expected.shape
        assert found.tobytes() == expected.tobytes() and found.flags.writeable


def test_an_array_outlives_its_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.arange(4.0)}, path)
    array = read_safetensors(path, where="it").get("a")
    path.write_bytes(b"")
    assert array.tolist() == [0, 1, 2, 3]


GOOD = {"a": entry([2], 0, 8), "b": entry([1], 8, 10, "BF16")}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (pickle.dumps([1] * 9, protocol=2), "pickle"),
        (b"PK\x03\x04" + b"\0" * 99 + b"\xff" * 9, "pickle"),
        (b"GGUF\x03\0\0\0\1", "GGUF"),
        (b'{"r": 16, "lora_alpha": 32}', "no safetensors"),
        (b"\x10", "copy it again"),
        (stored(GOOD, bytes(10), length=2**63), "header"),
        (stored(GOOD, bytes(10), length=10**6), "header"),
        (stored(GOOD, bytes(9)), "damaged"),
        (stored(GOOD, bytes(11)), "damaged"),
        (stored({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)), "damaged"),
        (stored({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, bytes(16)), "damaged"),
        (stored({"a": entry([2], 0, 4)}, bytes(4)), "damaged"),
        (stored({"a": entry([-2], 0, 8)}, bytes(8)), "damaged"),
        (stored({"a": entry([2.0], 0, 8)}, bytes(8)), "damaged"),
        (stored({"a": entry([True], 0, 4)}, bytes(4)), "damaged"),
        (stored({"a": entry([2**62, 2**62], 0, 8)}, bytes(8)), "damaged"),
        (stored({"a": entry([1], 0, 4, "F128")}, bytes(4)), "damaged"),
        (stored({"a": entry([1], 0, 4, ["F32"])}, bytes(4)), "damaged"),
        (stored({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "damaged"),
        (stored({"a": [0, 4]}, bytes(4)), "damaged"),
        (stored({"__metadata__": {"format": 1}}), "damaged"),
        (stored([]), "a list"),
        (stored(b'{"a": {}, "a": {}}'), "stands twice"),
        (stored(b'{"a\xff": {}}'), "UTF-8"),
    ],
)
def test_a_damaged_or_foreign_safetensors_file_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(content)
    assert said in refusal(read_safetensors, path)


@pytest.mark.parametrize("shape", [[0, 2**62, 8], [1] * 65])
def test_a_shape_that_no_array_has_is_refused_when_it_is_read(tmp_path, shape):
    path = tmp_path / "x.safetensors"
    size = 4 * int(0 not in shape)
    path.write_bytes(stored({"a": entry(shape, 0, size)}, bytes(size)))
    with pytest.raises(ValueError, match=r"it: tensor 'a' of shape .* cannot be read"):
        read_safetensors(path, where="it").get("a")


def test_a_type_that_numpy_lacks_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(stored({"a": entry([4], 0, 4, "F8_E4M3")}, bytes(4)))
    tensors = read_safetensors(path, where="it")
    assert tensors.dtype("a") == "F8_E4M3"
    with pytest.raises(ValueError, match="it: tensor 'a' is F8_E4M3; known are F64"):
        tensors.get("a")


def test_a_safetensors_header_of_640_bytes_is_no_pickle(tmp_path):
    header = json.dumps({"a": entry([1], 0, 4)}).encode().ljust(640)
    path = tmp_path / "x.safetensors"
    path.write_bytes(stored(header, bytes(4)))
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert read_safetensors(path, where="it").get("a").tolist() == [0]


def test_a_lying_header_asks_for_no_memory(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(stored({"a": entry([2**34], 0, 2**36)}, bytes(8)))
    tracemalloc.start()
    refusal(read_safetensors, path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("read", [read_json, read_safetensors, read_text])
def test_what_is_no_file_is_said_in_words(tmp_path, read):
    assert "no file" in refusal(read, tmp_path / "absent", FileNotFoundError)
    (tmp_path / "file").write_text("{}")
    assert "no file" in refusal(read, tmp_path / "file" / "config.json", FileNotFoundError)
    assert "a folder" in refusal(read, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no ordinary file" in refusal(read, tmp_path / "pipe")
    assert "no path" in refusal(read, tmp_path / "a\0b")
    assert "no path" in refusal(read, tmp_path / ("x" * 9000))
    assert "no ordinary file" in refusal(read, "/dev/zero")


def test_more_text_than_asked_for_is_refused(tmp_path):
    (tmp_path / "long.txt").write_text("x" * 11)
    with pytest.raises(ValueError, match="it has more than 10 bytes"):
        read_text(tmp_path / "long.txt", where="it", max_bytes=10)


def test_links_stay_in_their_folder(tmp_path):
    root, secret = tmp_path / "adapter", tmp_path / "secret.json"
    (root / "sub").mkdir(parents=True)
    secret.write_text('{"key": 1}')
    (root / "real.json").write_text('{"r": 4}')
    (root / "sub" / "ok.json").symlink_to("../real.json")
    (root / "out.json").symlink_to("../secret.json")
    (root / "up").symlink_to("..")
    (root / "loop").symlink_to("loop")
    assert read_json(root / "sub" / "ok.json", where="it", root=root) == {"r": 4}
    for path in (root / "out.json", root / "up" / "secret.json", root / ".." / "secret.json"):
        with pytest.raises(ValueError, match="leads out of"):
            read_json(path, where="it", root=root)
    with pytest.raises(ValueError, match="loop"):
        read_json(root / "loop", where="it", root=root)
    # The folder itself may be reached through a link: that is the caller's own choice.
    (tmp_path / "link").symlink_to(root)
    link = tmp_path / "link"
    assert inside(link / "real.json", link) == (root / "real.json").resolve()


def test_a_snapshot_of_the_hugging_face_cache_reaches_its_own_blobs_alone(tmp_path):
    model, other = tmp_path / "models--org--a", tmp_path / "models--org--b"
    snapshot = model / "snapshots" / "0123abcd"
    for folder in (snapshot / "sub", model / "blobs", other / "blobs"):
        folder.mkdir(parents=True)
    (model / "blobs" / "f00").write_text('{"r": 8}')
    (other / "blobs" / "f00").write_text('{"r": 9}')
    (snapshot / "adapter_config.json").symlink_to("../../blobs/f00")
    (snapshot / "sub" / "adapter_config.json").symlink_to("../../../blobs/f00")
    (snapshot / "other.json").symlink_to("../../../models--org--b/blobs/f00")
    for root in (snapshot, snapshot / "sub"):
        assert read_json(root / "adapter_config.json", where="it", root=root) == {"r": 8}
    with pytest.raises(ValueError, match="leads out of"):
        read_json(snapshot / "other.json", where="it", root=snapshot)


def test_a_mistyped_path_has_the_nearest_beside_it_in_its_message(tmp_path):
    (tmp_path / "adapters" / "code").mkdir(parents=True)
    (tmp_path / "code.jsonl").touch()
    for wrong, right in [
        ("cod.jsonl", "code.jsonl"),
        ("adapter/code", "adapters/code"),
        ("adapter/math", "adapters"),
        ("adapters/coed", "adapters/code"),
    ]:
        assert near_path(tmp_path / wrong) == f"; did you mean {tmp_path / right}?"
    (tmp_path / "w\x1b[31morld.tsv").touch()
    for wrong in (
        "world.tsv",
        "quite/other",
        "code.jsonl/file",
        "",
        "code.jsonl",
        "a" * 5000,
        "a\0b",
    ):
        assert near_path(tmp_path / wrong) == ""
    with pytest.raises(FileNotFoundError, match=r"did you mean .*/code\.jsonl\?"):
        read_text(tmp_path / "code.json", where="text")


def full_disk(source, target, **_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))


def test_a_full_disk_names_what_was_written(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"No space left on device: 'out/x'"), naming_path("out/x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("whole")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full_disk)
        said = r"^out/x cannot be written: \[Errno 28\] No space left"
        with pytest.raises(OSError, match=said), naming_path("out/x"):
            shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copy)
    with pytest.raises(OSError, match=r"No space left on device: 'out/x'"), naming_path("out/x"):
        full_disk("here", "there")
    with pytest.raises(FileNotFoundError, match="'there'"), naming_path("out/x"):
        raise FileNotFoundError(errno.ENOENT, "none", "there")
    with pytest.raises(OSError, match="own words"), naming_path("out/x"):
        raise OSError("own words")
