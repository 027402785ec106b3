"""A short, repeatable pass of every fuzz target, and proof that the harness can fail."""

import warnings

import hypothesis
import numpy as np
import pytest

from tests.fuzz import oracle
from tests.fuzz.guard import attempt
from tests.fuzz.mutate import safetensors_bytes
from tests.fuzz.run import fuzz, main
from tests.fuzz.targets import all_targets

TARGETS = all_targets()
INPUTS = 6  # times the target's share: about 800 in all


@pytest.mark.parametrize("name", list(TARGETS))
def test_damaged_and_lying_input_is_refused_in_words_or_read_as_it_stands(name, monkeypatch):
    monkeypatch.setattr("absl.logging.warning", lambda *_, **__: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        count = fuzz(TARGETS[name], INPUTS * TARGETS[name].share, seed=0)
    assert count["refused"] and count["accepted"], count


def raises(error):
    def call():
        raise error

    return call


def opens(path, mode="r"):
    def call():
        with open(path, mode):
            return None

    return call


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (raises(TypeError("x")), "TypeError"),
        (raises(UnicodeDecodeError("utf-8", b"", 0, 1, "x")), "UnicodeDecodeError"),
        (raises(ValueError("two\nlines: file.json")), "not one line"),
        (raises(ValueError("")), "not one line"),
        (raises(ValueError("file.json" * 1000)), "characters"),
        (raises(ValueError("something is wrong")), "names no file"),
        (opens("/etc/hostname"), "outside the given folder"),
        (lambda: np.empty(2**31, np.uint8), "MemoryError"),
        (lambda: __import__("pickle").loads(b"cbuiltins\nlen\n."), "pickle.find_class"),
        (lambda: __import__("os").system("true"), "os.system"),
    ],
)
def test_a_broken_promise_is_seen(tmp_path, call, said):
    with pytest.raises(AssertionError, match=said):
        attempt(call, folder=tmp_path, names=("file.json",))


def test_the_given_folder_may_be_read_and_not_written(tmp_path):
    (tmp_path / "file.json").write_text("{}")
    (tmp_path / "weights.bin").write_text("x")
    (tmp_path / "link").symlink_to("/etc/hostname")
    attempt(opens(tmp_path / "file.json"), folder=tmp_path)
    attempt(opens(tmp_path / "new", "w"), folder=tmp_path, writable=[tmp_path])
    for name, mode, said in (("file.json", "w", "to write"), ("weights.bin", "r", "pickle"),
                             ("link", "r", "outside")):  # fmt: skip
        with pytest.raises(AssertionError, match=said):
            attempt(opens(tmp_path / name, mode), folder=tmp_path)


def test_the_oracle_sees_another_scale_and_another_array():
    from tests.fuzz.target_adapters import CONFIG, GOOD, SHAPE, WEIGHTS, load_adapter
    from tests.fuzz.targets import laid_out, workplace

    folder = workplace() / "plain"
    folder.mkdir()
    adapter, _ = load_adapter(laid_out(GOOD, folder), config=SHAPE)
    oracle.check_adapter(adapter, GOOD[CONFIG], GOOD[WEIGHTS], SHAPE.num_layers)
    for old, new in (
        (b'"lora_alpha": 6', b'"lora_alpha": 7'),
        (b'"use_rslora": false', b'"use_rslora": true'),
    ):
        changed = GOOD[CONFIG].replace(old, new)
        assert changed != GOOD[CONFIG]
        with pytest.raises(AssertionError, match="scale"):
            oracle.check_adapter(adapter, changed, GOOD[WEIGHTS], SHAPE.num_layers)
    weights = GOOD[WEIGHTS][:-1] + b"\x3f"
    with pytest.raises(AssertionError):
        oracle.check_adapter(adapter, GOOD[CONFIG], weights, SHAPE.num_layers)
    with pytest.raises(AssertionError):
        oracle.tensors(safetensors_bytes({"a": np.ones(3, np.float32)}) + b"\0")


def test_the_runner_stops_at_the_first_broken_promise(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tests.fuzz.target_adapters.read_json", lambda *_, **__: {})
    failures = tmp_path / "failures"
    arguments = ["--inputs=200", "--targets=json", f"--failures={failures}"]
    assert main(arguments) == 1
    assert "json: FAILED with --seed=0" in capsys.readouterr().out
    assert (failures / "json" / "case.txt").is_file()
    assert (failures / "json" / "content").is_file()
    monkeypatch.undo()
    assert main(arguments) == 0
    assert "200 inputs" in capsys.readouterr().out
