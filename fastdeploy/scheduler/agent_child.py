# SPDX-License-Identifier: Apache-2.0
"""Starts the agent of a server, starts it again when it dies, and drains and stops it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from fastdeploy.core.child_command import child_command
from fastdeploy.core.errors import ConfigError, EngineDeadError
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages
from fastdeploy.ipc.child import ChildProcess, agent_identity
from fastdeploy.scheduler.agent_config import AgentConfig
from fastdeploy.scheduler.request_states import Role

MODULE = "fastdeploy.scheduler.agent_process"
MAX_QUICK_ENDS = 3  # in a row, after which the node goes on without an agent
QUICK_S = 10.0  # a process that ends within this time has not worked
RESTART_S = 0.2  # until the engine has seen that the connection is closed
REDIS_S = 30.0  # how long a server waits for Redis once its engine is ready
POLL_S = 0.05
STOP_S = 3.0  # for the agent to delete the key of the node
BAD_CONFIG = 2  # exit status
OUTPUT_LOGGER = "agent.output"

logger = logging.getLogger("fastdeploy.server")


class EngineOwner(Protocol):
    """The connection of the process that started the engine; `EngineClient` is one."""

    ready: messages.Ready | None
    stats: EngineStats
    dead_error: EngineDeadError | None

    @property
    def address(self) -> str:
        """Return the address at which other processes can connect to the engine."""

    async def wait_until_dead(self) -> None:
        """Wait until the engine process has ended unexpectedly."""

    def disconnect_client(self, identity: bytes) -> None:
        """Tell the engine that another client is gone."""

    def set_role(self, role: str) -> None:
        """Change the role of this node."""


class AgentChild:
    """The agent process of a server.

    Attributes:
        refused: done with the error when the agent has refused its configuration.
    """

    def __init__(self, config: AgentConfig, client: EngineOwner, log_file: Path | None, json_log: bool) -> None:
        """Prepare to start the agent.

        Args:
            log_file: file that receives its log; None keeps only the last lines in memory.
            json_log: whether it writes its log as JSON documents (FD_LOG_FORMAT).
        """
        self.refused: asyncio.Future[ConfigError] = asyncio.get_running_loop().create_future()
        self._config, self._client, self._log_file, self._json_log = config, client, log_file, json_log
        self._child: ChildProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    @property
    def process_id(self) -> int:
        """Return the process id of the agent, once it is started."""
        assert self._child is not None
        return self._child.process_id

    async def start(self) -> None:
        """Start the process."""
        self._child = self._make_child(is_replacement=False)
        await self._child.start()
        self._tasks = [asyncio.create_task(self._keep_alive()), asyncio.create_task(self._end_with_engine())]

    async def wait_for_redis(self) -> None:
        """Wait until the agent of an engine that is ready reaches Redis, but not longer than a server may wait."""
        deadline = math.inf
        while not self.refused.done() and self._client.dead_error is None and time.monotonic() < deadline:
            node = self._client.stats.node
            if node is not None and node.is_redis_up:
                return
            if deadline == math.inf and self._client.ready is not None:
                deadline = time.monotonic() + REDIS_S
            await asyncio.sleep(POLL_S)
        if time.monotonic() >= deadline:
            logger.warning("Redis is not there: this node serves alone until it is")

    async def drain(self) -> None:
        """Hand everything over to other nodes, and wait until they have fetched it, half of the graceful time."""
        self._client.set_role(Role.DRAINING.value)
        deadline = time.monotonic() + 2 * self._config.drain_s
        while self._is_needed() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """End the process; it deletes the key of the node first."""
        self._is_stopping = True
        if self._child is not None and self._child.is_running:
            self._child.terminate()
            await self._child.stop(STOP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_needed(self) -> bool:
        """Return whether other nodes wait for this one."""
        node = self._client.stats.node
        if node is None or self._child is None or not self._child.is_running:
            return False
        return node.role != Role.DRAINING or node.num_foreign > 0 or node.num_leased_slots > 0

    def _make_child(self, is_replacement: bool) -> ChildProcess:
        command = child_command(MODULE, "--address", self._client.address, "--parent", str(os.getpid()))
        config = replace(self._config, is_replacement=is_replacement)
        return ChildProcess(command, config, self._log_file, self._json_log, is_replacement, OUTPUT_LOGGER)

    async def _end_with_engine(self) -> None:
        """Let the agent delete the key of the node as soon as the engine has ended."""
        await self._client.wait_until_dead()
        self._is_stopping = True
        if self._child is not None:
            self._child.terminate()

    async def _keep_alive(self) -> None:
        num_quick_ends = 0
        while True:
            assert self._child is not None
            start_s = time.monotonic()
            status = await self._child.wait()
            if self._is_stopping:
                return
            self._client.disconnect_client(agent_identity(self._child.process_id))
            if status == BAD_CONFIG:
                field, message = msgspec.json.decode(self._child.tail[-1], type=tuple[str, str])
                self.refused.set_result(ConfigError(field, message))
                return
            num_quick_ends = num_quick_ends + 1 if time.monotonic() - start_s < QUICK_S else 1
            logger.error("the agent ended with status %d", status)
            if num_quick_ends >= MAX_QUICK_ENDS:
                logger.error("the agent ends again and again: this node serves alone")
                return
            await asyncio.sleep(RESTART_S)
            self._child = self._make_child(is_replacement=True)
            await self._child.start()
            logger.warning("the agent is started again as process %d", self.process_id)
