# SPDX-License-Identifier: Apache-2.0
"""Uvicorn as this server runs it: with limits on connections, without signal handlers, lifespan and web sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from fastdeploy.entrypoints.openai.connection_gate import ConnectionGate
from fastdeploy.entrypoints.openai.http_protocol import HttpProtocol


def make_web_server(app: ASGIApp, gate: ConnectionGate) -> uvicorn.Server:
    """Return the server for `app`, whose connections count against `gate`."""
    config = gate.config
    return _Uvicorn(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            forwarded_allow_ips=list(config.forwarded_allow_ips),
            lifespan="off",
            log_config=None,
            log_level=config.uvicorn_log_level,
            access_log=False,
            ssl_keyfile=config.ssl_keyfile or None,
            ssl_certfile=config.ssl_certfile or None,
            timeout_graceful_shutdown=2,
        ),
        gate,
    )


class _Uvicorn(uvicorn.Server):
    """Uvicorn without signal handlers, which `lifecycle.stop_signal` replaces, and with a limit on TLS handshakes."""

    def __init__(self, config: uvicorn.Config, gate: ConnectionGate) -> None:
        super().__init__(config)
        self._gate = gate

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Uvicorn's own method can pass neither a gate nor a limit on the time of handshakes."""
        make_protocol = functools.partial(
            HttpProtocol,
            self._gate,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
        options: dict[str, Any] = {"backlog": self.config.backlog}
        if self.config.ssl is not None:
            options |= {"ssl": self.config.ssl, "ssl_handshake_timeout": self._gate.config.timeout_header or None}
        loop = asyncio.get_running_loop()
        self.servers = []
        for listener in sockets or ():
            create = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
            self.servers.append(await create(make_protocol, sock=listener, **options))
        self.started = True
