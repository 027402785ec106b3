"""Runs of a sweep in processes of this machine, under a bound on the memory of each."""

import contextlib
import math
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

import psutil

from experiments.launcher import End, Ended, Worker
from experiments.sweeps import LOG, Point

GB = 1e9
USUAL_GB = 4.0  # with room to spare: train_adapter on SmolLM2-135M takes 1.7
KEPT_FREE = 0.1  # share of the free memory that is left to everything else
# Each names how many threads a library starts: XLA's CPU client, OpenMP, BLAS, tokenizers.
THREADS = (
    "NPROC",
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    "RAYON_NUM_THREADS",
)


class LocalPool:
    """Processes of this machine; each in a session of its own, so that Ctrl-C is the sweep's.

    A worker over its bound of memory is killed. The bounds of all workers together fit into what
    is free, and should they not, the kernel ends a worker before anything else (oom_score_adj).
    """

    poll_s, outlives = 0.25, False

    def __init__(
        self,
        command: Callable[[Point], list[str]],
        *,
        room: int,
        memory_gb: float,
        gpus: Sequence[str] = (),
        cores: int | None = None,
    ):
        self.room, self.memory_gb = room, memory_gb
        self._command, self._gpus = command, list(gpus)
        self._cores = cores or available_cores()
        self._slots: dict[int, LocalWorker] = {}

    def start(self, points: Sequence[Point]) -> Sequence[Worker]:
        return [self._start(point) for point in points]

    def _start(self, point: Point) -> Worker:
        busy = {slot for slot, worker in self._slots.items() if worker.ended() is None}
        slot = next(slot for slot in range(self.room) if slot not in busy)
        command = self._command(point)
        try:
            point.path.mkdir(parents=True, exist_ok=True)
            with (point.path / LOG).open("ab") as log:
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    command,
                    env=self.environment(slot, os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:  # a full disk, a command that is too long
            return Ended(End(code=None, reason=f"it could not be started: {error}"))
        self._slots[slot] = LocalWorker(process, memory_gb=self.memory_gb)
        return self._slots[slot]

    def environment(self, slot: int, own: Mapping[str, str]) -> dict[str, str]:
        """What the worker of a slot sees: its share of the cores, and a GPU of its own."""
        changed = dict(own)
        if self.room > 1:
            for name in THREADS:
                changed.setdefault(name, str(max(1, self._cores // self.room)))
        if self._gpus:
            changed["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
            sharing = math.ceil(self.room / len(self._gpus))
            if sharing > 1:  # JAX takes three quarters of a GPU when it starts
                changed.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / sharing:.2f}")
        return changed


class LocalWorker:
    """One process, and what it started."""

    def __init__(self, process: subprocess.Popen, *, memory_gb: float):
        self._process, self._memory_gb = process, memory_gb
        self._over = 0.0
        self._end: End | None = None
        with contextlib.suppress(OSError):  # not Linux, or gone already
            pathlib.Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")

    def ended(self) -> End | None:
        if self._end is not None:
            return self._end
        code = self._process.poll()
        if code is None:
            self._watch()
            return None
        self.kill()  # what it started and left behind
        reason = ""
        if self._over:
            reason = (
                f"took {self._over:.1f} GB of memory, over its bound of {self._memory_gb:.1f} GB: "
                "give more by --memory_gb, or by fewer --jobs"
            )
        self._end = End(code=code, reason=reason)
        return self._end

    def _watch(self) -> None:
        used = 0
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self._process.pid)
            for each in (first, *first.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    used += each.memory_info().rss
        if used > self._memory_gb * GB:
            self._over = used / GB
            self.kill()

    def stop(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left
            os.killpg(self._process.pid, signal.SIGKILL)


def fit(
    *, points: int, jobs: int, memory_gb: float, gpus: int, free_gb: float, cores: int
) -> tuple[int, float]:
    """(workers at once, GB of each) for so much free memory.

    Args:
      jobs: at most so many; 0: one a GPU, or one a core without.
      memory_gb: of each; 0: they share what is free.

    Raises:
      ValueError: not even one fits.
    """
    free_gb *= 1 - KEPT_FREE
    if memory_gb > free_gb:
        raise ValueError(
            f"--memory_gb={memory_gb:g}: {free_gb:.1f} GB are free for workers on this machine"
        )
    room = min(points, jobs or gpus or cores)
    if memory_gb or not jobs:
        room = min(room, int(free_gb / (memory_gb or USUAL_GB)))
    room = max(room, 1)
    return room, memory_gb or free_gb / room


def available_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory_gb() -> float:
    """What may still be taken: the machine's, or less where a control group bounds this process."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = pathlib.Path("/proc/self/cgroup").read_text().split("::")[1].strip().lstrip("/")
        for group in [top := pathlib.Path("/sys/fs/cgroup"), *_between(top, top / own)]:
            with contextlib.suppress(OSError, ValueError):
                free = min(free, _left_in(group))
    return free / GB


def _between(top: pathlib.Path, path: pathlib.Path) -> list[pathlib.Path]:
    return [each for each in (path, *path.parents) if top in each.parents]


def _left_in(group: pathlib.Path) -> int:
    """Bytes that a control group's members may still take; files that are cached can go."""
    bound = int((group / "memory.max").read_text())  # "max" where there is none
    used = int((group / "memory.current").read_text())
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return bound - used + int(fields["inactive_file"]) + int(fields["active_file"])


def visible_gpus(own: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that JAX would take here, as CUDA_VISIBLE_DEVICES names them."""
    platforms = own.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if "CUDA_VISIBLE_DEVICES" in own:
        return [each for each in own["CUDA_VISIBLE_DEVICES"].split(",") if each not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
