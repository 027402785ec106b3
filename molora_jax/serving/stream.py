"""From an exchange to its client: the deltas as they come, and an eye on the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from molora_jax.generation import Delta
from molora_jax.serving.answers import Answer, Envelope
from molora_jax.serving.errors import ApiError, refused
from molora_jax.serving.worker import Exchange, Worker

GONE = 499  # no status that anybody receives: the client has closed the connection


class EventStream(Response):
    """Server-sent events: a chunk for what each step adds, then [DONE].

    on_end  called once, with what ended the stream too early or None
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        envelope: Envelope,
        worker: Worker,
        on_end: Callable[[BaseException | None], None],
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._exchange, self._envelope = exchange, envelope
        self._worker, self._on_end = worker, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        problem: BaseException | None = None
        try:
            async with watched(receive, self._worker, self._exchange) as gone:
                await send(start | {"headers": self.raw_headers})
                async for chunk in self._chunks(gone):
                    await send(_event(_json(chunk)))
        except ApiError as error:
            problem = error
            if error.status != GONE:
                await send(_event(_json(error.body)))
        except BaseException as error:
            problem = error
            raise
        finally:
            self._on_end(problem)
        await send(_event("[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self, gone: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
        generations = self._exchange.generations
        answers = [Answer() for _ in generations]
        for chunk in self._envelope.openings():
            yield chunk
        async for index, delta in events(self._exchange, gone):
            new = answers[index].take(delta)
            found = self._envelope.chunk(index, delta, new, generations[index])
            if found is not None:
                yield found
        if (last := self._envelope.last(generations)) is not None:
            yield last


@contextlib.asynccontextmanager
async def watched(
    receive: Receive, worker: Worker, exchange: Exchange
) -> AsyncIterator[asyncio.Event]:
    """Cancels the exchange as soon as its client goes away, and says so in the event it yields."""
    gone = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        worker.cancel(exchange)

    task = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        task.cancel()


async def events(exchange: Exchange, gone: asyncio.Event) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of all its answers to their ends. ApiError where one does not come to its own."""
    left = len(exchange.generations)
    while left:
        index, delta = await exchange.events.get()
        if gone.is_set():
            raise ApiError(GONE, "the client went away")
        if delta.finish_reason == "cancelled":
            raise ApiError(503, "the server is shutting down", code="stopping", retry_after=5)
        if delta.finish_reason == "error":
            # One that never got a row asked for what is not there any more.
            begun = not math.isnan(exchange.generations[index].admitted)
            words = delta.error or "the engine gave no reason"
            if begun or exchange.failed:
                raise ApiError(500, words, code="engine_error")
            raise refused(words)
        left -= delta.finish_reason is not None
        yield index, delta


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _event(data: str) -> dict[str, Any]:
    body = f"data: {data}\n\n".encode()
    return {"type": "http.response.body", "body": body, "more_body": True}
