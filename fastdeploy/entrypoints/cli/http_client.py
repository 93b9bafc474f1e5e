# SPDX-License-Identifier: Apache-2.0
"""A client of OpenAI servers for many streams at once: asyncio's connections, and the HTTP parser that the server has.

Every request takes a connection of its own, so that no answer waits behind another.
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
    """The server has answered with an error.

    Attributes:
        status: of the HTTP answer; 200 for an error within a stream.
    """

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(Exception):
    """The server cannot be reached, or has closed a connection in the middle of an answer."""


class _Answer:
    """An answer while it arrives; the parser calls the `on_*` methods."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
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
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = True

    async def wait_headers(self) -> None:
        while not self._has_headers:
            await self._feed()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        while True:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if self._is_complete:
                return
            await self._feed()

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def _feed(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if data:
            self._parser.feed_data(data)
        elif self._has_headers and not {"content-length", "transfer-encoding"} & set(self.headers):
            self._is_complete = True  # such a body ends with its connection
        else:
            raise ConnectionError("the server closed the connection")


@dataclass(frozen=True)
class HttpClient:
    """A server, and the key that it asks for.

    Attributes:
        url: of the API, such as http://localhost:8000/v1.
    """

    url: str
    api_key: str = field(default="EMPTY", repr=False)

    async def get(self, path: str) -> Any:
        """Return the JSON that a path holds.

        Raises:
            ServerError: it holds none.
            UnreachableError: there is no answer.
        """
        async with self._exchange("GET", path, None) as answer:
            body = await answer.whole()
            if answer.status != 200:
                raise ServerError(error_message(body) or f"status {answer.status}", answer.status)
            try:
                return json.loads(body)
            except ValueError:
                raise ServerError(f"{self.url}{path} is no JSON") from None

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
        """Send a JSON body; return status, headers and body of the answer, whatever they are.

        Raises:
            UnreachableError: there is no answer.
        """
        async with self._exchange("POST", path, body) as answer:
            content = await answer.whole()
            return answer.status, answer.headers, content

    async def stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """Send a JSON body and yield the events of the streamed answer.

        Raises:
            ServerError: an error answer or event.
            UnreachableError: there is no answer, or it breaks off.
        """
        async with self._exchange("POST", path, body) as answer:
            if answer.status != 200:
                content = await answer.whole()
                raise ServerError(error_message(content) or f"status {answer.status}", answer.status)
            async for data in _event_data(answer.pieces()):
                if data == b"[DONE]":
                    return
                event = _event(data)
                if "error" in event:
                    raise ServerError(error_message(data) or str(event["error"]))
                yield event

    async def first_model(self) -> str:
        """Return the name of the first model that the server has.

        Raises:
            ServerError, UnreachableError: it names none.
        """
        answer = await self.get("/models")
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError):
            raise ServerError(f"{self.url}/models names no model") from None

    @contextlib.asynccontextmanager
    async def _exchange(self, method: str, path: str, body: Any) -> AsyncIterator[_Answer]:
        try:
            parts = urlsplit(self.url + path)
            secure = ssl.create_default_context() if parts.scheme == "https" else None
            port = parts.port or (443 if secure else 80)
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
        except (OSError, ValueError) as error:
            raise UnreachableError(f"cannot reach {self.url}: {error}") from None
        try:
            writer.write(_request(method, parts.path or "/", parts.netloc, self.api_key, body))
            answer = _Answer(reader)
            await answer.wait_headers()
            yield answer
        except (OSError, httptools.HttpParserError) as error:
            raise UnreachableError(f"{self.url}{path}: {error}") from None
        finally:
            writer.close()


def error_message(body: bytes) -> str:
    """Return the message of an error answer in OpenAI's form; empty if it has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _event(data: bytes) -> dict[str, Any]:
    """Return an event of a stream: `choices` are a list, whatever else is there."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not ("error" in event or isinstance(event.get("choices"), list)):
        raise ServerError(f"an event of the stream is none of the OpenAI protocol: {data[:80]!r}")
    return event


def _request(method: str, path: str, host: str, api_key: str, body: Any) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def _event_data(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what follows `data:` in the lines of server-sent events."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
