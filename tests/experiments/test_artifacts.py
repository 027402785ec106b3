"""The cache of trained things: keys, atomic entries, damage, kills."""

import dataclasses
import json
import threading

import pytest

from experiments import artifacts
from tests.experiments.toy import Config


@pytest.fixture
def cached(tmp_path):
    """`artifacts.cached` into a folder of its own, counting how often something was made."""
    made = []

    def make(folder):
        made.append(folder)
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "sub" / "value.txt").write_text(f"made {len(made)}")

    def run(*, config=None, digests=None, make=make, remake=False, kind="toy"):
        return artifacts.cached(
            kind,
            config={"rank": 4} if config is None else config,
            digests={"data": "d"} if digests is None else digests,
            make=make,
            load=lambda folder: (folder / "sub" / "value.txt").read_text(),
            remake=remake,
            cache=tmp_path,
        )

    run.made = made
    return run


def entry(tmp_path):
    (manifest,) = tmp_path.glob("artifacts/toy/*/artifact.json")
    return manifest.parent


def test_made_once_and_found_by_config_and_digests(cached):
    assert [cached(), cached()] == ["made 1", "made 1"]
    assert cached(config={"rank": 5}) == "made 2"
    assert cached(digests={"data": "e"}) == "made 3"
    assert cached(kind="other") == "made 4"
    assert cached() == "made 1"


def test_places_are_not_in_the_key(cached):
    assert cached(config=Config(out="here")) == cached(config=Config(out="there"))
    assert cached(config=Config(steps=9)) == "made 2"


def test_remake(cached):
    cached()
    assert cached(remake=True) == "made 2"
    assert cached() == "made 2"


@pytest.mark.parametrize("damage", ["changed", "removed", "added", "manifest"])
def test_a_damaged_entry_is_made_anew_with_a_message(cached, tmp_path, caplog, damage):
    cached()
    folder = entry(tmp_path)
    if damage == "changed":
        (folder / "sub" / "value.txt").write_text("forged")
    elif damage == "removed":
        (folder / "sub" / "value.txt").unlink()
    elif damage == "added":
        (folder / "more.txt").write_text("?")
    else:
        (folder / "artifact.json").write_text("{")
    with caplog.at_level("WARNING", logger="absl"):
        assert cached() == "made 2"
    assert "damaged" in caplog.text
    assert cached() == "made 2"


def test_what_a_failed_make_left_is_there_for_the_next_and_its_checkpoints_go(cached, tmp_path):
    def dies(folder):
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "step_5").write_text("5")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(make=dies)
    assert not list(tmp_path.glob("artifacts/toy/*/artifact.json"))

    def resumes(folder):
        step = (folder / "checkpoints" / "step_5").read_text()
        (folder / "sub").mkdir()
        (folder / "sub" / "value.txt").write_text(f"from step {step}")

    assert cached(make=resumes) == "from step 5"
    assert not (entry(tmp_path) / "checkpoints").exists()
    assert cached() == "from step 5"


def test_a_make_that_writes_nothing_is_refused(cached):
    with pytest.raises(ValueError, match="wrote no file"):
        cached(make=lambda folder: None)


def test_two_at_once_make_it_once(cached):
    threads = [threading.Thread(target=cached) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cached.made) == 1


def test_digest_ignores_order_of_keys_and_kind_of_sequence_but_no_value():
    one = artifacts.digest_of({"a": (1, 2), "b": {"c": 1.0}})
    assert one == artifacts.digest_of({"b": {"c": 1.0}, "a": [1, 2]})
    assert one != artifacts.digest_of({"a": (2, 1), "b": {"c": 1.0}})
    with pytest.raises(ValueError, match="JSON"):
        artifacts.digest_of({"a": float("nan")})
    changed = dataclasses.replace(Config(), rate=0.25)
    assert artifacts.digest_of(Config()) != artifacts.digest_of(changed)


def test_write_atomically_replaces(tmp_path):
    path = tmp_path / "x.json"
    artifacts.write_atomically(path, json.dumps([1]))
    artifacts.write_atomically(path, json.dumps([2]))
    assert json.loads(path.read_text()) == [2]
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]
