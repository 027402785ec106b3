"""Checkpoints: exact, atomic, described without devices, resumed after a real kill."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.training import BatchOrder, TrainConfig, fit
from molora_jax.training.checkpoint import describe_checkpoint, restore_newest, save_checkpoint
from tests.training.test_loop import toy, toy_loss, windows


def tree(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "params": {"q/a.b['x']": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)},
        "optimiser": (jnp.asarray(7, jnp.int32), jnp.asarray(rng.normal(size=4), jnp.bfloat16)),
    }


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_what_is_saved_comes_back_bit_for_bit_and_old_ones_go(tmp_path):
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, step, tree(step), meta={"run": "a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000015"]
    restored, meta = restore_newest(tmp_path, tree(0))
    assert_same(restored, tree(15))
    assert restored["optimiser"][1].dtype == jnp.bfloat16
    assert meta == {"run": "a", "step": 15}
    assert restore_newest(tmp_path / "none", tree()) is None


@pytest.mark.filterwarnings("default::ResourceWarning")  # Orbax, on a file it cannot read
def test_half_written_and_damaged_checkpoints_are_skipped_with_a_message(tmp_path, caplog):
    save_checkpoint(tmp_path, 5, tree(5), meta={})
    save_checkpoint(tmp_path, 10, tree(10), meta={})
    (tmp_path / "step_00000015.orbax-checkpoint-tmp").mkdir()
    for file in (tmp_path / "step_00000010").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    restored, meta = restore_newest(tmp_path, tree(0))
    assert meta["step"] == 5
    assert_same(restored, tree(5))
    said = caplog.text
    assert "step_00000015.orbax-checkpoint-tmp is half-written" in said
    assert "step_00000010 cannot be read: skipped" in said
    assert not list(tmp_path.glob("*tmp*"))


def test_another_tree_is_refused_with_what_is_missing_and_what_is_too_much(tmp_path):
    """Adapters change the tree that a checkpoint must fit."""
    save_checkpoint(tmp_path, 1, {"base": jnp.zeros(3), "both": jnp.zeros(2)}, meta={})
    with pytest.raises(ValueError, match="missing") as caught:
        restore_newest(tmp_path, {"adapter": jnp.zeros(3), "both": jnp.zeros((2, 1))})
    said = str(caught.value)
    assert "missing ['adapter']" in said
    assert "unexpected ['base']" in said
    assert "['both'] is float32(2,), expected float32(2, 1)" in said


SHARDED = """
    import sys
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from molora_jax.training.checkpoint import describe_checkpoint, restore_newest, save_checkpoint
    devices, folder, what = jax.device_count(), Path(sys.argv[1]), sys.argv[2]
    mesh = Mesh(np.array(jax.devices()), ("data",))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    if what == "save":
        save_checkpoint(folder, devices, {"x": put(jnp.arange(16.0))}, meta={})
    else:
        tree, meta = restore_newest(folder, {"x": put(jnp.zeros(16))})
        assert tree["x"].sharding.num_devices == devices
        np.testing.assert_array_equal(tree["x"], np.arange(16.0))
    print(devices)
"""


def python(code: str, *arguments: str, devices: int = 1) -> subprocess.Popen:
    # With the flags of this process, which may change roundings.
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_checkpoints_move_between_eight_devices_and_one(tmp_path):
    """Shardings stored in a file would tie it to its devices."""
    saved = python(SHARDED, str(tmp_path), "save", devices=8)
    assert saved.communicate(timeout=60)[0].split()[-1:] == ["8"], "could not save"
    found = describe_checkpoint(tmp_path)
    assert found == {"step": 8, "arrays": {"['x']": ((16,), "float32")}}
    restored, _ = restore_newest(tmp_path, {"x": jnp.zeros(16)})
    np.testing.assert_array_equal(restored["x"], np.arange(16.0))
    save_checkpoint(tmp_path, 9, restored, meta={})
    again = python(SHARDED, str(tmp_path), "restore", devices=8)
    assert again.communicate(timeout=60)[0].split()[-1:] == ["8"], "could not restore"


CONFIG = {"steps": 40, "lr": 0.05, "weight_decay": 0.01, "accumulate": 2, "checkpoint_every": 4}

TRAIN = """
    import json, sys, time
    from tests.training.test_checkpoint import CONFIG
    from tests.training.test_loop import toy, toy_loss, windows
    from molora_jax.training import BatchOrder, TrainConfig, fit
    params, frozen = toy()
    def slow(step):
        time.sleep(0.05)
        return BatchOrder(windows(), 4)(step)
    slow.windows = windows()
    print("started", flush=True)
    fit(toy_loss, params, slow, TrainConfig(**CONFIG), frozen=frozen, run_dir=sys.argv[1])
"""


def numbers(run_dir) -> list[dict]:
    """The records without what is measured by the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def test_a_killed_run_goes_on_and_ends_with_the_numbers_of_one_that_was_not(tmp_path, capsys):
    killed = tmp_path / "killed"
    process = python(TRAIN, str(killed))
    deadline = time.monotonic() + 60
    while not list(killed.glob("checkpoints/step_????????")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 0 < len(numbers(killed)) < 40, "the run was not killed on its way"

    def train(run_dir):
        params, frozen = toy()
        config = TrainConfig(**CONFIG)
        order = BatchOrder(windows(), 4)
        return fit(toy_loss, params, order, config, frozen=frozen, run_dir=run_dir)

    resumed, records = train(killed)
    assert "resumed after step" in capsys.readouterr().out
    straight, straight_records = train(tmp_path / "straight")
    assert_same(resumed, straight)
    assert numbers(killed) == numbers(tmp_path / "straight")
    assert len(records) == len(straight_records) == 40

    # A finished run comes back without a step.
    again, _ = train(killed)
    assert_same(again, straight)


def test_another_run_is_not_resumed(tmp_path):
    params, frozen = toy()
    settings = {"steps": 2, "checkpoint_every": 1}
    order = BatchOrder(windows(), 2)

    def train(order=order, identity=None, **changed):
        config = TrainConfig(**settings | changed)
        return fit(
            toy_loss, params, order, config, frozen=frozen, run_dir=tmp_path, identity=identity
        )

    train(identity={"base": "abc"})
    with pytest.raises(ValueError, match=r"config\.lr was 0\.001 and is now 0\.5"):
        train(identity={"base": "abc"}, lr=0.5)
    with pytest.raises(ValueError, match=r"identity\.base was 'abc' and is now 'xyz'"):
        train(identity={"base": "xyz"})
    with pytest.raises(ValueError, match="data was"):
        train(BatchOrder(windows(11), 2), identity={"base": "abc"})
    other = windows()
    first = BatchOrder(other, 2)(0).tokens
    other.tokens[np.argmax((other.tokens != first[:, None]).any(axis=2).all(axis=0)), 0] += 1
    np.testing.assert_array_equal(BatchOrder(other, 2)(0).tokens, first)
    with pytest.raises(ValueError, match="data was"):
        train(BatchOrder(other, 2), identity={"base": "abc"})
