"""Resuming a run: after a real kill, with the numbers of one that was not; never another one's."""

import json
import signal
import time

import numpy as np
import pytest

from molora_jax.training import BatchOrder, TrainConfig, fit
from molora_jax.training.router import RouterMonitor
from tests.training import kill_and_resume
from tests.training.test_checkpoint import assert_same, python
from tests.training.test_loop import toy, toy_loss, windows

CONFIG = {"steps": 24, "lr": 0.05, "weight_decay": 0.01, "accumulate": 2, "checkpoint_every": 4}

TRAIN = """
    import sys, time
    from tests.training.test_run_folder import CONFIG
    from tests.training.test_loop import toy, toy_loss, windows
    from molora_jax.training import BatchOrder, TrainConfig, fit
    params, frozen = toy()
    def slow(step):
        time.sleep(0.04)
        return BatchOrder(windows(), 4)(step)
    slow.windows = windows()
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
    assert 0 < len(numbers(killed)) < 24, "the run was not killed on its way"

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
    assert len(records) == len(straight_records) == 24

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


class Usage:
    """Makes of the toy's sums what a router's monitor reads, and gives it what a step drew."""

    def __init__(self):
        self.monitor = RouterMonitor(["a", "b"], 0.6)
        self.state, self.restore = self.monitor.state, self.monitor.restore

    def __call__(self, sums):
        usage = np.float32([[sums["rows"] + 10, sums["rows"] % 7 + 0.1]])
        names = ("weight", "language", "label", "balance", "z", "entropy", "usable", "nonfinite")
        return self.monitor({"usage": usage} | dict.fromkeys(names, 1.0))


def uneven(step):
    """Rows whose number of real tokens changes from step to step."""
    batch = BatchOrder(windows(uneven=True), 2)(step)
    batch.mask[:, step % 5 + 1 :] = False
    return batch


def test_what_is_said_of_several_steps_is_the_same_after_a_kill(tmp_path, caplog):
    """A router's monitor looks back 20 steps, which lie before the checkpoint."""
    params, frozen = toy()

    def train(run_dir, stop=None):
        def batches(step):
            if step == stop:
                raise KeyboardInterrupt
            return uneven(step)

        batches.windows = windows()
        config = TrainConfig(steps=30, batch_size=2, checkpoint_every=11)
        usage = Usage()
        fit(toy_loss, params, batches, config, frozen=frozen, run_dir=run_dir, summarise=usage)

    train(tmp_path / "straight")
    assert caplog.text.count("the router collapses") == 1, "its warning comes once"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", stop=25)
    train(tmp_path / "killed")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "straight")
    assert len({line["max_share"] for line in numbers(tmp_path / "straight")}) > 5
    assert caplog.text.count("the router collapses") == 2


def test_records_that_a_kill_cut_short_are_dropped_and_missing_ones_are_named(tmp_path, caplog):
    params, frozen = toy()

    def train(steps=6):
        config = TrainConfig(steps=steps, batch_size=2, checkpoint_every=3)
        order = BatchOrder(windows(), 2)
        return fit(toy_loss, params, order, config, frozen=frozen, run_dir=tmp_path)[1]

    train()
    metrics = tmp_path / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"step": 6, "lo')
    train()
    assert metrics.read_text() == whole
    assert "has no record" not in caplog.text
    lines = whole.splitlines()
    metrics.write_text("\n".join([*lines[:2], lines[2][:9], "[]", "\x00\x00", *lines[4:]]) + "\n")
    assert [record["step"] for record in train()] == [0, 1, 4, 5]
    assert "has no record of 2 of the first 6 steps" in caplog.text


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path):
    """Two would write each other's checkpoints and records."""
    params, frozen = toy()

    def train(measure=None):
        config = TrainConfig(steps=2, batch_size=2, checkpoint_every=1)
        order = BatchOrder(windows(), 2)
        return fit(
            toy_loss, params, order, config, frozen=frozen, run_dir=tmp_path, measure=measure
        )

    with pytest.raises(ValueError, match=f"another process trains in {tmp_path}"):
        train(measure=lambda steps, params: train())
    assert len(train()[1]) == 2


@pytest.mark.long
def test_runs_killed_at_random_moments_go_on_exactly(capsys):
    assert kill_and_resume.main(["--kills=3"]) == 0
    assert "3 kills, 3 exact resumes" in capsys.readouterr().out
