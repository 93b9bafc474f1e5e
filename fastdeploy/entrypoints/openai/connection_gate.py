# SPDX-License-Identifier: Apache-2.0
"""What the connections of one API process may hold: their number, their number per address, and bodies in memory."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.entrypoints.openai.clients import network_of
from fastdeploy.entrypoints.openai.errors import RETRY_AFTER_S, ApiError, too_many_requests

SMALL_BODY_BYTES = 64 * 2**10  # bodies up to this size are accepted even while large ones fill the memory for bodies
_BODY = "fastdeploy.body"  # key of a request's `BodyInFlight` in its ASGI scope


class ConnectionGate:
    """Counts connections and bodies against this process's share of the server's limits.

    Attributes:
        config: the configuration, whose limits hold for all API processes together.
        num_connections: open connections.
        body_bytes: bytes of bodies in memory, without the first `SMALL_BODY_BYTES` of each.
        on_refused: is called with every error that no handler sent, and the client's address.
    """

    def __init__(self, config: ServerConfig, on_refused: Callable[[ApiError, str], None]) -> None:
        self.config = config
        self.on_refused = on_refused
        self.body_bytes = 0
        self._max_connections = self._share(config.max_connections)
        self._max_per_address = self._share(config.max_connections_per_address)
        self._max_body_bytes = max(self._share(config.max_total_body_size), config.max_body_size)
        self.num_connections = 0
        self._connections: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._bytes_of_client: Counter[str] = Counter()
        self._trusted = [ipaddress.ip_network(name) for name in config.forwarded_allow_ips if name != "*"]
        self._trusts_all = "*" in config.forwarded_allow_ips
        self._unit = lru_cache(maxsize=4096)(self._find_unit)

    def connect(self, address: str) -> ApiError | None:
        """Count a connection; return the error if there are too many."""
        self.num_connections += 1
        unit = self._unit(address)
        self._connections[unit] += 1
        if self._max_connections and self.num_connections > self._max_connections:
            return _too_many_connections(f"the server has {self.config.max_connections} open connections, the maximum")
        if unit and self._max_per_address and self._connections[unit] > self._max_per_address:
            most = self.config.max_connections_per_address
            return _too_many_connections(f"your address has {most} open connections, the maximum")
        return None

    def disconnect(self, address: str) -> None:
        """Count the end of a connection."""
        self.num_connections -= 1
        _decrease(self._connections, self._unit(address))

    def begin_request(self, address: str) -> ApiError | None:
        """Count a request of a client, which a proxy may have forwarded; return the error if there are too many."""
        unit = self._unit(address)
        if not unit:
            return None
        self._requests[unit] += 1
        if self._max_per_address and self._requests[unit] > self._max_per_address:
            return too_many_requests(
                f"your address has {self.config.max_connections_per_address} requests in flight, the maximum",
                "connections",
            )
        return None

    def end_request(self, address: str) -> None:
        """Count the end of a request."""
        if unit := self._unit(address):
            _decrease(self._requests, unit)

    def take_body_bytes(self, client: str, count: int) -> ApiError | None:
        """Count bytes of a large body; return the error if they have no room.

        One client may take half of the room, but always one body of the maximum size.
        """
        most = max(self._max_body_bytes // 2, self.config.max_body_size) if client else self._max_body_bytes
        if self._bytes_of_client[client] + count > most or self.body_bytes + count > self._max_body_bytes:
            return ApiError(
                503,
                "the bodies of other requests fill the memory for bodies (--max-total-body-size); try again later",
                type="service_unavailable_error",
                code="bodies_in_flight",
                reason="concurrency",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self.body_bytes += count
        self._bytes_of_client[client] += count
        return None

    def return_body_bytes(self, client: str, count: int) -> None:
        """Take back what `take_body_bytes` has counted."""
        self.body_bytes -= count
        _decrease(self._bytes_of_client, client, count)

    def _share(self, limit: int) -> int:
        return -(-limit // self.config.workers)

    def _find_unit(self, address: str) -> str:
        """Return the network whose connections are counted together; empty for exempt addresses."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:  # a Unix socket has no address, and a proxy may forward anything
            return address[:64]
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        is_exempt = self._trusts_all or parsed.is_loopback or any(parsed in network for network in self._trusted)
        return "" if is_exempt else network_of(address)


class BodyInFlight:
    """The body of one request between its first byte and its end in memory.

    Attributes:
        client: whose body it is, the id of a `Client`; empty before it counts for a client.
        error: why the rest of the body is not read; `read_body` raises it.
    """

    __slots__ = ("_gate", "_num_bytes", "_num_counted", "client", "error")

    def __init__(self, gate: ConnectionGate) -> None:
        self._gate = gate
        self.client = ""
        self._num_bytes = self._num_counted = 0
        self.error: ApiError | None = None

    def add(self, count: int) -> bool:
        """Count bytes that have arrived; return False if they must be dropped."""
        self._num_bytes += count
        if self.error is None and self._num_bytes > SMALL_BODY_BYTES:
            self._take(self._num_bytes - SMALL_BODY_BYTES - self._num_counted)
        return self.error is None

    def count_for(self, client: str) -> None:
        """Count the bytes for a client from now on."""
        count = self.release()
        self.client = client
        if count and self.error is None:
            self._take(count)

    def release(self) -> int:
        """Take the bytes back from the gate's count; return their number."""
        count, self._num_counted = self._num_counted, 0
        if count:
            self._gate.return_body_bytes(self.client, count)
        return count

    def _take(self, count: int) -> None:
        self.error = self._gate.take_body_bytes(self.client, count)
        if self.error is None:
            self._num_counted += count


class RequestGuard:
    """ASGI middleware that counts the requests of each address, and releases the memory of bodies at their end."""

    def __init__(self, app: ASGIApp, gate: ConnectionGate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or answer it with 429."""
        address = (scope.get("client") or ("",))[0]
        error = self._gate.begin_request(address)
        app = self._app
        if error is not None:
            self._gate.on_refused(error, address)
            body, headers = error.content(scope["path"])
            app = Response(body, error.status, headers, media_type="application/json")
        try:
            await app(scope, receive, send)
        finally:
            self._gate.end_request(address)
            release_body(scope)


def put_body(scope: Mapping[str, Any], body: BodyInFlight) -> None:
    """Attach the body of a request to its scope."""
    cast(dict[str, Any], scope)[_BODY] = body


def body_of(scope: Mapping[str, Any]) -> BodyInFlight | None:
    """Return the body of a request, None if no part of it has arrived."""
    return cast(BodyInFlight | None, scope.get(_BODY))


def release_body(scope: Mapping[str, Any]) -> None:
    """Stop counting the body of a request as in flight."""
    body = body_of(scope)
    if body is not None:
        body.release()


def _too_many_connections(message: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(
        503,
        message,
        type="service_unavailable_error",
        code="too_many_connections",
        headers=headers,
        reason="connections",
    )


def _decrease(counts: Counter[str], key: str, by: int = 1) -> None:
    counts[key] -= by
    if not counts[key]:
        del counts[key]
