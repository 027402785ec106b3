"""uvicorn around a service: one socket, bounded connections, an end that lets answers finish."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import signal
import socket
from collections.abc import Callable

import uvicorn

from molora_jax.serving.app import Service

KEEP_ALIVE_SECONDS = 30
_AFTER_GRACE_SECONDS = 5  # for answers that were cut off to be told so


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, or until `should_exit` is set.

    Then it takes no more requests, lets the ones under way go on for `grace_seconds`, and tells
    those that are left that they were cut off.

    on_ready  called once it accepts connections
    """

    def __init__(
        self,
        service: Service,
        *,
        grace_seconds: float = 10.0,
        on_ready: Callable[[], None] | None = None,
    ):
        engine = service.engine
        super().__init__(
            uvicorn.Config(
                service.app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(grace_seconds) + _AFTER_GRACE_SECONDS,
                # Room for what the queue takes, for those who are told that it is full, and for
                # connections that idle between two requests.
                limit_concurrency=2 * (engine.max_waiting + engine.rows) + 64,
            )
        )
        self.service, self._grace_seconds, self._on_ready = service, grace_seconds, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, then `on_ready`."""
        await super().startup(sockets)
        if self._on_ready is not None and self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which waits for answers under way, and after the grace an end to these."""
        worker = self.service.worker
        worker.close()
        asyncio.get_running_loop().call_later(self._grace_seconds, worker.abort)
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, which does not listen yet; port 0 is a free one.

    Raises OSError in one line where the address cannot be had.
    """
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise OSError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another --port or "
            "--host"
        ) from None
    return sock


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(sock.getsockname()[0].split("%")[0]).is_loopback


def run_until_signal(server: Server, sock: socket.socket) -> None:
    """Runs a server in the main thread until SIGTERM or SIGINT, and returns when all has ended."""
    try:
        sock.listen()  # here, where another process that was quicker is a line and no trace
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise OSError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another --port"
        ) from None

    def taken(number: int, frame: object) -> None:
        """uvicorn raises the signal again for whoever had it before; the end was orderly."""

    before = {number: signal.signal(number, taken) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[sock])
    finally:
        server.service.worker.stop()  # a second Ctrl+C skips what does it otherwise
        for number, handler in before.items():
            signal.signal(number, handler)
