"""Checkpoints: exact, atomic, described without devices, whatever is damaged; written beside."""

import errno
import gc
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.training import BatchOrder, TrainConfig, checkpoint, fit, step_folder
from molora_jax.training.checkpoint import (
    CheckpointWriter,
    describe_checkpoint,
    find_checkpoints,
    read_checkpoint,
    restore_newest,
    save_checkpoint,
)
from tests.training.test_loop import toy, toy_loss, windows

# Where it cannot read a file Orbax leaves others open, and reads of them under way.
DAMAGED = pytest.mark.filterwarnings(
    "default::ResourceWarning", "default::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _collect_here():
    """What a damaged file left behind complains when it is collected: in its own test, please."""
    yield
    gc.collect()


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


def damages(content: bytes) -> dict[str, bytes | None]:
    """What may have become of a file; None: it is gone."""
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 16
    half = content[: len(content) // 2]
    return {"gone": None, "half": half, "zeros": bytes(len(content)), "flipped": bytes(flipped)}


@DAMAGED
def test_whatever_is_damaged_no_wrong_value_is_read(tmp_path, caplog):
    """Each file of a checkpoint in each way: it is read as it was written, or skipped."""
    good = tmp_path / "good"
    for step in (5, 10):
        save_checkpoint(good, step, tree(step), meta={"run": 0.001})
    read = {5: 0, 10: 0}
    for file in sorted((good / "step_00000010").rglob("*")):
        for damage in damages(file.read_bytes()) if file.is_file() else ():
            folder = tmp_path / "damaged"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            bad = folder / file.relative_to(good)
            content = damages(bad.read_bytes())[damage]
            bad.unlink() if content is None else bad.write_bytes(content)
            restored, meta = restore_newest(folder, tree(0))
            assert meta == {"run": 0.001, "step": meta["step"]}, (bad, damage)
            assert_same(restored, tree(meta["step"]))
            read[meta["step"]] += 1
    assert read[5] > 10, "what is read is damaged"
    assert read[10] > 10, "Orbax keeps things twice that one copy of is enough"
    assert caplog.text.count("step_00000010 cannot be read: skipped") == read[5]
    assert "the sha256 differs" in caplog.text, "of arrays, where Orbax sees nothing"


@DAMAGED
def test_half_written_checkpoints_are_skipped_and_damaged_ones_never_outlive_whole_ones(
    tmp_path, caplog
):
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, step, tree(step), meta={}, keep=3)
    (tmp_path / "step_00000020.orbax-checkpoint-tmp").mkdir()
    for step in (10, 15):
        (tmp_path / f"step_000000{step}" / "meta" / "metadata").write_text("")
    restored, meta = restore_newest(tmp_path, tree(0))
    assert meta["step"] == 5
    assert_same(restored, tree(5))
    assert "step_00000020.orbax-checkpoint-tmp is half-written" in caplog.text
    save_checkpoint(tmp_path, 7, tree(7), meta={})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000005", "step_00000007"]
    for step in (5, 7):
        (tmp_path / f"step_0000000{step}" / "meta" / "metadata").write_text("")
    assert restore_newest(tmp_path, tree(0)) is None
    assert "holds no whole checkpoint: training starts anew" in caplog.text
    with pytest.raises(ValueError, match=r"00007 cannot.*damaged.*older ones: step_00000005"):
        describe_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="step_00000005 cannot be read, it is damaged"):
        describe_checkpoint(tmp_path / "step_00000005")


def test_any_step_is_described_and_the_newest_one_of_a_folder(tmp_path):
    for step in (5, 10):
        save_checkpoint(tmp_path / "checkpoints", step, tree(step), meta={})
    older = tmp_path / "checkpoints" / "step_00000005"
    assert find_checkpoints(older) == older
    assert describe_checkpoint(older)["step"] == 5
    assert find_checkpoints(tmp_path) == tmp_path / "checkpoints"
    assert read_checkpoint(tmp_path / "checkpoints")[1]["step"] == 10
    assert find_checkpoints(tmp_path / "checkpoints" / "step_00000006") is None


def test_checkpoints_from_before_digests_are_read_and_said_to_be_unverified(
    tmp_path, caplog, monkeypatch
):
    """Old ones have no sha256, no `about` and no summary."""
    monkeypatch.setattr(step_folder, "content_digest", lambda arrays, meta: None)
    save_checkpoint(tmp_path, 3, tree(3), meta={"config": {}, "data": "d", "identity": {}})
    monkeypatch.undo()
    restored, meta = restore_newest(tmp_path, tree(0))
    assert_same(restored, tree(3))
    assert meta["step"] == 3
    assert "step_00000003 is older than digests of checkpoints: not verified" in caplog.text


def test_another_tree_is_refused_with_what_is_missing_and_what_is_too_much(tmp_path):
    """Adapters change the tree that a checkpoint must fit."""
    save_checkpoint(tmp_path, 1, {"base": jnp.zeros(3), "both": jnp.zeros(2)}, meta={})
    with pytest.raises(ValueError, match="missing") as caught:
        restore_newest(tmp_path, {"adapter": jnp.zeros(3), "both": jnp.zeros((2, 1))})
    said = str(caught.value)
    assert "missing ['adapter']" in said
    assert "unexpected ['base']" in said
    assert "['both'] is float32(2,), expected float32(2, 1)" in said


# Saves and restores with the shardings of a mesh of all devices.
SHARDED = """
    import sys
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from molora_jax.training.checkpoint import restore_newest, save_checkpoint
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))
    def tree(shift):
        wide = jnp.arange(64.0).reshape(4, 16) + shift
        return {
            "both": put(wide, "data", "fsdp"), "one": put(wide, None, "fsdp"),
            "whole": put(wide), "count": put(jnp.int32(shift)),
        }
    folder = Path(sys.argv[1])
    restored, meta = restore_newest(folder, tree(0))
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    for name, leaf in tree(7).items():
        assert restored[name].sharding == leaf.sharding, name
        np.testing.assert_array_equal(restored[name], leaf)
    save_checkpoint(folder, 8, add(restored), meta={})
    print(jax.device_count())
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


def one_device(shift: int) -> dict:
    wide = jnp.arange(64.0).reshape(4, 16) + shift
    return {"both": wide, "one": wide, "whole": wide, "count": jnp.int32(shift)}


def test_checkpoints_move_from_one_device_to_eight_and_back(tmp_path):
    """Shardings stored in a file would tie it to its devices."""
    save_checkpoint(tmp_path, 1, one_device(7), meta={})
    with python(SHARDED, str(tmp_path), devices=8) as process:
        said = process.communicate(timeout=120)[0]
    assert said.split()[-1:] == ["8"], said
    found = describe_checkpoint(tmp_path)
    assert found["step"] == 8
    assert found["arrays"]["['both']"] == ((4, 16), "float32")
    restored, _ = restore_newest(tmp_path, one_device(0))
    assert_same(restored, one_device(8))


# One of two processes, each of two devices; the other one's folder stays as it is.
PROCESS = """
    import sys
    from pathlib import Path
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from molora_jax import parallel
    from molora_jax.training.checkpoint import CheckpointWriter, restore_newest
    folder, process, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    parallel.start_processes(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    if process:
        folder = folder / "nobody"
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "fsdp"))
    def tree(shift):
        whole = np.arange(64.0, dtype=np.float32).reshape(4, 16) + shift
        def put(array, *axes):
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])
        return {"both": put(whole, "data", "fsdp"), "one": put(whole, None, "data"),
                "whole": put(whole), "count": put(np.asarray(shift, np.int32))}
    restored, meta = restore_newest(folder, tree(0))
    for name, leaf in tree(7).items():
        assert restored[name].sharding == leaf.sharding, name
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with CheckpointWriter(folder) as writer:
        for step in (8, 9):
            restored = add(restored)
            writer.save(step, restored, meta={})
    assert not process or not folder.exists()
    try:
        with CheckpointWriter(Path("/dev/null")) as writer:
            writer.save(1, restored, meta={})
    except OSError as error:
        print("both are told", error)
"""


def test_checkpoints_move_from_one_process_to_two_and_back_and_are_written_once(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    save_checkpoint(tmp_path, 1, one_device(7), meta={})
    both = [python(PROCESS, str(tmp_path), str(i), port, devices=2) for i in range(2)]
    for process in both:
        with process:
            said = process.communicate(timeout=120)[0]
        assert "both are told /dev/null/step_00000001 could not be written" in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000008", "step_00000009"]
    restored, _ = restore_newest(tmp_path, one_device(0))
    assert_same(restored, one_device(9))


def gated(monkeypatch, opened: threading.Event) -> list[int]:
    """Lets a checkpoint be written only once `opened` is set; the list tells which were."""
    written, write = [], step_folder.write_step

    def late(path, arrays, meta):
        assert opened.wait(60), "training waits for the write"
        write(path, arrays, meta)
        written.append(meta["step"])

    monkeypatch.setattr(checkpoint, "write_step", late)
    return written


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_the_step_it_is_of(
    tmp_path, monkeypatch
):
    params, frozen = toy()
    order = BatchOrder(windows(), 2)
    short = TrainConfig(steps=3, lr=0.05, batch_size=2)
    after_three, _ = fit(toy_loss, params, order, short, frozen=frozen)
    opened = threading.Event()
    written = gated(monkeypatch, opened)

    def batches(step):
        if step == 5:  # two steps past the checkpoint
            assert not written
            opened.set()
        return order(step)

    config = TrainConfig(steps=6, lr=0.05, batch_size=2, checkpoint_every=3)
    fit(toy_loss, params, batches, config, frozen=frozen, run_dir=tmp_path)
    assert written == [3, 6], "the end waits for the last one"
    arrays, meta = read_checkpoint(tmp_path / "checkpoints" / "step_00000003")
    assert meta["step"] == 3
    for name, leaf in after_three.items():
        np.testing.assert_array_equal(arrays[f"['params']['{name}']"], leaf)


FULL = "RESOURCE_EXHAUSTED: Error writing: No space left on device"


@pytest.mark.parametrize(
    ("failing", "error", "said"),
    [
        (4, ValueError(FULL), r"the disk is full \([\d.]+ MB free.*that of step 2 stays"),
        (6, OSError(errno.ENOSPC, "none"), "the disk is full.*that of step 4 stays"),
        (2, OSError(errno.EIO, "I/O error"), "I/O error; there is no earlier checkpoint"),
    ],
    ids=["before-the-next", "the-last", "the-first"],
)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_one_before(
    tmp_path, monkeypatch, failing, error, said
):
    write, params, frozen = step_folder.write_step, *toy()

    def full(path, arrays, meta):
        if meta["step"] == failing:
            path.with_name(f"{path.name}.orbax-checkpoint-tmp").mkdir(parents=True)
            raise error
        write(path, arrays, meta)

    monkeypatch.setattr(checkpoint, "write_step", full)

    def train():
        config = TrainConfig(steps=6, batch_size=2, checkpoint_every=2)
        order = BatchOrder(windows(), 2)
        return fit(toy_loss, params, order, config, frozen=frozen, run_dir=tmp_path / "run")

    with pytest.raises(OSError, match=rf"step_0000000{failing} could not be written: .*{said}"):
        train()
    kept = list((tmp_path / "run" / "checkpoints").iterdir())
    assert not [path for path in kept if "tmp" in path.name], "what is half-written needs room"
    assert (f"step_0000000{failing - 2}" in [path.name for path in kept]) == (failing > 2)
    monkeypatch.undo()
    assert len(train()[1]) == 6


def test_a_failed_write_is_not_lost_where_training_fails_first(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError("none left")

    def train():
        with CheckpointWriter(tmp_path) as writer:
            writer.save(1, {"x": jnp.zeros(2)}, meta={})
            raise KeyError("training")

    monkeypatch.setattr(checkpoint, "write_step", full)
    with pytest.raises(KeyError, match="training"):
        train()
    assert "step_00000001 could not be written: none left" in caplog.text
