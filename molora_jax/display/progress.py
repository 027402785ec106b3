"""What is waited for, and how far it is: a bar on a terminal, now and then a line elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from molora_jax.display.terminal import console, is_terminal

# A log says nothing of what takes less, in seconds.
QUIET = 4.0
# One at a time: what is waited for within is a part of it, and two bars would overwrite each other.
_shown: "Progress | None" = None


class Progress:
    """Use as a context manager and call `update` once a step.

    total            steps; None where they cannot be counted: then nothing is updated, a terminal
                     shows that it goes on, and a log has one line, after `quiet` seconds
    lasting          the numbers are worth keeping: the bar stays when it is done, and a log has a
                     line for the first and the last step, on standard output. What is not lasting
                     leaves nothing behind, and goes to standard error
    compiles         so many steps at first compile, as a bar says, and do not tell how long the
                     rest will take
    seconds_between  of two lines in a log, at least
    """

    def __init__(
        self,
        name: str,
        total: int | None,
        *,
        start: int = 0,
        lasting: bool = False,
        compiles: int = 1,
        seconds_between: float = 15.0,
        quiet: float = QUIET,
    ):
        self.name, self.total, self.done, self.lasting = name, total, start, lasting
        self.seconds_between, self.compiles = seconds_between, compiles
        self.rate_from: tuple[float, int] | None = None
        # A log's next line is due from then on.
        self.due = -float("inf") if lasting else time.monotonic() + quiet
        self.quiet, self.said_before = quiet, False
        self.bar: Any = None
        self.timer: threading.Timer | None = None

    def __enter__(self) -> "Progress":
        global _shown
        if _shown is not None or not _is_first_process():
            return self
        _shown = self
        self.stream = sys.stdout if self.lasting else sys.stderr
        if _moves(self.stream):
            self._start_bar()
        elif self.total is None:
            self.timer = threading.Timer(self.quiet, self._print, [f"{self.name} ..."])
            self.timer.daemon = True
            self.timer.start()
        return self

    def _start_bar(self) -> None:
        from rich import progress

        columns: list[Any] = ["{task.description}", progress.BarColumn()]
        if self.total is None:
            columns = [progress.SpinnerColumn(), *columns[:1], progress.TimeElapsedColumn()]
        else:
            columns += [progress.MofNCompleteColumn(), "{task.fields[said]}"]
        self.bar = progress.Progress(
            *columns,
            console=console(self.stream),
            transient=not self.lasting,
            # What is printed meanwhile stands above the bar; a file gets it as ever.
            redirect_stdout=_moves(sys.stdout),
            redirect_stderr=_moves(sys.stderr),
        )
        self.task = self.bar.add_task(
            self.name, total=self.total, completed=self.done, said=self._compiling()
        )
        self.bar.start()

    def __exit__(self, *_) -> None:
        global _shown
        if _shown is self:
            _shown = None
        if self.bar is not None:
            self.bar.stop()
        if self.timer is not None:
            self.timer.cancel()

    def update(self, said: str = "") -> None:
        """One more step is done; `said` is what to show of it."""
        now = time.monotonic()
        self.done += 1
        left = self._time_left(now)
        if self.bar is not None:
            said = f"{said}  {left or self._compiling()}".strip()
            self.bar.update(self.task, advance=1, said=said)
        elif _shown is self and (self._ends_a_log if self.done == self.total else now >= self.due):
            self.due = now + self.seconds_between
            said = f"{said}  {left}".strip()
            self._print(f"{self.name}  {self.done}/{self.total}  {said}".rstrip())

    @property
    def _ends_a_log(self) -> bool:
        """Whether a log wants the last step, too: not where it had none before."""
        return self.lasting or self.said_before

    def _print(self, line: str) -> None:
        self.said_before = True
        print(line, file=self.stream, flush=True)

    def _compiling(self) -> str:
        return "compiling" if self.compiles > 0 and self.done != self.total else ""

    def _time_left(self, now: float) -> str:
        self.compiles -= 1
        if self.compiles >= 0:
            self.rate_from = now, self.done
        if self.rate_from is None or self.rate_from[1] == self.done:
            return ""
        since, first = self.rate_from
        left = round((now - since) / (self.done - first) * ((self.total or 0) - self.done))
        return f"{left // 60}:{left % 60:02d} left" if self.done < (self.total or 0) else ""


@contextlib.contextmanager
def waiting(name: str) -> Iterator[None]:
    """What is inside takes a while, nobody knows how long."""
    with Progress(name, None):
        yield


def _moves(stream: Any) -> bool:
    """Whether what was written can be written over; FORCE_COLOR does not make it so."""
    return is_terminal(stream) and stream.isatty()


def _is_first_process() -> bool:
    """Of several, all of which run the same, one shows it."""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0
