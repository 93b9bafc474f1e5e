# SPDX-License-Identifier: Apache-2.0
"""Uvicorn's HTTP protocol with limits on what a client may send, and how slowly, before a handler has accepted it.

Uvicorn limits neither the size of headers and URLs nor the time that a client takes to send them, and it answers what
is not HTTP with plain text. `tests/entrypoints/test_http_protocol.py` fails if the parts of uvicorn that this module
overrides or calls change.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from fastdeploy.entrypoints.openai.connection_gate import BodyInFlight, ConnectionGate, put_body, release_body
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.middleware import without_root_path

HEADER_OVERHEAD_BYTES = 32  # memory per header beside its text, as HTTP/2 counts the size of headers
LINGER_S = 2.0  # time for a client to read an error before what it still sends resets the connection
MAX_PIPELINED = 64  # requests that one connection may send ahead of their responses
VERSIONS = ("1.0", "1.1")
URL_ERRORS = (httptools.HttpParserInvalidURLError, UnicodeError, AttributeError)  # what uvicorn raises for bad URLs

logger = logging.getLogger("fastdeploy.server")


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    An error in the headers is answered here, once the responses before it are sent. An error in the body is given to
    the handler that reads the body. The connection ends in both cases, and whenever a response is complete before the
    body of its request.
    """

    def __init__(self, gate: ConnectionGate, **options: Any) -> None:
        """Prepare for a connection that counts against `gate`; uvicorn passes the options."""
        super().__init__(**options)
        self._gate = gate
        self._limits = gate.config
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._error: ApiError | None = None  # of the headers
        self.url = b""
        self._num_undelivered = 0  # bytes since the parser last reported the end of headers, a body, or its end
        self._headers_size = 0
        self._has_begun = False  # a request's first byte has arrived and its headers are incomplete
        self._in_body = False
        self._body: BodyInFlight | None = None
        self._is_body_awaited = False  # the body goes on in a later read than the headers
        self._keeps_alive = False
        self._is_ending = False  # what still arrives is ignored
        self._num_ignored = 0
        self._is_lingering = False  # the last response is sent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or answer it with 503."""
        super().connection_made(transport)
        error = self._gate.connect(self._address)
        if error is not None:
            self._refuse(error)
        else:
            self._start_timer(self._limits.timeout_header, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what the connection holds."""
        self._stop_timer()
        self._gate.disconnect(self._address)
        for cycle, _ in self.pipeline:  # these have not begun; `RequestGuard` releases the bodies of the others
            release_body(cycle.scope)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn tells only the last of several pipelined requests
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self._is_ending:
            self._ignore(data)
            return
        self._unset_keepalive_if_required()
        self._num_undelivered += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # answered as plain HTTP; what follows may be of the other protocol
            self.cycle.keep_alive = False
            self._is_ending = True
        except httptools.HttpParserError as error:
            self._fail(self._error or _invalid_http(error))
            return
        if self._num_undelivered > self._limits.max_header_size + self._limits.max_url_length:
            self._fail(self._headers_too_large())
        else:
            self._watch()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._headers_size = 0
        self._has_begun = True
        self._body = None
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parser(ApiError(400, f"at most {MAX_PIPELINED} pipelined requests", code="invalid_http"))

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        if len(self.url) + len(url) > self._limits.max_url_length:
            self.url += url[: self._limits.max_url_length]  # the shape of the error depends on its path
            message = f"the URL may have at most {self._limits.max_url_length} bytes"
            self._stop_parser(ApiError(414, message, code="url_too_long"))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers after a chunked body are ignored."""
        if self._in_body:
            return
        self._headers_size += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if self._headers_size > self._limits.max_header_size:
            self._stop_parser(self._headers_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the handler, or queue the request behind the one that is running."""
        self._num_undelivered = 0
        self._stop_timer()
        if (version := self.parser.get_http_version()) not in VERSIONS:
            self._stop_parser(ApiError(400, f"expected HTTP/1.1, got HTTP/{version}", code="invalid_http"))
        super().on_headers_complete()
        self._has_begun = False
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, unless it has no room."""
        self._num_undelivered = 0
        if self.cycle.response_complete:
            return
        if self._body_in_flight().add(len(body)):
            super().on_body(body)
        else:
            self.cycle.message_event.set()  # `read_body` raises the error

    def on_message_complete(self) -> None:
        """End the body."""
        self._in_body = False
        self._num_undelivered = 0
        if self._is_body_awaited:
            self._is_body_awaited = False
            self._stop_timer()
            self.cycle.keep_alive = self._keeps_alive
            self.cycle.transport = self.transport
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin the next request, or send the error of the headers that followed this one."""
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._error is not None and not self._is_busy:
            self._send_error(self._error)
        elif self._in_body or self._has_begun:
            self._watch()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        """End the connection after the response that is running."""
        self._keeps_alive = False
        super().shutdown()

    def linger(self) -> None:
        """End the connection, but leave the client time to read the response."""
        self._is_ending = self._is_lingering = True
        self._unset_keepalive_if_required()
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer(LINGER_S, self.transport.abort)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _is_busy(self) -> bool:
        """Whether a request is running; if so, the last one whose headers were complete is running or queued."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Limit the time that the client takes for what it has begun to send."""
        if self._in_body:
            self._await_body()
            if self._timer is None and not self.pipeline:
                self._start_timer(self._limits.timeout_body, self._on_body_timeout)
        elif self._timer is None and not self._is_busy:
            self._start_timer(self._limits.timeout_header, self._on_header_timeout)

    def _await_body(self) -> None:
        """Let the connection end with the response, unless the body is complete before."""
        if not self._is_body_awaited:
            self._is_body_awaited = True
            self._keeps_alive = self.cycle.keep_alive
            self.cycle.keep_alive = False
            self.cycle.transport = _LingeringTransport(self)  # type: ignore[assignment]

    def _ignore(self, data: bytes) -> None:
        """Drop what arrives after an error, which a client may send before it reads the response."""
        self._num_ignored += len(data)
        if self._num_ignored > self._limits.max_body_size:
            self.transport.abort()

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        if seconds:
            self._timer = self.loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_header_timeout(self) -> None:
        self._timer = None
        if self._has_begun or self._num_undelivered:
            seconds = self._limits.timeout_header
            self._refuse(ApiError(408, f"the headers took longer than {seconds:g} s", code="request_timeout"))
        else:
            self.transport.close()  # a client that has sent nothing expects no response

    def _on_body_timeout(self) -> None:
        self._timer = None
        seconds = self._limits.timeout_body
        self._fail(ApiError(408, f"the body took longer than {seconds:g} s", code="request_timeout"))

    def _headers_too_large(self) -> ApiError:
        message = f"the headers may have at most {self._limits.max_header_size} bytes"
        return ApiError(431, message, code="headers_too_large")

    def _stop_parser(self, error: ApiError) -> None:
        """Remember an error and raise it, which makes the parser return to `data_received`."""
        self._error = error
        raise error

    def _fail(self, error: ApiError) -> None:
        """End the connection because of an error in the headers or the body that are arriving."""
        if not self._in_body or self.cycle.response_complete:
            self._refuse(error)
            return
        self._is_ending = True
        self._await_body()
        body = self._body_in_flight()
        body.error = body.error or error
        self.cycle.message_event.set()  # `read_body` raises the error

    def _body_in_flight(self) -> BodyInFlight:
        if self._body is None:
            self._body = BodyInFlight(self._gate)
            put_body(self.scope, self._body)
        return self._body

    def _refuse(self, error: ApiError) -> None:
        """Send an error for which there is no handler, once the responses before it are sent."""
        self._is_ending = True
        self._error = error
        if not self._is_busy:
            self._send_error(error)

    def _send_error(self, error: ApiError) -> None:
        path = self.url.partition(b"?")[0].decode("latin-1")  # as much of it as has arrived
        content, error_headers = error.content(without_root_path(path, self._limits.root_path))
        headers = {
            **error_headers,
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
        }
        if self._limits.enable_request_id_headers:
            headers["x-request-id"] = uuid.uuid4().hex
        lines = [STATUS_LINE[error.status]]
        lines += [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join([*lines, b"\r\n", content]))
        self._gate.on_refused(error, self._address)
        self.linger()


class _LingeringTransport:
    """The transport of a response whose request has an unfinished body: a close lets the client read the response."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, protocol: HttpProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.linger


def _invalid_http(error: httptools.HttpParserError) -> ApiError:
    if not isinstance(error, httptools.HttpParserCallbackError):
        return ApiError(400, f"the request is not valid HTTP: {error}", code="invalid_http")
    if not isinstance(error.__context__, URL_ERRORS):
        logger.error("a request could not be parsed", exc_info=error)
    return ApiError(400, "the request is not valid HTTP: Invalid URL", code="invalid_http")
