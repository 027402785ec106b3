"""The thread that steps an engine, and the answers that it hands to an event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Sequence

from absl import logging

from molora_jax.generation import Delta, Engine, Generation, Request
from molora_jax.serving.errors import ApiError
from molora_jax.serving.metrics import Metrics

Event = tuple[int, Delta]  # which of an exchange's answers, and what it grew by


class Exchange:
    """The answers to one request over HTTP, as they grow.

    stream       whether every step is to be seen, and not only the end of an answer
    generations  one for each answer; theirs to read once `events` gave a finish_reason
    events       in the order in which they happened, put there by the event loop
    """

    def __init__(self, count: int, *, stream: bool):
        self.stream = stream
        self.generations: list[Generation] = []
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        # The stepping thread's:
        self.open = set(range(count))
        self.held: list[Event] = []
        self.last = [time.monotonic()] * count
        self.begun = [False] * count
        self.failed = False  # the engine, and not what was asked of it


class Worker:
    """Steps an engine while it has work, in a thread of its own, until `stop`.

    What a step gives is handed to the event loop once behind it, and not token by token, so that
    the loop does not wake in the middle of a step.

    Where a step raises, the engine's state is gone with it (it was donated): every answer under way
    ends with an error, `failure` says what happened, and nothing is taken any more. The process
    stays, so that `/health` can tell whoever restarts it, and the log can be read.
    """

    def __init__(self, engine: Engine, metrics: Metrics):
        self.engine, self.metrics = engine, metrics
        self.failure: str | None = None
        self.closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[Exchange] = set()
        self._outbox: list[tuple[Exchange, list[Event]]] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to step; answers go to this loop."""
        self._loop = loop
        self._thread.start()

    def submit(self, requests: Sequence[Request], *, stream: bool) -> Exchange:
        """Queues requests that belong together: all of them or none.

        Raises what `Engine.submit` raises, and ApiError 503 where nothing is taken any more.
        """
        exchange = Exchange(len(requests), stream=stream)
        with self._lock:
            if self.failure is not None:
                raise ApiError(503, f"the engine has stopped: {self.failure}", code="stopped")
            if self.closing:
                raise ApiError(503, "the server is shutting down", code="stopping", retry_after=5)
            self._open.add(exchange)
        try:
            for index, request in enumerate(requests):
                tell = functools.partial(self._tell, exchange, index)
                exchange.generations.append(self.engine.submit(request, on_delta=tell))
        except Exception:
            self.cancel(exchange)
            with self._lock:
                self._open.discard(exchange)
            raise
        return exchange

    def cancel(self, exchange: Exchange) -> None:
        """Ends its answers before their next token; their rows and adapters become free."""
        for generation in exchange.generations:
            self.engine.cancel(generation)

    def close(self) -> None:
        """Takes no more requests; the ones under way go on."""
        self.closing = True

    def abort(self) -> None:
        """Cancels all that is under way."""
        with self._lock:
            left = list(self._open)
        for exchange in left:
            self.cancel(exchange)

    def stop(self, timeout: float = 10.0) -> None:
        """Cancels what is left and ends the thread; waits `timeout` seconds at most for it."""
        self.close()
        self.abort()
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self.engine.wait(0.1):
                    self.engine.step()
                    self._hand_over()
        except Exception as error:
            logging.exception("the engine has stopped")
            self._fail(f"{type(error).__name__} in a step; the server's log has the rest")

    def _tell(self, exchange: Exchange, index: int, delta: Delta) -> None:
        """The engine's `on_delta`, in the stepping thread."""
        now = time.monotonic()
        if delta.token is not None:
            took = now - exchange.last[index]
            (self.metrics.next_token if exchange.begun[index] else self.metrics.first_token)(took)
            exchange.begun[index], exchange.last[index] = True, now
        exchange.held.append((index, delta))
        if exchange.stream or delta.finish_reason is not None:
            self._outbox.append((exchange, exchange.held))
            exchange.held = []
        if delta.finish_reason is not None:
            exchange.open.discard(index)
            if not exchange.open:
                with self._lock:
                    self._open.discard(exchange)

    def _hand_over(self) -> None:
        assert self._loop is not None
        outbox, self._outbox = self._outbox, []
        if outbox:
            try:
                self._loop.call_soon_threadsafe(_deliver, outbox)
            except RuntimeError:  # the loop is closed, and its clients are gone
                if not self._loop.is_closed():
                    raise

    def _fail(self, words: str) -> None:
        with self._lock:
            self.failure = words
            left, self._open = self._open, set()
        end = Delta(None, "", None, "error", f"the engine has stopped: {words}")
        for exchange in left:
            exchange.failed = True
            self._outbox.append((exchange, [(index, end) for index in sorted(exchange.open)]))
        self._hand_over()


def _deliver(outbox: list[tuple[Exchange, list[Event]]]) -> None:
    for exchange, events in outbox:
        for event in events:
            exchange.events.put_nowait(event)
