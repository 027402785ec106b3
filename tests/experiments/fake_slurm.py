"""As much of Slurm as submitit asks for: sbatch with arrays, srun, sacct, scontrol and scancel.

`install(folder)` writes the programs, to be put first on PATH; FAKE_SLURM names their state.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import psutil

PROGRAMS = ("sbatch", "srun", "sacct", "scontrol", "scancel")


def install(folder: pathlib.Path) -> pathlib.Path:
    """The folder of the programs."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        file = programs / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        file.chmod(0o755)
    return programs


def state() -> pathlib.Path:
    return pathlib.Path(os.environ["FAKE_SLURM"])


def sbatch(script: str) -> None:
    text = pathlib.Path(script).read_text()
    if "partition=nowhere" in text:
        sys.exit("sbatch: error: invalid partition specified: nowhere")
    state().mkdir(parents=True, exist_ok=True)
    number = str(len(list(state().glob("*.sh"))) + 1)
    (state() / f"{number}.sh").write_text(text)
    array = re.search(r"--array=0-(\d+)%(\d+)", text)
    ids = [f"{number}_{n}" for n in range(int(array[1]) + 1)] if array else [number]
    for each in ids:
        set_state(each, "PENDING")
    command, quiet = [sys.executable, __file__, "serve", *ids], subprocess.DEVNULL
    subprocess.Popen(command, start_new_session=True, stdout=quiet, stderr=quiet)
    print(f"Submitted batch job {number}")


def serve(*ids: str) -> None:
    """The cluster: runs the jobs one after another, and again those that were put back."""
    for each in ids:
        while job_state(each) == "PENDING":
            number, _, index = each.partition("_")
            own = {"SLURM_JOB_ID": f"{number}{index}", "SLURM_NTASKS": "1"}
            if index:
                own |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
            script = ["bash", str(state() / f"{number}.sh")]
            job = subprocess.Popen(script, env={**os.environ, **own}, start_new_session=True)
            set_state(each, "RUNNING", pid=job.pid)
            job.wait()
            if job_state(each) == "RUNNING":
                set_state(each, "COMPLETED" if job.returncode == 0 else "FAILED")


def srun(*arguments: str) -> None:
    number, index = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID", "")
    array = os.environ.get("SLURM_ARRAY_JOB_ID", number)
    _, _, out, _, err, *command = arguments
    for descriptor, path in ((1, out), (2, err)):
        for mark, value in {"%A": array, "%a": index, "%j": number, "%t": "0"}.items():
            path = path.replace(mark, value)
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    os.execvp(command[0], command)


def sacct(*arguments: str) -> None:
    print("JobID|State|NodeList")
    for file in sorted(state().glob("*.json")):
        print(f"{file.stem}|{job_state(file.stem)}|here")


def scontrol(verb: str, job: str) -> None:
    assert verb == "requeue"
    set_state(job, "PENDING")


def scancel(job: str) -> None:
    set_state(job, "CANCELLED by 0")
    send(job, signal.SIGTERM)
    time.sleep(0.5)
    send(job, signal.SIGKILL)


def preempt(job: str) -> None:
    """SIGTERM, a while to clean up, then the end; the job is put back."""
    send(job, signal.SIGTERM)
    time.sleep(0.5)
    set_state(job, "PENDING")
    send(job, signal.SIGKILL)


def lose(job: str) -> None:
    """The node is gone, and the job with it."""
    set_state(job, "NODE_FAIL")
    send(job, signal.SIGKILL)


def send(job: str, number: int) -> None:
    """A signal to every process of a job but its batch shell, as Slurm does."""
    pid = json.loads((state() / f"{job}.json").read_text()).get("pid")
    if pid and psutil.pid_exists(pid):
        for process in psutil.Process(pid).children(recursive=True):
            process.send_signal(number)


def set_state(job: str, name: str, **more: object) -> None:
    file = state() / f"{job}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    half = file.with_suffix(f".{os.getpid()}")
    half.write_text(json.dumps({**known, "state": name, **more}))
    half.replace(file)


def job_state(job: str) -> str:
    return json.loads((state() / f"{job}.json").read_text())["state"]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
