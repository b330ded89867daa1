"""Running the application under uvicorn: says when it is ready, drains when told to end."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kaiseki.server.protocol import LimitedHead
from kaiseki.server.service import Service

GRACE_S = 5.0
"""How long answers may take to be written out once their requests have ended."""


def bind(host: str, port: int) -> socket.socket:
    """A socket on which to serve, taken before a model is loaded in vain.

    Raises:
        OSError: the address is in use or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Where clients reach a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


SWITCH_S = 0.0005
"""How long the event loop may hold the interpreter while the engine waits for it.

The engine takes the interpreter again after every tensor operation, hundreds of times a step; at
Python's default of 5 ms, one busy moment of the loop makes a step late by a multiple of that.
"""


class DrainingServer(uvicorn.Server):
    """Ends in order: on the first SIGTERM or SIGINT new requests get a 503, and open ones may finish.

    A second signal ends it at once.

    Args:
        app: made by `create_app`.
        drain_s: how long open requests may go on; then they are cancelled.
        on_ready: called once requests are accepted.
    """

    def __init__(self, app: FastAPI, drain_s: float, on_ready: Callable[[], None]) -> None:
        # Logs go through the root logger; requests are not logged, since a log is no place for prompts.
        config = uvicorn.Config(
            app,
            http=LimitedHead,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(GRACE_S),
        )
        super().__init__(config)
        sys.setswitchinterval(SWITCH_S)
        self._app = app
        self._drain_s = drain_s
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also see `uvicorn.Server`."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. It is not passed on after the end, as that would turn an orderly exit into a death."""
        if self._loop is None or self._drain is not None:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Take no new requests, let open ones finish, then end; call it on the loop."""
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._finish())

    async def _finish(self) -> None:
        service: Service = self._app.state.service
        service.draining = True
        if not await asyncio.to_thread(service.driver.drain, self._drain_s):
            service.cancel_all()
        for _ in range(int(GRACE_S / 0.02)):
            if not service.open_generations:
                break
            await asyncio.sleep(0.02)
        self.should_exit = True
