"""Runs of a sweep on a Slurm cluster: one array job, by submitit.

This file is read by the jobs too, and imports nothing of JAX. submitit's own local executor stands
in for Slurm in tests; it is no substitute for experiments.local_pool, for it starts everything at
once, bounds no memory, hides GPUs and ends what takes long.
"""

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments import registry
from experiments.sweeps import LOG

if TYPE_CHECKING:
    from experiments.launcher import End, Worker
    from experiments.sweeps import Point

PROGRAMS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
NUMBERS = {"time": "timeout_min", "gpus": "gpus_per_node", "cpus": "cpus_per_task"}
TEXTS = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "gres", "comment")
DEFAULTS = {"time": 60, "gpus": 1, "cpus": 4}
MEMORY_GB = 32.0
MOST_TIMEOUTS = 50  # a run that goes on from its checkpoint may need many rounds
TO_THE_END_S = 60  # how long a run is given to write that it was stopped
SLURM_ACTS_S = 120  # after SIGTERM, until it kills and puts the job back


class SlurmPool:
    """Jobs of a cluster, which go on when the terminal is closed.

    Preempted, or out of time, a job is put back by Slurm and its run goes on from the checkpoint.
    """

    poll_s, outlives = 2.0, True
    ask_s = 20.0  # submitit's own interval grows to minutes
    room = sys.maxsize  # how many run at once is the array job's own limit

    def __init__(
        self,
        command: "Callable[[Point], list[str]]",
        *,
        folder: pathlib.Path,
        name: str,
        settings: Mapping[str, int | str],
        jobs: int = 0,
        memory_gb: float = 0.0,
        cluster: str = "slurm",
    ):
        import submitit

        self._command, self._submitted, self._asked = command, False, 0.0
        self._executor = submitit.AutoExecutor(
            folder, cluster=cluster, slurm_max_num_timeout=MOST_TIMEOUTS
        )
        settings = {**DEFAULTS, **settings}
        # The nodes must find this module wherever the sweep was started.
        root = pathlib.Path(__file__).resolve().parents[1]
        setup = [f"export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}"]
        self._executor.update_parameters(
            name=f"molora-{name}",
            mem_gb=memory_gb or MEMORY_GB,
            slurm_array_parallelism=jobs or 256,
            slurm_setup=setup,
            **{field: settings[key] for key, field in NUMBERS.items()},
            **{f"slurm_{key}": settings[key] for key in TEXTS if key in settings},
        )

    def start(self, points: "Sequence[Point]") -> "Sequence[Worker]":
        """Submits the points as one array job.

        Raises:
          ValueError: Slurm refuses it, and has taken none before.
        """
        import submitit

        from experiments.launcher import End, Ended

        tasks = [Task(self._command(p), (p.path / LOG).absolute(), os.getcwd()) for p in points]
        try:
            with submitit.helpers.clean_env():  # this may itself be a job
                jobs = self._executor.submit_array(tasks)
        except RuntimeError as error:  # submitit's own are of this kind
            said = f"sbatch: {registry.one_line(str(error))}"
            if not self._submitted:
                raise ValueError(said) from None
            return [Ended(End(code=None, reason=said)) for _ in points]
        self._submitted = True
        print(f"{len(jobs)} runs handed to Slurm: job {jobs[0].job_id.partition('_')[0]}")
        return [SlurmWorker(job, self) for job in jobs]

    def look(self, job: Any) -> None:
        """Asks Slurm for the state of all jobs, if it was not just asked."""
        if time.monotonic() - self._asked > self.ask_s:
            job.done(force_check=True)
            self._asked = time.monotonic()


class SlurmWorker:
    """One job."""

    def __init__(self, job: Any, pool: SlurmPool):
        self.job, self._pool = job, pool
        self._end: End | None = None

    def ended(self) -> "End | None":
        self._pool.look(self.job)
        if self._end is None and self.job.done():
            self._end = self._read()
        return self._end

    def _read(self) -> "End":
        from experiments.launcher import End

        state = str(self.job.get_info(mode="force").get("State", "")).split(" ")[0]
        if state.startswith("OUT_OF_ME"):
            reason = "over its bound of memory, says Slurm: give more by --memory_gb"
            return End(code=None, reason=reason)
        where = f"job {self.job.job_id}: {state or 'gone'}"
        # submitit waits for a result, as on a slow file system: not where Slurm says it failed.
        if state not in ("", "COMPLETED") and not self.job.paths.result_pickle.exists():
            on_purpose = state.startswith("CANCELLED")
            return End(code=None, reason=f"{where}; {self.job.paths.stderr}", retry=not on_purpose)
        error = self.job.exception()
        if error is None:
            return End(code=self.job.result())
        said = re.findall(r"^\S*Error: (.*)$", str(error), flags=re.MULTILINE)
        return End(
            code=None,
            reason=registry.one_line(f"{where}; {said[-1]}" if said else where),
            retry=not (said and "too many times" in said[-1]),
        )

    def stop(self) -> None:
        self.job.cancel(check=False)

    kill = stop


class Task:
    """What a job does, as submitit pickles it: one command, its output in the run's own log.

    Called, it returns the command's exit code.
    """

    def __init__(self, command: Sequence[str], log: pathlib.Path, folder: str):
        self.command, self.log, self.folder = list(command), log, folder

    def __call__(self) -> int:
        terminated = []
        signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Slurm signals every process of a job. SIGUSR2 says that the job's time is over: it is for
        # submitit in this process, and would end the other, which inherits that it is blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        with self.log.open("ab") as log:
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                self.command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        try:
            code = process.wait()
            if terminated and code:  # preempted: a job that Slurm kills now, it also puts back
                time.sleep(SLURM_ACTS_S)
            return code
        finally:  # submitit leaves by SystemExit
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(TO_THE_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()

    def checkpoint(self) -> Any:
        """What is run after the job was put back: the same, since the run finds its checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def parse(text: str) -> dict[str, int | str]:
    """The settings of --slurm, as "partition=gpu,time=120,gpus=1".

    Raises:
      ValueError: names the part that is none.
    """
    settings: dict[str, int | str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (each.strip() for each in part.partition("="))
        known = [*NUMBERS, *TEXTS]
        if name not in known:
            near = registry.nearest(name, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"--slurm={text}: unknown {name!r} (known: {', '.join(known)}){hint}")
        if not value:
            raise ValueError(f"--slurm={text}: expected {name}=VALUE")
        if name in NUMBERS:
            if not value.isdecimal() or (name != "gpus" and int(value) == 0):
                unit = " of minutes" if name == "time" else ""
                raise ValueError(f"--slurm={text}: {name}={value}: expected a number{unit}")
            settings[name] = int(value)
        else:
            settings[name] = value
    return settings


def check_machine() -> None:
    """Refuses where there is no Slurm, or no submitit.

    Raises:
      ValueError: what is missing, and how to have it.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ValueError(
            "--launcher=slurm needs submitit: pip install 'molora-jax[slurm]', or pip install -e "
            "'.[slurm]' in the repository"
        )
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise ValueError(
            f"--launcher=slurm: no {', '.join(missing)} here, so this is no machine of a Slurm "
            "cluster; --launcher=local runs the sweep on this machine"
        )
