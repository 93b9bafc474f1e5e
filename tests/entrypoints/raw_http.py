# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server on the protocol of the API processes, and clients that send it any bytes."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, BinaryIO

import uvloop
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.entrypoints.openai.bodies import read_body
from fastdeploy.entrypoints.openai.connection_gate import ConnectionGate, RequestGuard
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.web_server import make_web_server

TIMEOUT_S = 60  # of a read that should not wait at all


@dataclass(frozen=True)
class Answer:
    """A response: status, headers in lower case, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of an error."""
        code: str = json.loads(self.body)["error"]["code"]
        return code


class RawServer:
    """A running server.

    Its handlers: `/unread` answers 401 without reading the body; `/wait` answers when `go_on` is set; `/disconnect`
    waits for the client to close the connection; `/client` returns the client's address; every other path reads the
    body and returns its length, or the error of reading it, and the names of the request's headers.

    Attributes:
        refused: statuses that were sent without a handler.
        seen: paths whose handlers have begun.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.refused: list[int] = []
        self.seen: list[str] = []
        self.gate = ConnectionGate(config, lambda error, address: self.refused.append(error.status))
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.go_on = threading.Event()
        self.server = make_web_server(RequestGuard(self._app, self.gate), self.gate)

    def run(self) -> None:
        """Serve until `server.should_exit`."""
        uvloop.run(self.server.serve(sockets=[self.listener]))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self.seen.append(scope["path"])
        try:
            response = await self._respond(request)
        except ApiError as error:
            response = _error_response(error)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        path = request.scope["path"]
        if path == "/unread":
            return _error_response(ApiError(401, "no key", code="invalid_api_key"))
        if path == "/disconnect":
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.seen.append("disconnected")
        if path == "/client":
            return JSONResponse(request.client and request.client.host)
        while path == "/wait" and not self.go_on.is_set():
            await asyncio.sleep(0.01)
        length = len(await read_body(request, self.config))
        return JSONResponse({"path": path, "length": length, "headers": sorted(request.headers)})

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a state of the server that must come."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, "the server does not reach the state"
            time.sleep(0.01)


def _error_response(error: ApiError) -> Response:
    return Response(error.encode(), error.status, error.headers, media_type="application/json")


@contextmanager
def raw_server(**config: Any) -> Iterator[RawServer]:
    """Run a server; at the end it must have released everything that it has counted."""
    running = RawServer(ServerConfig(**config))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        yield running
        running.wait_until(lambda: (running.gate.num_connections, running.gate.body_bytes) == (0, 0))
    finally:
        running.server.should_exit = True
        thread.join(TIMEOUT_S)


class Connection:
    """A client's connection."""

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext | None = None) -> None:
        self.socket: socket.socket = socket.create_connection(address, timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self.socket = context.wrap_socket(self.socket)
        self._file: BinaryIO = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> bool:
        """Send parts one by one; return False if the server has closed the connection."""
        try:
            for part in parts:
                self.socket.sendall(part)
        except OSError:
            return False
        return True

    def read(self, method: str = "GET") -> Answer | None:
        """Read the next response; None if the connection has ended before it."""
        try:
            response = HTTPResponse(_Readable(self._file), method=method)  # type: ignore[arg-type]
            response.begin()
            body = response.read()
        except (HTTPException, ConnectionError):
            return None
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)

    def read_all(self) -> list[Answer]:
        """Read all responses until the server closes the connection."""
        return list(iter(self.read, None))

    def is_closed(self) -> bool:
        """Wait for the end of the connection; return False if something comes before it."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Readable:
    """What `HTTPResponse` needs of a socket; all responses of a connection share one buffer."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def makefile(self, mode: str) -> Any:
        return _Unclosable(self._file)


class _Unclosable:
    def __init__(self, file: BinaryIO) -> None:
        self.read, self.readline, self.readinto = file.read, file.readline, file.readinto  # type: ignore[attr-defined]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def ask(address: tuple[str, int], *parts: bytes) -> list[Answer]:
    """Send parts on a connection of their own; return all responses."""
    with Connection(address) as connection:
        connection.send(*parts)
        return connection.read_all()
