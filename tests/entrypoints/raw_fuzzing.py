# SPDX-License-Identifier: Apache-2.0
"""Valid HTTP requests with random damage to their bytes, and a driver that sends them over connections of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.entrypoints.fuzzing import odd_value, openai_error

ALLOWED = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 414, 415, 429, 431, 503, 504})
ANSWER_S = 30  # the server must answer or close within this time
FLAGS = ("--timeout-header", "1", "--timeout-body", "1", "--max-header-size", "4096", "--max-url-length", "1024")
"""Limits that the requests reach, and times that keep the fuzz short."""

PATHS = [
    *(b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/detokenize", b"/v1/abort_requests", b"/health"),
    *(b"/v1/messages", b"/v1/messages/", b"/v1/messages/%00/count_tokens"),
    *(b"/v1/responses", b"/v1/responses/", b"/v1/responses/%00/cancel"),
    *(b"/health/", b"/v1/models", b"/v1/models/", b"/v1/models/%00", b"/metrics", b"/load", b"/", b"//", b"/%ff/%"),
    *(
        b"http://x/health",
        b"http://x",
        b"*",
        b"?",
        b"/v1/completions?a=%zz#b",
        b"/" + b"a" * 2000,
        b"/\xc3\xa9",
        b"/a b",
    ),
]
METHODS = [b"POST", b"GET", b"PUT", b"OPTIONS", b"DELETE", b"TRACE", b"CONNECT", b"PATCH", b"get", b"FETCH", b"PRI"]
HEADERS = [
    *(b"Content-Length: 0", b"Content-Length: 3", b"Content-Length: -1", b"Content-Length: 99999999999"),
    *(b"Content-Length: 1e3", b"Content-Length:", b"Content-Length: 20000000000000000000"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: x"),
    *(b"Expect: 100-continue", b"Expect: 200-ok", b"Connection: close", b"Connection: keep-alive, Upgrade"),
    *(b"Connection: Upgrade\r\nUpgrade: websocket", b"Connection: Upgrade\r\nUpgrade: h2c", b"Upgrade: websocket"),
    *(b"Host: ", b"Host: [::1", b"Host: a\x00b", b"Host: x, y", b"Host: \xff", b"X-Request-Id: \xff", b"X-Request-Id:"),
    *(b"X-Forwarded-For: 1.2.3.4", b"X-Forwarded-For: \xff, [", b"X-Forwarded-For:", b"X-Forwarded-Proto: gopher"),
    *(b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16", b"Content-Type: \xff"),
    *(b"Content-Encoding: gzip", b"Authorization: Bearer \xff", b"Authorization:", b": empty", b" folded", b"no colon"),
    *(b"Origin: http://x", b"Cookie: " + b"c" * 3000, b"A: " + b"a" * 5000, b"\x00: x", b"a: \r\n b"),
]
VALID = [
    (b"/v1/completions", b'{"prompt": "the", "max_tokens": 2}'),
    (b"/v1/completions", b'{"prompt": "the", "max_tokens": 2, "stream": true}'),
    (b"/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'),
    (b"/v1/chat/completions/batch", b'{"messages": [[{"role": "user", "content": "hi"}]], "max_tokens": 2}'),
    (b"/invocations", b'{"prompt": "the", "max_tokens": 2}'),
    (b"/v1/responses", b'{"input": "hi", "max_output_tokens": 2}'),
    (b"/v1/responses", b'{"input": "hi", "max_output_tokens": 2, "stream": true}'),
    (b"/v1/messages", b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'),
    (b"/v1/messages", b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": true}'),
    (b"/tokenize", b'{"prompt": "the"}'),
    (b"/detokenize", b'{"tokens": [5, 6]}'),
    (b"/v1/abort_requests", b'{"req_ids": ["x"]}'),
    (b"/v1/role", b'{"role": "mixed"}'),
]
BODIES = [
    *(body for _, body in VALID),
    b"{}",
    b"",
    b'{"prompt": "' + b"the " * 20_000 + b'"}',
    b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
    b'{"prompt": "\xff\xed\xa0\x80"}',
]


@dataclass
class RawOutcome:
    """Counts of the first responses by status, of connections closed without one, and the faults of the server."""

    statuses: Counter[int] = field(default_factory=Counter)
    num_closed: int = 0
    faults: list[str] = field(default_factory=list)


def make_raw_request(rng: random.Random) -> list[bytes]:
    """Return a request in the parts in which it is sent; most have some damage."""
    data = b"".join(_request(rng) for _ in range(rng.choice([1, 1, 1, 1, 2, 3, 80])))
    for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
        data = rng.choice(DAMAGES)(rng, data)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 1, 2, 5, 30])))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)])]


def _request(rng: random.Random) -> bytes:
    is_plain = rng.random() < 0.6
    method, path, body = b"POST", *rng.choice(VALID)
    if not is_plain:
        method, path = rng.choice(METHODS), rng.choice(PATHS)
        body = rng.choice(BODIES) if rng.random() < 0.9 else json.dumps(odd_value(rng)).encode()
    headers = [b"Host: x", b"Content-Type: application/json"]
    if rng.random() < 0.3:
        headers.append(b"Transfer-Encoding: chunked")
        body = b"".join(_chunks(rng, body))
    elif body:
        headers.append(b"Content-Length: %d" % len(body))
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        headers.insert(rng.randrange(len(headers) + 1), rng.choice(HEADERS))
    version = rng.choice([b"1.1"] * 18 + [b"1.0", b"2.0"])
    return b"%b %b HTTP/%b\r\n%b\r\n\r\n%b" % (method, path, version, b"\r\n".join(headers), body)


def _chunks(rng: random.Random, body: bytes) -> Iterator[bytes]:
    """Yield the chunks of a body, sometimes with extensions, wrong sizes, trailers, or without an end."""
    while body:
        size = rng.choice([1, 7, 1000, len(body)])
        part, body = body[:size], body[size:]
        shown = rng.choice([b"%x" % len(part)] * 20 + [b"%X" % (len(part) + 1), b"-1", b"zz", b"0x1", b"f" * 20, b""])
        yield shown + rng.choice([b""] * 9 + [b";a=b", b";" + b"e" * 6000]) + b"\r\n" + part + b"\r\n"
    yield rng.choice([b"0\r\n\r\n"] * 9 + [b"0\r\nA: b\r\n\r\n", b"0\r\n", b"0\r\nA: " + b"t" * 6000, b""])


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice([rng.randbytes(rng.randrange(1, 9)), b"\r\n", b"\n", b"\x00", b":"]) + data[at:]


def _cut_out(rng: random.Random, data: bytes) -> bytes:
    begin = rng.randrange(len(data) + 1)
    return data[:begin] + data[begin + rng.randrange(1, 40) :]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    begin = rng.randrange(len(data) + 1)
    piece = data[begin : begin + rng.randrange(1, 200)]
    return data[:begin] + piece * rng.choice([2, 3, 200]) + data[begin:]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


DAMAGES: list[Callable[[random.Random, bytes], bytes]] = [_flip, _flip, _insert, _cut_out, _repeat, _truncate]


async def send_raw(
    address: tuple[str, int], requests: list[tuple[list[bytes], bool]], num_at_once: int = 64
) -> RawOutcome:
    """Send requests and check the first response to each; after each of them /health must answer.

    Args:
        requests: the parts of each request, and whether the client leaves without reading.
    """
    outcome, waiting = RawOutcome(), iter(requests)

    async def work() -> None:
        for parts, leaves in waiting:
            fault = await _exchange(address, parts, leaves, outcome)
            fault = fault or await _exchange(address, [HEALTH], False, RawOutcome(), frozenset({200}))
            if fault:
                outcome.faults.append(f"{fault}: {b''.join(parts)[:1500]!r}")

    await asyncio.gather(*(work() for _ in range(num_at_once)))
    return outcome


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def _exchange(
    address: tuple[str, int],
    parts: list[bytes],
    leaves: bool,
    outcome: RawOutcome,
    allowed: frozenset[int] = ALLOWED,
) -> str | None:
    """Send one request; return what is wrong with the response."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        if leaves:
            return None
        async with asyncio.timeout(ANSWER_S):
            status, headers, body = await _read_response(reader, b"".join(parts).startswith(b"HEAD"))
        outcome.statuses[status] += 1
        return find_raw_fault(status, headers, body, allowed)
    except (asyncio.IncompleteReadError, ConnectionError):
        outcome.num_closed += 1
        return None if allowed is ALLOWED else "the connection is closed"
    except TimeoutError:
        return "neither a response nor the end of the connection"
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _read_response(reader: asyncio.StreamReader, is_head: bool) -> tuple[int, dict[str, str], bytes]:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if status != 100:
            break
    if is_head:
        return status, headers, b""
    if headers.get("transfer-encoding") != "chunked":
        return status, headers, await reader.readexactly(int(headers["content-length"]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return status, headers, body


def find_raw_fault(status: int, headers: dict[str, str], body: bytes, allowed: frozenset[int] = ALLOWED) -> str | None:
    """Return what is wrong with a response, None if nothing is."""
    if status not in allowed:
        return f"status {status} with {body[:300]!r}"
    if status < 400 or not body:
        return None
    if headers.get("content-type") != "application/json":
        return f"status {status} without JSON"
    content: Any = json.loads(body)
    error = openai_error(content) if isinstance(content.get("error"), dict) else None
    if error is None or set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return f"status {status} without a typed error: {body[:300]!r}"
    return None


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has ended")
