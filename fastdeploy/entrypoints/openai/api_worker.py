# SPDX-License-Identifier: Apache-2.0
"""One of the API processes of `--workers N`, started by the supervisor.

Its first line of input is a `WorkerOrder`; a further one is a JSON string that says why the engine is gone. The end of
the input means that the supervisor is gone, and ends the process. It writes `READY_LINE` once it has met the engine.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass

import msgspec
import uvloop

from fastdeploy.config.args import ServeArgs
from fastdeploy.config.env import read_env
from fastdeploy.entrypoints.openai.lifecycle import (
    LAST_ANSWERS_S,
    drain,
    freeze_gc,
    make_server,
    serving,
    stop_signal,
    wait_empty,
)
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.ipc.connection import EngineConnection
from fastdeploy.metrics.logs import set_up_logging

READY_LINE = b"API process ready\n"
MAX_LINE_BYTES = 2**26  # an order may hold a chat template


@dataclass(frozen=True)
class WorkerOrder:
    """What an API process needs to know.

    Attributes:
        address, identity: of the engine, and of this process for the engine.
        listener_fd: inherited socket to accept from.
        metrics_folder: where all API processes keep their metrics.
    """

    args: ServeArgs
    address: str
    identity: bytes
    listener_fd: int
    metrics_folder: str


def main() -> int:
    """Serve until told to end; return the exit status: 0 drained, 1 the engine died."""
    return uvloop.run(_work())


async def _work() -> int:
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    order = msgspec.json.decode(await lines.readline(), type=WorkerOrder)
    env = read_env()
    set_up_logging(env)
    connection = EngineConnection(order.address, order.identity)
    server = make_server(order.args, env, connection, order.metrics_folder)
    with socket.socket(fileno=order.listener_fd) as listener:
        async with serving(server, listener):
            return await _live(server, connection, lines)


async def _live(server: ApiServer, connection: EngineConnection, lines: asyncio.StreamReader) -> int:
    stopping, dying = stop_signal(), asyncio.create_task(connection.wait_until_dead())
    orders = asyncio.create_task(_read_orders(connection, lines))
    starting = asyncio.create_task(connection.start())
    await asyncio.wait({starting, stopping, orders}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done() and starting.exception() is None:
        freeze_gc()
        sys.stdout.buffer.write(READY_LINE)
        sys.stdout.flush()
        await asyncio.wait({stopping, dying, orders}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done() and not dying.done():
        await drain(server, dying)
    if connection.dead_error is not None:
        await wait_empty(server, LAST_ANSWERS_S)
        return 1
    return 0


async def _read_orders(connection: EngineConnection, lines: asyncio.StreamReader) -> None:
    """Return at the end of the input."""
    while line := await lines.readline():
        connection.mark_dead(msgspec.json.decode(line, type=str))


if __name__ == "__main__":
    sys.exit(main())
