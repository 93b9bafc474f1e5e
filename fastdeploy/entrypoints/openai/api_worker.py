# SPDX-License-Identifier: Apache-2.0
"""One of the API processes of `--workers N`, which the supervisor starts.

It reads a `WorkerConfig` from its first line of input. A further line is a JSON string with the reason for the engine's
end. The process writes `READY_LINE` once it is connected to the engine, and ends when the supervisor has ended.
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
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.faults import arm
from fastdeploy.core.process import die_with_parent, write_stacks_on_signal
from fastdeploy.entrypoints.openai.lifecycle import (
    drain,
    finish_streams,
    freeze_gc,
    joined_cluster,
    make_server,
    serving,
    stop_signal,
)
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.ipc.connection import EngineConnection
from fastdeploy.metrics.logs import set_up_logging

READY_LINE = b"API process ready\n"
MAX_LINE_BYTES = 2**26  # the configuration may hold a chat template


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of an API process.

    Attributes:
        address: address of the engine.
        identity: name of this process for the engine.
        listener_fd: inherited socket on which to accept connections.
        metrics_folder: where all API processes store their metrics.
        parent_pid: the supervisor's process id.
        number: of this process, from 0.
    """

    args: ServeArgs
    address: str
    identity: bytes
    listener_fd: int
    metrics_folder: str
    parent_pid: int
    number: int


def main() -> int:
    """Serve until SIGTERM or the supervisor's end; return the exit status: 0 drained, 1 the engine died."""
    write_stacks_on_signal()
    return uvloop.run(_main())


async def _main() -> int:
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    config = msgspec.json.decode(await lines.readline(), type=WorkerConfig)
    die_with_parent(config.parent_pid)
    env = read_env()
    set_up_logging(env)
    arm(env.faults)
    connection = EngineConnection(config.address, config.identity)
    server = make_server(config.args, env, connection, config.metrics_folder)
    with socket.socket(fileno=config.listener_fd) as listener:
        async with joined_cluster(server, config.args, connection, config.number), serving(server, listener):
            return await _run(server, connection, lines)


async def _run(server: ApiServer, connection: EngineConnection, lines: asyncio.StreamReader) -> int:
    stop, engine_dead = stop_signal(), asyncio.create_task(connection.wait_until_dead())
    reading = asyncio.create_task(_read_messages(connection, lines))
    starting = asyncio.create_task(server.scheduler.start())
    await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done() and isinstance(starting.exception(), ConfigError):
        await stop  # the supervisor's own processes find the same, and it reports that
    elif starting.done() and starting.exception() is None:
        freeze_gc()
        sys.stdout.buffer.write(READY_LINE)
        sys.stdout.flush()
        await asyncio.wait({stop, engine_dead}, return_when=asyncio.FIRST_COMPLETED)
    if stop.done() and not engine_dead.done():
        await drain(server, engine_dead)
    reading.cancel()
    if connection.dead_error is not None:
        await finish_streams(server, stop)
        return 1
    return 0


async def _read_messages(connection: EngineConnection, lines: asyncio.StreamReader) -> None:
    """Read what the supervisor sends; return at the end of the input."""
    while line := await lines.readline():
        connection.mark_dead(msgspec.json.decode(line, type=str))


if __name__ == "__main__":
    sys.exit(main())
