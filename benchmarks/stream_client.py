# SPDX-License-Identifier: Apache-2.0
"""The client of bench_http: many streams in one thread of one process, on plain sockets.

It shares the cores with the server it measures, so while streams run it only waits, reads and notes the time; events
are parsed when all have ended. Jobs come as JSON lines on stdin, results go as JSON lines to stdout.
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
    """One streamed completion: what arrived, and when (seconds since the first request was sent)."""

    connection: socket.socket
    parts: list[tuple[float, bytes]] = field(default_factory=list)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Send all bodies at once, read all answers, and return text, times and error of each."""
    requests = [_http(job["host"], body) for body in job["bodies"]]
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


def _http(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _result(stream: Stream) -> dict[str, Any]:
    """Return the text, its arrival times, and the error if there was one.

    An event belongs to the part in which it ends.
    """
    texts: list[str] = []
    times: list[float] = []
    error, usage, pending = None, None, b""
    for when, part in stream.parts:
        *events, pending = (pending + part).split(b"\n\n")
        found = [event.rsplit(b"data: ", 1)[-1] for event in events if b"data: {" in event]
        answers = [json.loads(event) for event in found]
        error = next((answer["error"] for answer in answers if "error" in answer), error)
        usage = next((answer["usage"] for answer in answers if answer.get("usage")), usage)
        new = "".join(choice["text"] for answer in answers for choice in answer.get("choices", ()))
        if any(answer.get("choices") for answer in answers):
            texts.append(new)
            times.append(when)
    head = stream.parts[0][1][:200]
    if error is None and (b" 200 " not in head.split(b"\r\n", 1)[0] or usage is None):
        error = {"message": head.decode(errors="replace")}
    return {"text": "".join(texts), "times": times, "end": stream.parts[-1][0], "usage": usage, "error": error}


def main() -> None:
    """Run the jobs that come on stdin."""
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
