# SPDX-License-Identifier: Apache-2.0
"""Starts, monitors, restarts and stops the API processes of `--workers N`, which share one port and one engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from types import TracebackType

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from fastdeploy.config.args import ServeArgs
from fastdeploy.config.env import child_environment
from fastdeploy.core.child_command import child_command
from fastdeploy.entrypoints.openai.api_worker import READY_LINE, WorkerConfig
from fastdeploy.entrypoints.openai.lifecycle import FINAL_RESPONSES_S
from fastdeploy.ipc.client import EngineClient
from fastdeploy.metrics.server_metrics import FOLDER_VARIABLE, ServerMetrics

MODULE = "fastdeploy.entrypoints.openai.api_worker"
MAX_FAILED_STARTS = 3
SHUTDOWN_GRACE_S = 5.0  # in addition to the graceful timeout; then workers are killed

logger = logging.getLogger("fastdeploy.server")


class _Worker:
    """Worker `number`; its process is replaced when it ends, and `generation` counts the replacements."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = 0
        self.num_failed_starts = 0
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()

    @property
    def identity(self) -> bytes:
        return b"worker-%d-%d" % (self.number, self.generation)


class Supervisor:
    """The API processes of a server; a context manager that starts them and, at the end of the block, kills them.

    Attributes:
        registry: the metrics of all processes and of the engine.
        num_inside: returns the number of requests in all API processes.
    """

    def __init__(self, args: ServeArgs, client: EngineClient, listener: socket.socket) -> None:
        """Prepare to start the processes; all of them accept connections on `listener`."""
        self._args = args
        self._client = client
        self._listener = listener
        folder = client.folder / "metrics"
        folder.mkdir()
        self._folder = str(folder)
        self._workers = [_Worker(number) for number in range(args.server.workers)]
        self._failed = asyncio.Event()
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        metrics = ServerMetrics(
            lambda: client.stats,
            self._description,
            self._folder,
            is_clustered=args.cluster.is_clustered,
            model_name=args.server.served_model_name[0],
        )
        self.registry, self.num_inside = metrics.registry, metrics.num_inside

    async def __aenter__(self) -> Supervisor:
        for worker in self._workers:
            await self._start(worker)
            self._tasks.append(asyncio.create_task(self._keep_alive(worker)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping = True
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.kill()
        await asyncio.gather(*self._tasks)

    @property
    def process_ids(self) -> list[int]:
        """Return the process ids of the API processes that are started."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    async def wait_ready(self) -> None:
        """Return when every API process is connected to the engine."""
        await asyncio.gather(*(worker.ready.wait() for worker in self._workers))

    async def wait_failed(self) -> None:
        """Return when an API process has repeatedly failed to start."""
        await self._failed.wait()

    async def drain(self, engine_dead: asyncio.Task[None]) -> None:
        """Let running requests finish within the graceful timeout; return when all processes have ended.

        From now on, only they have descriptors of the listening socket, so that a client that connects after their end
        is refused and does not wait for this process.
        """
        self._is_stopping = True
        self._listener.close()
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.send_signal(signal.SIGTERM)
        graceful_s = self._args.server.drain_timeout_s
        await asyncio.wait(
            {asyncio.create_task(self._wait_ended()), engine_dead},
            timeout=None if graceful_s is None else graceful_s + SHUTDOWN_GRACE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )

    async def report_engine_death(self, reason: str) -> None:
        """Report the engine's end to every API process; return when they have responded to their clients and ended."""
        self._is_stopping = True
        for worker in self._workers:
            if worker.process is not None and worker.process.stdin is not None:
                worker.process.stdin.write(msgspec.json.encode(reason) + b"\n")
        graceful_s = self._args.server.drain_timeout_s if self._args.cluster.is_clustered else 0.0
        timeout_s = None  # streams that run on other nodes may end
        if graceful_s is not None:
            timeout_s = graceful_s + 2 * FINAL_RESPONSES_S + SHUTDOWN_GRACE_S
        await asyncio.wait({asyncio.create_task(self._wait_ended())}, timeout=timeout_s)

    async def _wait_ended(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _keep_alive(self, worker: _Worker) -> None:
        """Replace the worker's process whenever it ends, and abort its requests on the engine."""
        while True:
            assert worker.process is not None
            status = await self._forward_output(worker)
            mark_process_dead(worker.process.pid, self._folder)
            if self._is_stopping:
                return
            worker.num_failed_starts = 0 if worker.ready.is_set() else worker.num_failed_starts + 1
            logger.error("API process %d ended with status %d", worker.number, status)
            if worker.num_failed_starts == MAX_FAILED_STARTS:
                logger.error("API process %d does not start", worker.number)
                self._failed.set()
                return
            self._client.disconnect_client(worker.identity)
            worker.generation += 1
            await self._start(worker)
            logger.warning("API process %d is started again as process %d", worker.number, worker.process.pid)

    async def _forward_output(self, worker: _Worker) -> int:
        """Forward the output of the process until it ends; return its exit status."""
        assert worker.process is not None and worker.process.stdout is not None
        while line := await worker.process.stdout.readline():
            if line == READY_LINE:
                worker.ready.set()
            else:
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
        return await worker.process.wait()

    async def _start(self, worker: _Worker) -> None:
        worker.ready.clear()
        worker.process = await asyncio.create_subprocess_exec(
            *child_command(MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # only the supervisor handles Ctrl-C
            env=child_environment(is_replacement=worker.generation > 0, **{FOLDER_VARIABLE: self._folder}),
        )
        assert worker.process.stdin is not None
        config = WorkerConfig(
            self._args,
            self._client.address,
            worker.identity,
            self._listener.fileno(),
            self._folder,
            os.getpid(),
            worker.number,
        )
        worker.process.stdin.write(msgspec.json.encode(config) + b"\n")

    def _description(self) -> dict[str, object]:
        return dict(self._client.ready.description) if self._client.ready is not None else {}
