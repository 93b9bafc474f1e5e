# SPDX-License-Identifier: Apache-2.0
"""An asyncio client for OpenAI-compatible servers, with one connection per request.

It uses the HTTP parser of the server, because a general HTTP client would limit the load that a benchmark can send.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

READ_BYTES = 65536


class ServerError(Exception):
    """The server answered with an error.

    Attributes:
        status: HTTP status; 200 for an error within a stream.
    """

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(Exception):
    """The server cannot be reached, or closed the connection before the answer was complete."""


class _Response:
    """A response while it arrives; the parser calls the `on_*` methods."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._has_headers = self._is_complete = False
        self.headers: dict[str, str] = {}

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_headers = True

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = True

    async def wait_headers(self) -> None:
        while not self._has_headers:
            await self._feed()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        while True:
            chunks, self._chunks = self._chunks, []
            for chunk in chunks:
                yield chunk
            if self._is_complete:
                return
            await self._feed()

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def _feed(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if data:
            self._parser.feed_data(data)
        elif self._has_headers and not {"content-length", "transfer-encoding"} & set(self.headers):
            self._is_complete = True  # the body ends with the connection
        else:
            raise ConnectionError("the server closed the connection")


@dataclass(frozen=True)
class HttpClient:
    """A server and the API key to send.

    Attributes:
        url: base address, such as http://localhost:8000/v1.
    """

    url: str
    api_key: str = field(default="EMPTY", repr=False)

    async def get(self, path: str) -> Any:
        """Return the JSON of a GET request.

        Raises:
            ServerError: the status is not 200, or the body is not JSON.
            UnreachableError: there is no response.
        """
        text = await self.get_text(path)
        try:
            return json.loads(text)
        except ValueError:
            raise ServerError(f"{self.url}{path} is not JSON") from None

    async def get_text(self, path: str) -> str:
        """Return the body of a GET request.

        Raises:
            ServerError: the status is not 200.
            UnreachableError: there is no response.
        """
        async with self._exchange("GET", path, None) as response:
            body = await response.read()
            if response.status != 200:
                raise ServerError(error_message(body) or f"status {response.status}", response.status)
            return body.decode(errors="replace")

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
        """Send a JSON body; return status, headers and body of the response.

        Raises:
            UnreachableError: there is no response.
        """
        async with self._exchange("POST", path, body) as response:
            content = await response.read()
            return response.status, response.headers, content

    async def stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """Send a JSON body and yield the events of the streamed response.

        Raises:
            ServerError: the status is not 200, or an event is an error.
            UnreachableError: there is no response, or it is incomplete.
        """
        async with self._exchange("POST", path, body) as response:
            if response.status != 200:
                content = await response.read()
                raise ServerError(error_message(content) or f"status {response.status}", response.status)
            async for data in _event_data(response.chunks()):
                if data == b"[DONE]":
                    return
                event = _event(data)
                if "error" in event:
                    raise ServerError(error_message(data) or str(event["error"]))
                yield event

    async def first_model(self) -> str:
        """Return the name of the first model of /models.

        Raises:
            ServerError, UnreachableError: the list cannot be read or is empty.
        """
        models = await self.get("/models")
        try:
            return str(models["data"][0]["id"])
        except (LookupError, TypeError):
            raise ServerError(f"{self.url}/models lists no model") from None

    @contextlib.asynccontextmanager
    async def _exchange(self, method: str, path: str, body: Any) -> AsyncIterator[_Response]:
        try:
            parts = urlsplit(self.url + path)
            secure = ssl.create_default_context() if parts.scheme == "https" else None
            port = parts.port or (443 if secure else 80)
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
        except (OSError, ValueError) as error:
            raise UnreachableError(f"cannot reach {self.url}: {error}") from None
        try:
            writer.write(_request(method, parts.path or "/", parts.netloc, self.api_key, body))
            response = _Response(reader)
            await response.wait_headers()
            yield response
        except (OSError, httptools.HttpParserError) as error:
            raise UnreachableError(f"{self.url}{path}: {error}") from None
        finally:
            writer.close()


def error_message(body: bytes) -> str:
    """Return the message of an error response in OpenAI's format; empty if there is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _event(data: bytes) -> dict[str, Any]:
    """Parse an event of a stream, which is an error or has a list of choices."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not ("error" in event or isinstance(event.get("choices"), list)):
        raise ServerError(f"unexpected event in the stream: {data[:80]!r}")
    return event


def _request(method: str, path: str, host: str, api_key: str, body: Any) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def _event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
