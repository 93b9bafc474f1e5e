# SPDX-License-Identifier: Apache-2.0
"""What does a client receive from a server, and when? A client with many streams in one thread, for other benchmarks.

It shares the cores with the server that it measures. While streams run it therefore only waits, reads and records the
time; events are parsed when all have ended. Jobs come as JSON lines on stdin, results go as JSON lines to stdout.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

RECEIVE_BYTES = 1 << 16


@dataclass
class Stream:
    """A streamed completion: (seconds since the first request was sent, bytes) of each part that arrived."""

    connection: socket.socket
    parts: list[tuple[float, bytes]] = field(default_factory=list)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Send all requests at once and read all answers; return the text and times of each."""
    requests = [_http(job["host"], body, job.get("key", "")) for body in job["bodies"]]
    streams = [Stream(socket.create_connection((job["host"], job["port"]))) for _ in requests]
    begin = time.perf_counter()
    for stream, request in zip(streams, requests, strict=True):
        stream.connection.sendall(request)
    _read_all(streams, begin)
    return [_result(stream) for stream in streams]


def _read_all(streams: list[Stream], begin: float) -> None:
    poll = select.epoll()
    by_fd = {stream.connection.fileno(): stream for stream in streams}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    while by_fd:
        for fd, _ in poll.poll():
            part = by_fd[fd].connection.recv(RECEIVE_BYTES)
            by_fd[fd].parts.append((time.perf_counter() - begin, part))
            if not part:  # the server closes the connection after the answer
                poll.unregister(fd)
                by_fd.pop(fd).connection.close()
    poll.close()


def _http(host: str, body: dict[str, Any], key: str) -> bytes:
    content = json.dumps(body).encode()
    headers = f"Host: {host}\r\nConnection: close\r\nContent-Length: {len(content)}\r\nAuthorization: Bearer {key}"
    return f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + content


def _result(stream: Stream) -> dict[str, Any]:
    """Return the text and its arrival times; an event arrives with the part in which it ends."""
    texts, times = list[str](), list[float]()
    pending = b""
    for seconds, part in stream.parts:
        *events, pending = (pending + part).split(b"\n\n")
        answers = [json.loads(event.rsplit(b"data: ", 1)[-1]) for event in events if b"data: {" in event]
        if any(answer.get("choices") for answer in answers):
            texts += [choice["text"] for answer in answers for choice in answer.get("choices", ())]
            times.append(seconds)
    return {"text": "".join(texts), "times": times, "end": stream.parts[-1][0]}


def main() -> None:
    """Run the jobs that come on stdin."""
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
