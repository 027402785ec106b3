"""Sweeps through submitit: its local executor, and a Slurm that is made of five small programs."""

import os
import signal
import sys

import pytest

from experiments import entries, launcher, slurm_pool
from tests.experiments import fake_slurm
from tests.experiments.test_launcher import after, command, is_complete, plan, tries_of

SETTINGS = {"time": 30, "gpus": 0, "cpus": 1}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster of this machine, and what its pool is made with."""
    programs = fake_slurm.install(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "state"))
    from submitit.slurm.slurm import SlurmJob

    SlurmJob.watcher.clear()
    SlurmJob.watcher._registered.clear()
    return tmp_path / "sweep" / "slurm"


def pool_of(folder, *, cluster="slurm", **settings):
    pool = slurm_pool.SlurmPool(
        command, folder=folder, name="light", settings=SETTINGS | settings, cluster=cluster
    )
    pool.poll_s, pool.ask_s = 0.1, 0.5
    return pool


def launch(points, pool, **options):
    said = []
    return launcher.launch(points, pool, finished=is_complete, say=said.append, **options), said


def test_submitits_local_executor_runs_a_sweep(tmp_path):
    points = plan(tmp_path, [["done"], ["ValueError"], ["ConnectionError", "done"]])
    outcomes, _ = launch(points, pool_of(tmp_path / "jobs", cluster="local"))
    assert [each.status for each in outcomes] == ["done", "failed", "done"]
    assert outcomes[1].reasons == ["ValueError: as it was told"]
    assert outcomes[2].reasons == ["ConnectionError: as it was told"]
    assert (points[1].path / "worker.log").read_text().startswith(f"$ {sys.executable} -S -E")
    assert [tries_of(point) for point in points] == [1, 1, 2]


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (lambda job: fake_slurm.send(job, signal.SIGUSR2), ""),  # its time is nearly over
        (fake_slurm.preempt, ""),
        pytest.param(fake_slurm.lose, "job 1_1: NODE_FAIL; ", marks=pytest.mark.long),
    ],
)
def test_a_sweep_is_one_array_job_and_a_run_that_is_cut_off_goes_on(
    slurm, tmp_path, happens, reason
):
    points = plan(tmp_path, [["done"], ["hang", "done"], ["done"]])
    hanging = points[1].path / "hanging"
    preempt = after(
        lambda: hanging.exists() and hanging.read_text(),
        lambda: happens("1_1"),
    )
    outcomes, _ = launch(points, pool_of(slurm, partition="gpu", time=90))
    preempt.join()
    assert [each.status for each in outcomes] == ["done"] * 3
    reasons = [each.reasons for each in outcomes]
    if reason:  # handed in again
        assert reasons[1][0].startswith(reason)
    else:
        assert reasons == [[], [], []], "Slurm put it back"
    assert tries_of(points[1]) == 2
    assert not (points[1].path / "heard").exists(), "SIGUSR2 is submitit's"
    assert entries.read(points[1].path).metrics == {"loss": 1.0}
    text = (tmp_path / "state" / "1.sh").read_text()
    for line in ("array=0-2%3", "partition=gpu", "time=90", "mem=32GB", "cpus-per-task=1"):
        assert f"#SBATCH --{line}" in text
    assert "export PYTHONPATH=" in text


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_cancels_the_jobs(slurm, tmp_path, monkeypatch):
    points = plan(tmp_path, [["done"], ["hang"], ["done"]])
    hanging = points[1].path / "hanging"
    interrupt = after(
        lambda: hanging.exists() and hanging.read_text(),
        lambda: os.kill(os.getpid(), signal.SIGINT),
    )
    outcomes, said = launch(points, pool_of(slurm), grace_s=5)
    interrupt.join()
    assert [each.status for each in outcomes] == ["done", "stopped", "stopped"]
    assert said[-1] == "stopping 2 at work"
    assert fake_slurm.job_state("1_2").startswith("CANCELLED")
    assert tries_of(points[2]) == 0


@pytest.mark.long
def test_a_job_that_someone_cancelled_is_not_handed_in_again(slurm, tmp_path):
    (point,) = plan(tmp_path, [["hang", "done"]])
    hanging = point.path / "hanging"
    cancel = after(
        lambda: hanging.exists() and hanging.read_text(), lambda: fake_slurm.scancel("1")
    )
    (outcome,), _ = launch([point], pool_of(slurm))
    cancel.join()
    assert outcome.status == "failed" and "job 1: CANCELLED; " in outcome.reasons[0]
    assert tries_of(point) == 1


def test_a_refusal_of_sbatch_starts_nothing(slurm, tmp_path):
    points = plan(tmp_path, [["done"], ["done"]])
    with pytest.raises(ValueError, match=r"^sbatch: .*invalid partition"):
        launch(points, pool_of(slurm, partition="nowhere"))
    assert not points[0].path.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partition", "expected partition=VALUE"),
        ("partion=gpu", "did you mean partition?"),
        ("time=1:00", "time=1:00: expected a number of minutes"),
        ("time=0", "expected a number of minutes"),
        ("cpus=-1", "expected a number"),
        ("=", "unknown ''"),
    ],
)
def test_settings_are_checked(text, said):
    with pytest.raises(ValueError, match=r"^--slurm=") as caught:
        slurm_pool.parse(text)
    assert said in str(caught.value)


def test_settings_are_read():
    assert slurm_pool.parse("") == {}
    assert slurm_pool.parse("partition=a, gpus=0,time=90") == {
        "partition": "a",
        "gpus": 0,
        "time": 90,
    }


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no sbatch, srun, sacct, scancel, scontrol here"):
        slurm_pool.check_machine()
    monkeypatch.setattr(slurm_pool.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'molora-jax\[slurm\]'"):
        slurm_pool.check_machine()
