"""Sweeps: which points still need a run, who runs them, what is tried again, how it ended.

A pool is one of three: this process (`Here`), processes of this machine (experiments.local_pool), a
Slurm cluster (experiments.slurm_pool). Each gets points and hands out workers; all else is here.
"""

import builtins
import collections
import dataclasses
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from experiments import entries, registry
from experiments.sweeps import LOG, Point

LOOK_AGAIN_S = 2.0  # how often a run that another process is at is looked at


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How a worker ended: its exit code (−n: killed by signal n; None: unknown).

    reason  where the pool knows better than the run's own folder
    retry   what then counts instead of the reason's kind
    """

    code: int | None
    reason: str = ""
    retry: bool = False


class Worker(Protocol):
    """One point being run."""

    def ended(self) -> End | None:
        """How it ended, or None while it runs."""

    def stop(self) -> None:
        """Asks it to end, as Ctrl-C would; returns at once."""

    def kill(self) -> None:
        """Ends it now."""


class Pool(Protocol):
    """Where points run.

    room      workers at once
    poll_s    seconds between two looks at them
    outlives  whether workers go on when the terminal is closed (SIGHUP)
    """

    room: int
    poll_s: float
    outlives: bool

    def start(self, points: Sequence[Point]) -> Sequence[Worker]:
        """A worker for each of the points, started."""


class Here:
    """The pool of this process: one point after another, by `execute(config, digests)`."""

    room, poll_s, outlives = 1, 0.0, False

    def __init__(self, execute: Callable[[Any, Any], tuple[str, pathlib.Path]]):
        self._execute = execute

    def start(self, points: Sequence[Point]) -> Sequence[Worker]:
        ended = []
        for point in points:
            status, _ = self._execute(point.config, point.digests)
            if status == "stopped":
                raise KeyboardInterrupt
            ended.append(Ended(End(code=0 if status == "complete" else 1)))
        return ended


class Ended:
    """A worker that was over before anyone could look, or could not be started."""

    def __init__(self, end: End):
        self._end = end

    def ended(self) -> End:
        return self._end

    def stop(self) -> None:
        pass

    kill = stop


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What became of a point: "found", "done", "failed", "stopped", or "" where it never began."""

    status: str = ""
    reasons: list[str] = dataclasses.field(default_factory=list)  # of every try that failed
    seconds: float = 0.0


def _say(text: str) -> None:
    print(text, flush=True)


def launch(
    points: Sequence[Point],
    pool: Pool,
    *,
    finished: Callable[[Point], bool],
    retries: int = 1,
    say: Callable[[str], None] = _say,
    grace_s: float = 30.0,
) -> list[Outcome]:
    """Runs every point that is not finished, and tries again those that something outside ended.

    A point that another process is at is waited for, and run here only if that one fails. Ctrl-C
    (and SIGTERM, SIGHUP) ends the workers; what they did not finish is "stopped".

    Args:
      finished: whether a point needs no run.
      retries: how often a point may be tried again. What a run says of its own settings or code
        (a ValueError, say) would be said again, and is not tried again.
      grace_s: seconds that workers have to end on Ctrl-C before they are killed.
    """
    outcomes = {point.path: Outcome() for point in points}
    waiting = collections.deque(points)
    elsewhere: dict[pathlib.Path, Point] = {}
    running: dict[Worker, _Try] = {}

    def tell(point: Point, text: str) -> None:
        over = sum(each.status in ("found", "done", "failed") for each in outcomes.values())
        say(f"[{over}/{len(points)}] {point.name}: {text}")

    def end_of(attempt: _Try, end: End) -> None:
        point, outcome = attempt.point, outcomes[attempt.point.path]
        outcome.seconds = time.monotonic() - attempt.begun
        reason, again = _judge(attempt, end)
        if not reason:
            outcome.status = "done"
            tell(point, f"done in {outcome.seconds:.0f} s")
        elif end.code == 1 and entries.is_held(point.path):
            elsewhere[point.path] = point
        elif again and len(outcome.reasons) < retries:
            outcome.reasons.append(reason)
            waiting.append(point)
            tell(point, f"{reason}; it is tried again")
        else:
            outcome.reasons.append(reason)
            outcome.status = "failed"
            tell(point, f"failed: {reason}")

    def begin() -> None:
        starting = []
        while waiting and len(running) + len(starting) < pool.room:
            point = waiting.popleft()
            if finished(point):
                outcomes[point.path].status = "found"
                tell(point, "found")
            elif entries.is_held(point.path):
                elsewhere[point.path] = point
                tell(point, "another process is at it; waiting for that one")
            else:
                starting.append(_Try(point))
                outcomes[point.path].status = "stopped"  # until it is more
        if starting:
            workers = pool.start([attempt.point for attempt in starting])
            running.update(zip(workers, starting, strict=True))

    looked = time.monotonic()
    with _Interrupts(pool) as interrupts:
        try:
            while waiting or elsewhere or running:
                if interrupts.count:
                    raise KeyboardInterrupt
                begin()
                for worker, attempt in list(running.items()):
                    if end := worker.ended():
                        del running[worker]
                        end_of(attempt, end)
                if elsewhere and time.monotonic() - looked > LOOK_AGAIN_S:
                    looked = time.monotonic()
                    for path in [path for path in elsewhere if not entries.is_held(path)]:
                        waiting.append(elsewhere.pop(path))
                if running or (elsewhere and not waiting):
                    time.sleep(max(pool.poll_s, 0.05))
        except KeyboardInterrupt:
            say(f"stopping {len(running)} at work" if running else "stopping")
        finally:
            _end(list(running), grace_s, interrupts)
            for worker, attempt in running.items():
                end = worker.ended()
                if end and not _judge(attempt, end)[0]:  # it was quicker
                    outcomes[attempt.point.path].status = "done"
    return [outcomes[point.path] for point in points]


class _Try:
    """One worker's try at a point, and what the run folder said before it."""

    def __init__(self, point: Point):
        self.point, self.begun = point, time.monotonic()
        self.before = self._stamp()

    def result(self) -> dict[str, Any]:
        """What the run folder says of this try, if anything."""
        return entries.read_result(self.point.path) if self._stamp() != self.before else {}

    def _stamp(self) -> tuple[int, int] | None:
        try:
            of_file = (self.point.path / entries.RESULT).stat()
        except OSError:
            return None
        return of_file.st_ino, of_file.st_mtime_ns  # it is replaced in one piece


def _judge(attempt: _Try, end: End) -> tuple[str, bool]:
    """Why a try failed, "" where it did not; and whether another may do better."""
    result = attempt.result()
    status = result.get("status")
    if end.code == 0 and status == "complete":
        return "", False
    if end.reason:
        return end.reason, end.retry
    if end.code is not None and end.code < 0:
        return f"killed by {_signal_name(-end.code)}", True
    if status == "failed":
        error = str(result.get("error", "it does not say why"))
        return registry.one_line(error), _may_pass(error)
    if status == "stopped":
        return "stopped by a signal", True
    if end.code == 0:
        return "it ended without a result; was its data changed meanwhile?", False
    said = _last_line(attempt.point.path / LOG)
    return f"exit code {end.code}" + (f": {said}" if said else ""), end.code != 2


def _may_pass(error: str) -> bool:
    """Whether an error's kind is one of the surroundings: files, network, a device."""
    kind = error.partition(":")[0]
    known = getattr(builtins, kind, None)
    of_system = isinstance(known, type) and issubclass(known, OSError)
    return of_system or kind in ("JaxRuntimeError", "XlaRuntimeError", "HfHubHTTPError")


def _last_line(path: pathlib.Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return registry.one_line(next((line for line in reversed(lines) if line.strip()), ""))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP instead of raising, so that no worker is lost track of.

    Where workers are this process itself they are left to it.
    """

    def __init__(self, pool: Pool):
        self.count = 0
        numbers = [signal.SIGINT, signal.SIGTERM] + [signal.SIGHUP] * (not pool.outlives)
        in_main_thread = threading.current_thread() is threading.main_thread()
        mine = in_main_thread and not isinstance(pool, Here)
        # What is ignored, as SIGHUP is under nohup, stays so.
        self._numbers = [n for n in numbers if mine and signal.getsignal(n) is not signal.SIG_IGN]

    def _count(self, number: int, frame: Any) -> None:
        self.count += 1

    def __enter__(self) -> "_Interrupts":
        self._before = {number: signal.signal(number, self._count) for number in self._numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _end(workers: Sequence[Worker], grace_s: float, interrupts: _Interrupts) -> None:
    """Asks the workers to end, and kills those that have not by then or at a second Ctrl-C."""
    for worker in workers:
        worker.stop()
    seen = max(interrupts.count, 1)
    _wait(workers, grace_s, unless=lambda: interrupts.count > seen)
    for worker in workers:
        if worker.ended() is None:
            worker.kill()
    _wait(workers, grace_s)


def _wait(
    workers: Sequence[Worker], seconds: float, unless: Callable[[], bool] = lambda: False
) -> None:
    until = time.monotonic() + seconds
    while any(worker.ended() is None for worker in workers):
        if unless() or time.monotonic() > until:
            break
        time.sleep(0.1)
