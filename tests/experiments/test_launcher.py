"""Sweeps in processes: kills, tries, memory, locks, interrupts, and what they say of it."""

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from experiments import entries, launcher, local_pool, sweep_report, sweeps
from tests.experiments import light_worker, toy_program

WORKER = str(pathlib.Path(light_worker.__file__))


def plan(tmp_path, tries) -> list[sweeps.Point]:
    """A point for each list of tries; its bindings are what the worker does."""
    return [
        sweeps.Point(
            label=f"n = {number}",
            bindings=json.dumps(each),
            config=None,
            digests={},
            path=tmp_path / "light" / f"run{number:02d}",
        )
        for number, each in enumerate(tries)
    ]


def command(point: sweeps.Point) -> list[str]:
    return [sys.executable, "-S", "-E", WORKER, str(point.path), point.bindings]


def pool_of(room=2, memory_gb=1.0, **options):
    pool = local_pool.LocalPool(command, room=room, memory_gb=memory_gb, **options)
    pool.poll_s = 0.02
    return pool


def is_complete(point) -> bool:
    return entries.read(point.path).problem == ""


def launch(points, **options):
    """The outcomes, and what was said."""
    said = []
    pool = options.pop("pool", None) or pool_of()
    outcomes = launcher.launch(points, pool, finished=is_complete, say=said.append, **options)
    return outcomes, said


def after(condition, act) -> threading.Thread:
    """Does `act` in a thread as soon as the condition holds."""

    def wait():
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def kill(points, number=signal.SIGKILL) -> list[threading.Thread]:
    """Kills the worker of each point once it hangs."""
    return [
        after(
            lambda file=point.path / "hanging": file.exists() and file.read_text(),
            lambda file=point.path / "hanging": os.kill(int(file.read_text()), number),
        )
        for point in points
    ]


def tries_of(point) -> int:
    file = point.path / "tries"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_twelve_runs_survive_two_killed_workers(tmp_path, capsys):
    points = plan(tmp_path, [["hang", "done"] if n in (2, 7) else ["done"] for n in range(12)])
    killers = kill([points[2], points[7]])
    outcomes, _ = launch(points, pool=pool_of(room=3))
    for killer in killers:
        killer.join()
    assert [each.status for each in outcomes] == ["done"] * 12
    assert [each.reasons for each in outcomes] == [
        ["killed by SIGKILL"] if n in (2, 7) else [] for n in range(12)
    ]
    sweep_report.show_end("light", points, outcomes, folder=tmp_path / "sweep")
    text = capsys.readouterr().out
    assert "12 of 12 points have a result (0 found)" in text
    assert "tried again: run07 n = 7: killed by SIGKILL" in text
    assert len((tmp_path / "sweep" / "table.csv").read_text().splitlines()) == 13
    again, said = launch(points)
    assert [each.status for each in again] == ["found"] * 12
    assert said[-1] == "[12/12] run11 n = 11: found"
    assert sum(map(tries_of, points)) == 14


def young_child_of(program: subprocess.Popen) -> psutil.Process:
    """A worker that has only begun, and so will not end by itself before it is killed."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for child in psutil.Process(program.pid).children():
            if time.time() - child.create_time() < 0.5:
                return child
        time.sleep(0.01)
    raise AssertionError("no worker was started")


@pytest.mark.long
def test_a_sweep_of_twelve_whole_programs_survives_two_killed_workers(tmp_path):
    """run.py itself, killed twice: 3 numbers of steps times 4 seeds of the toy."""
    flags = ["--experiment=toy", "--sweep=steps,seed", "--launcher=local", "--jobs=2"]
    said = []
    with subprocess.Popen(
        [*toy_program.PROGRAM, *flags, f"--workdir={tmp_path}"],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        for line in program.stdout:
            said.append(line)
            if line.startswith(("[2/12]", "[6/12]")) and "killed" not in line:
                young_child_of(program).kill()
    text = "".join(said)
    assert program.returncode == 0, text
    assert "12 of 12 points have a result (0 found)" in text
    assert text.count("killed by SIGKILL; it is tried again") == 2
    assert text.count("tried again: ") == 2
    done = [entries.read(path) for path in entries.find([tmp_path])]
    assert [each.problem for each in done] == [""] * 12


@pytest.mark.parametrize(
    ("tries", "status", "number", "said"),
    [
        (["ValueError", "done"], "failed", 1, "ValueError: as it was told"),
        (["NonFiniteLossError", "done"], "failed", 1, "NonFiniteLossError: as it was told"),
        (["ConnectionError", "done"], "done", 2, "ConnectionError: as it was told"),
        (["JaxRuntimeError", "done"], "done", 2, "JaxRuntimeError: as it was told"),
        (["OSError"], "failed", 2, "OSError: as it was told"),
        (["misuse", "done"], "failed", 1, "exit code 2: run.py: nothing can be read"),
        (["silent", "done"], "failed", 1, "it ended without a result"),
    ],
)
def test_only_what_something_outside_ended_is_tried_again(tmp_path, tries, status, number, said):
    points = plan(tmp_path, [tries, ["done"]])
    outcomes, _ = launch(points)
    assert [each.status for each in outcomes] == [status, "done"]
    assert tries_of(points[0]) == number
    assert said in outcomes[0].reasons[-1]
    text = sweep_report.summary(points, outcomes)
    if status == "failed":
        log = points[0].path / "worker.log"
        assert f"failed: run00 n = 0: {said}" in text and f"log: {log}" in text
        assert log.read_text().startswith("$ ")


def test_a_worker_that_is_stopped_is_tried_again_and_retries_can_be_none(tmp_path):
    points = plan(tmp_path, [["hang", "done"]])
    (killer,) = kill(points, signal.SIGTERM)
    outcomes, _ = launch(points, retries=0)
    killer.join()
    assert (outcomes[0].status, outcomes[0].reasons) == ("failed", ["stopped by a signal"])
    (outcome,), _ = launch(points)
    assert outcome.status == "done"


def test_an_earlier_failure_does_not_speak_for_a_try_that_said_nothing(tmp_path):
    points = plan(tmp_path, [["ValueError", "misuse"]])
    assert launch(points)[0][0].reasons == ["ValueError: as it was told"]
    light_worker.write(points[0].path, status="complete")
    light_worker.write(points[0].path, status="failed", error="ValueError: old")
    attempt = launcher._Try(points[0])
    reason, again = launcher._judge(attempt, launcher.End(code=1))
    assert "old" not in reason and again


def test_a_worker_over_its_bound_of_memory_is_ended_and_the_others_go_on(tmp_path):
    points = plan(tmp_path, [["grow"], ["done"], ["done"]])
    (fat, *thin), said = launch(points, pool=pool_of(memory_gb=0.2))
    assert [each.status for each in thin] == ["done", "done"]
    assert fat.status == "failed" and tries_of(points[0]) == 1
    assert "over its bound of 0.2 GB: give more by --memory_gb" in fat.reasons[0]
    assert any("failed: took" in line for line in said)


def test_a_run_that_another_process_is_at_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "LOOK_AGAIN_S", 0.05)
    points = plan(tmp_path, [["done"], ["done"]])
    points[0].path.mkdir(parents=True)
    lock = (points[0].path / ".lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def finish():
        light_worker.write(points[0].path, status="complete")
        (points[0].path / "config.json").write_text('{"experiment": "light", "config": {}}')
        lock.close()

    other = after(lambda: is_complete(points[1]), finish)
    outcomes, said = launch(points)
    other.join()
    assert [each.status for each in outcomes] == ["found", "done"]
    assert tries_of(points[0]) == 0
    assert "another process is at it" in said[0]


def test_a_run_that_another_process_took_meanwhile_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "LOOK_AGAIN_S", 0.05)
    (point,) = plan(tmp_path, [["done"]])
    point.path.mkdir(parents=True)
    looks = []

    def first_free_then_held(path):
        looks.append(path)
        if len(looks) == 1:
            held.append((path / ".lock").open("a"))
            fcntl.flock(held[0], fcntl.LOCK_EX)
            return False
        if len(looks) > 4:
            held[0].close()
        return len(looks) < 5

    held = []
    monkeypatch.setattr(entries, "is_held", first_free_then_held)
    (outcome,), _ = launch([point])
    assert (outcome.status, outcome.reasons) == ("done", [])


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_the_workers_and_says_how_to_go_on(tmp_path, capsys):
    points = plan(tmp_path, [["done"], ["hang", "done"], ["deaf", "done"], ["done"]])
    hanging = [points[n].path / "hanging" for n in (1, 2)]
    before = signal.getsignal(signal.SIGINT)
    interrupt = after(
        lambda: all(file.exists() and file.read_text() for file in hanging),
        lambda: os.kill(os.getpid(), signal.SIGINT),
    )
    outcomes, said = launch(points, grace_s=0.5)
    interrupt.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert [each.status for each in outcomes] == ["done", "stopped", "stopped", ""]
    assert said[-1] == "stopping 2 at work"
    for file in hanging:
        pid = int(file.read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    assert entries.read(points[1].path).problem == "stopped"
    assert entries.read(points[2].path).problem == "was killed"
    sweep_report.show_end("light", points, outcomes, folder=tmp_path / "sweep")
    text = capsys.readouterr().out
    assert "1 of 4 points have a result" in text
    assert "3 not run to the end: the same command goes on with them" in text
    assert f"- {points[3].path}: not started" in text
    assert [each.status for each in launch(points)[0]] == ["found", "done", "done", "done"]


def test_a_worker_that_cannot_be_started_is_a_failure_of_its_own(tmp_path):
    points = plan(tmp_path, [["done"], ["done"]])
    points[0].path.parent.mkdir()
    points[0].path.write_text("a file where the run's folder should be")
    outcomes, _ = launch(points)
    assert [each.status for each in outcomes] == ["failed", "done"]
    assert outcomes[0].reasons[0].startswith("it could not be started: ")


def test_workers_share_cores_and_get_a_gpu_each():
    own = {"PATH": "/bin", "OMP_NUM_THREADS": "3"}
    pool = pool_of(room=4, cores=8, gpus=["0", "1"])
    seen = [pool.environment(slot, own) for slot in range(4)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["0", "1", "0", "1"]
    assert seen[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.45"
    assert (seen[0]["NPROC"], seen[0]["OMP_NUM_THREADS"]) == ("2", "3")
    assert pool_of(room=1).environment(0, own) == own


def test_so_many_workers_as_fit():
    room = {"points": 12, "jobs": 0, "memory_gb": 0.0, "gpus": 0, "free_gb": 100.0, "cores": 8}
    assert local_pool.fit(**room) == (8, 11.25)
    assert local_pool.fit(**room | {"gpus": 2}) == (2, 45.0)
    assert local_pool.fit(**room | {"free_gb": 10.0}) == (2, 4.5)
    assert local_pool.fit(**room | {"free_gb": 1.0}) == (1, 0.9)
    assert local_pool.fit(**room | {"points": 1}) == (1, 90.0)
    assert local_pool.fit(**room | {"jobs": 30}) == (12, 7.5)
    assert local_pool.fit(**room | {"jobs": 6, "memory_gb": 20.0}) == (4, 20.0)
    with pytest.raises(ValueError, match=r"--memory_gb=95: 90\.0 GB are free"):
        local_pool.fit(**room | {"memory_gb": 95.0})
    assert 0 < local_pool.free_memory_gb() < 1e6


def test_gpus_are_those_that_jax_would_take(monkeypatch):
    assert local_pool.visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}) == ["2", "3"]
    assert local_pool.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert local_pool.visible_gpus({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "2"}) == []
    monkeypatch.setattr(local_pool.shutil, "which", lambda name: None)
    assert local_pool.visible_gpus({"JAX_PLATFORMS": "cuda"}) == []
