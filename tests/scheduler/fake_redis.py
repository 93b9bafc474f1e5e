# SPDX-License-Identifier: Apache-2.0
"""A server that answers as a test says, for what a real Redis cannot be made to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

OK = b"+OK\r\n"
Answer = Callable[[list[bytes]], bytes]


@asynccontextmanager
async def fake_redis(answer: Answer) -> AsyncIterator[str]:
    """Yield the URL of a server that answers each command by a function; b"" closes the connection."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while command := await _read_command(reader):
            reply = OK if command[0] == b"CLIENT" else answer(command)
            if not reply:
                break
            writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}?protocol=2"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await server.wait_closed()


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    """Return the words of a command; an empty list at the end of the connection."""
    header = await reader.readline()
    words = []
    for _ in range(int(header[1:] or 0)):
        length = int((await reader.readline())[1:])
        words.append((await reader.readexactly(length + 2))[:-2])
    return words


def bulk(text: str) -> bytes:
    """Return a string as an answer."""
    return b"$%d\r\n%s\r\n" % (len(text), text.encode())
