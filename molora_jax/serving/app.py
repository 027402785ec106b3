"""The routes: what a client sends, to the engine and back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from molora_jax.compilations import count_compilations
from molora_jax.files import parse_json
from molora_jax.generation import Engine, QueueFull
from molora_jax.serving.answers import Answer, ChatForm, CompletionForm, Envelope
from molora_jax.serving.catalog import Catalog
from molora_jax.serving.errors import ApiError, refused
from molora_jax.serving.fields import Fields
from molora_jax.serving.metrics import OTHER, Metrics
from molora_jax.serving.protocol import Ask, read_chat, read_completion
from molora_jax.serving.stream import GONE, EventStream, events, watched
from molora_jax.serving.worker import Exchange, Worker

MAX_BODY_BYTES = 2**20
BODY_SECONDS = 30.0  # in which a body must have come


class Service:
    """An engine as an ASGI application, `app`.

    engine         warmed up by the caller; from start-up on this service's thread steps it
    catalog        names of what it serves
    max_body_bytes of a request
    """

    def __init__(self, engine: Engine, catalog: Catalog, *, max_body_bytes: int = MAX_BODY_BYTES):
        self.engine, self.catalog = engine, catalog
        self.max_body_bytes = max_body_bytes
        self.metrics = Metrics(engine, known=catalog.known)
        self.worker = Worker(engine, self.metrics)
        self._one_load = asyncio.Lock()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _told,
                HTTPException: _told_http,
                Exception: _told_unexpected,
            },
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        with count_compilations() as self.metrics.compiled:
            self.worker.start(asyncio.get_running_loop())
            try:
                yield
            finally:
                await run_in_threadpool(self.worker.stop)

    async def _health(self, request: Request) -> Response:
        if self.worker.failure is not None:
            raise ApiError(500, f"the engine has stopped: {self.worker.failure}", code="stopped")
        if self.worker.closing:
            raise ApiError(503, "the server is shutting down", code="stopping")
        return JSONResponse({"status": "ok"})

    def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self.catalog.models()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        label = self.catalog.target(name).label
        return JSONResponse(next(e for e in self.catalog.models() if e["id"] == label))

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion, CompletionForm)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat, ChatForm)

    async def _load(self, request: Request) -> Response:
        fields = Fields(await run_in_threadpool(_parsed, await self._body(request)))
        name, path = fields.text("lora_name"), fields.text("lora_path")
        inplace = fields.flag("load_inplace")
        fields.finish({"lora_int_id": (), "base_model_name": (self.catalog.base_id,)})
        async with self._one_load:  # the others wait here, and not in the threads that all share
            words = await run_in_threadpool(self.catalog.load, name, path, inplace=inplace)
        return PlainTextResponse(words)

    async def _unload(self, request: Request) -> Response:
        fields = Fields(await run_in_threadpool(_parsed, await self._body(request)))
        name = fields.text("lora_name")
        fields.finish({"lora_int_id": ()})
        async with self._one_load:
            words = await run_in_threadpool(self.catalog.unload, name)
        self.metrics.forget(name)
        return PlainTextResponse(words)

    async def _body(self, request: Request) -> bytes:
        """The body, of JSON's media type and within the limits."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a page of another site can send has another type
            raise ApiError(415, f"Content-Type is {kind or 'missing'!r}; expected application/json")
        stated = request.headers.get("content-length", "")
        parts, size = [], int(stated) if stated.isdecimal() else 0
        # A client sees the answer only once it has sent all, so somewhat too much is thrown away.
        longest = 16 * self.max_body_bytes
        try:
            if size <= longest:
                async with asyncio.timeout(BODY_SECONDS):
                    size = 0
                    async for part in request.stream():
                        size += len(part)
                        if size <= self.max_body_bytes:
                            parts.append(part)
                        elif size > longest:
                            break
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise ApiError(GONE, "the client went away") from None
        if size > self.max_body_bytes:
            raise ApiError(
                413,
                f"the body has {size} bytes or more; at most {self.max_body_bytes} are read",
                code="body_too_large",
            )
        return b"".join(parts)

    async def _answer(
        self,
        request: Request,
        read: Callable[[Any, Catalog, Engine], Ask],
        form: type[CompletionForm] | type[ChatForm],
    ) -> Response:
        call = _Call(self)
        try:
            body = await self._body(request)
            # Encoding takes its time, and a lock may be held while an adapter is written.
            ask, exchange = await run_in_threadpool(call.begin, body, read)
        except Exception as error:
            call.end(error)
            raise
        envelope = Envelope(form(self.engine.base.tokenizer), ask)
        if ask.stream:
            end = functools.partial(call.end, exchange=exchange)
            return EventStream(exchange, envelope, self.worker, end)
        try:
            async with watched(request.receive, self.worker, exchange) as gone:
                answers = [Answer() for _ in ask.requests]
                async for index, delta in events(exchange, gone):
                    answers[index].take(delta)
            content = envelope.whole(answers, exchange.generations)
        except BaseException as error:
            call.end(error, exchange)
            raise
        call.end(None, exchange)
        return JSONResponse(content)


@dataclasses.dataclass
class _Call:
    """One request for an answer, from its body to the metrics."""

    service: Service
    ask: Ask | None = None

    def begin(self, body: bytes, read: Callable) -> tuple[Ask, Exchange]:
        """Reads the body and queues what it asks, or raises ApiError. For a thread."""
        service = self.service
        ask = self.ask = read(_parsed(body), service.catalog, service.engine)
        try:
            return ask, service.worker.submit(ask.requests, stream=ask.stream)
        except QueueFull as error:
            raise ApiError(429, str(error), code="queue_full", retry_after=1) from None
        except KeyError as error:  # unloaded just now
            raise ApiError(404, str(error.args[0]), param="model", code="model_not_found") from None
        except ValueError as error:
            raise refused(str(error)) from None

    def end(self, error: BaseException | None, exchange: Exchange | None = None) -> None:
        """Leaves nothing running, and counts."""
        service = self.service
        if exchange is not None:
            service.worker.cancel(exchange)
        label = OTHER if self.ask is None else self.ask.target.label
        service.metrics.request(label, _outcome(error))
        if exchange is not None and self.ask is not None:
            generated = sum(len(each.tokens) for each in exchange.generations)
            service.metrics.tokens(label, prompt=self.ask.prompt_tokens, generated=generated)


def _parsed(body: bytes) -> Any:
    try:
        return parse_json(body.decode("utf-8"), where="the body")
    except UnicodeDecodeError as error:
        raise refused(f"the body is no UTF-8 text: {error}") from None
    except ValueError as error:
        raise refused(str(error), code="invalid_json") from None


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "completed"
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    status = error.status if isinstance(error, ApiError) else 500
    return {GONE: "cancelled", 429: "queue_full"}.get(
        status, "refused" if status < 500 else "failed"
    )


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _told_http(request: Request, error: Exception) -> Response:
    """No such path or method: the same form."""
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    return JSONResponse(ApiError(error.status_code, words).body, error.status_code, headers=headers)


async def _told_unexpected(request: Request, error: Exception) -> Response:
    """Without the trace, which the middleware hands on to the log."""
    return JSONResponse(
        ApiError(500, "the server failed on this request; its log has the details").body, 500
    )
