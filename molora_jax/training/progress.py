"""How far a run is: a bar on a terminal, now and then a plain line elsewhere."""

import sys
import time
from typing import Any


class Progress:
    """Use as a context manager and call `update` once a step.

    A plain line is printed for the first and the last step and at most every `seconds_between`.
    """

    def __init__(self, name: str, total: int, *, start: int = 0, seconds_between: float = 15.0):
        self.name, self.total, self.done = name, total, start
        self.seconds_between = seconds_between
        self.rate_from: tuple[float, int] | None = None
        self.last_line = -float("inf")
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        if sys.stdout.isatty():
            from rich import progress  # a tenth of a second that a log file never needs

            columns = (
                "{task.description}",
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                "{task.fields[said]}",
            )
            self.bar = progress.Progress(*columns)
            self.task = self.bar.add_task(self.name, total=self.total, completed=self.done, said="")
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, said: str) -> None:
        """One more step is done; `said` is what to show of it."""
        now = time.monotonic()
        self.done += 1
        said = f"{said}  {self._time_left(now)}".rstrip()
        if self.bar is not None:
            self.bar.update(self.task, advance=1, said=said)
        elif self.done == self.total or now - self.last_line >= self.seconds_between:
            self.last_line = now
            print(f"{self.name}  {self.done}/{self.total}  {said}", flush=True)

    def _time_left(self, now: float) -> str:
        # Counted from the end of the first step, which also compiles.
        if self.rate_from is None:
            self.rate_from = now, self.done
            return ""
        since, first = self.rate_from
        left = round((now - since) / (self.done - first) * (self.total - self.done))
        return f"{left // 60}:{left % 60:02d} left" if self.done < self.total else ""
