"""A simulator: an engine driven by a trace of arrivals in real time, and what each request waited.

Latencies count from the moment that the trace says, and not from when the engine was told: who
arrives during a step, or while a policy holds him back, has waited.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from molora_jax.compilations import count_compilations
from molora_jax.generation.engine import Engine
from molora_jax.generation.request import Generation, Request
from molora_jax.generation.traces import Arrival

Policy = Callable[[Sequence[Arrival], int], Sequence[Arrival]]
"""Which of the arrivals that wait, oldest first, the engine is given now, while so many run."""


def together(waiting: Sequence[Arrival], running: int) -> Sequence[Arrival]:
    """All of them: the engine batches whatever comes, with mixed adapters."""
    return waiting


def one_adapter(waiting: Sequence[Arrival], running: int) -> Sequence[Arrival]:
    """A batch is of one adapter: once it has ended, all that wait for that of the oldest.

    Who comes for the same adapter meanwhile waits for its next turn, so that no adapter starves.
    """
    if running:
        return ()
    first = _served_by(waiting[0].request)
    return [each for each in waiting if _served_by(each.request) == first]


def one_request(waiting: Sequence[Arrival], running: int) -> Sequence[Arrival]:
    """One request at a time."""
    return () if running else waiting[:1]


def _served_by(request: Request) -> tuple[str | None, str | None]:
    return request.adapter, request.profile


@dataclasses.dataclass(frozen=True)
class Served:
    """A request that has ended: times in seconds, from `due` on, when the trace had it arrive.

    A request that ended without a token (an error, say) has NaN for what needs one.
    """

    arrival: Arrival
    generation: Generation
    due: float  # of time.monotonic()

    @property
    def queueing(self) -> float:
        """Until the engine gave it a row."""
        return self.generation.admitted - self.due

    @property
    def time_to_first_token(self) -> float:
        return self.generation.first_token - self.due

    @property
    def latency(self) -> float:
        """Until its last token."""
        return self.generation.finished - self.due

    @property
    def time_per_output_token(self) -> float:
        """Between two tokens of the answer, on average; NaN for an answer of one."""
        gaps = len(self.generation.tokens) - 1
        spent = self.generation.finished - self.generation.first_token
        return spent / gaps if gaps > 0 else math.nan


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Every request in the order of arrival, and the seconds from the start to the last token."""

    served: tuple[Served, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(len(each.generation.tokens) for each in self.served)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def failed(self) -> tuple[Served, ...]:
        """Requests that ended in an error."""
        return tuple(each for each in self.served if each.generation.finish_reason == "error")

    def percentile(self, what: str, q: float | int) -> float:
        """The q-th percentile, 0 to 100, of a property of `Served`, over all that have it."""
        values = np.array([getattr(each, what) for each in self.served])
        values = values[np.isfinite(values)]
        return float(np.percentile(values, q)) if len(values) else math.nan

    def __str__(self) -> str:
        rows = {
            "queueing": "queueing",
            "time to first token": "time_to_first_token",
            "time per output token": "time_per_output_token",
            "latency": "latency",
        }
        lines = [
            f"{len(self.served)} requests, {self.tokens} tokens in {self.seconds:.2f} s "
            f"({self.tokens_per_second:.1f} a second), {len(self.failed)} failed, nothing compiled"
        ]
        for label, what in rows.items():
            p50, p99 = (1e3 * self.percentile(what, q) for q in (50, 99))
            lines.append(f"  {label:<22} P50 {p50:8.1f} ms   P99 {p99:8.1f} ms")
        return "\n".join(lines)


def simulate(
    engine: Engine, arrivals: Iterable[Arrival], *, policy: Policy = together
) -> Simulation:
    """Serves a trace in real time: sleeps until the next arrival where there is nothing to do.

    The engine must be idle, and warmed up (`Engine.warm_up`). Raises ValueError for a request that
    it can never serve or a policy that lets nothing in, and RuntimeError where a program was
    compiled while requests were served, by anyone in this process.
    """
    if not engine.idle:
        raise ValueError(
            f"the engine has {engine.num_running} requests running and {engine.num_waiting} "
            "waiting: simulate drives an idle one"
        )
    coming = collections.deque(sorted(arrivals, key=lambda each: each.at))
    in_order = list(coming)
    waiting: list[Arrival] = []
    given: dict[int, Generation] = {}  # by identity of the arrival: two may be equal
    running: list[Generation] = []
    with count_compilations() as compiled:
        start = time.monotonic()
        while coming or waiting or running:
            while coming and coming[0].at <= time.monotonic() - start:
                waiting.append(coming.popleft())
            if waiting:
                room = engine.max_waiting - engine.num_waiting
                for each in list(policy(tuple(waiting), len(running)))[:room]:
                    given[id(each)] = engine.submit(each.request)
                    running.append(given[id(each)])
                waiting = [each for each in waiting if id(each) not in given]
            if running:
                engine.step()
                running = [each for each in running if not each.done]
            elif waiting:
                raise ValueError(f"the policy lets none of {len(waiting)} requests in")
            elif coming:
                time.sleep(max(0.0, coming[0].at - (time.monotonic() - start)))
        seconds = time.monotonic() - start
    if compiled:
        raise RuntimeError(
            f"{len(compiled)} programs were compiled while requests were served: "
            f"{', '.join(sorted(set(compiled)))}; expected none: call engine.warm_up() first"
        )
    served = [Served(each, given[id(each)], start + each.at) for each in in_order]
    return Simulation(tuple(served), seconds)
