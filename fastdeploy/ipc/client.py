# SPDX-License-Identifier: Apache-2.0
"""The client that owns the engine process: it starts, watches and stops it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.ipc import messages
from fastdeploy.ipc.child import DEFAULT_FACTORY, OWNER, EngineChild
from fastdeploy.ipc.connection import EngineConnection, OnProgress
from fastdeploy.ipc.heartbeat import INTERVAL_S, STALLED_S
from fastdeploy.ipc.runtime_folder import SOCKET_NAME, RuntimeFolder

SHUTDOWN_S = 5.0
DRAIN_S = 0.1  # to receive what the process sent before it ended, such as a start-up error

logger = logging.getLogger("fastdeploy.server")


class EngineClient(EngineConnection):
    """A connection to the engine process that also starts and stops it."""

    def __init__(
        self,
        config: EngineConfig,
        log_file: Path | None = None,
        factory: str = DEFAULT_FACTORY,
        json_log: bool = False,
    ) -> None:
        """Create the client and the server's folder; the process starts with `launch` or `start`.

        Args:
            config: configuration of the engine.
            log_file: file that receives the engine's log; None keeps only its last lines in memory.
            factory: `module:function` that makes the engine from its configuration.
            json_log: whether the engine writes its log as JSON documents (FD_LOG_FORMAT).

        Raises:
            ConfigError: the folder cannot be created.
        """
        self._folder = RuntimeFolder()
        super().__init__(f"ipc://{self._folder.path}/{SOCKET_NAME}", OWNER)
        self._child = EngineChild(config, self._address, factory, log_file, json_log)
        self._closing = False
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """Return the address at which other processes can connect to the engine."""
        return self._address

    @property
    def folder(self) -> Path:
        """Return the server's folder for files that live as long as it."""
        return self._folder.path

    @property
    def process_id(self) -> int:
        """Return the process id of the engine, once it is launched."""
        return self._child.process_id

    async def launch(self) -> None:
        """Start the process, which begins to load the model; `start` waits until it is loaded."""
        await self._child.start()
        self._watchers.append(asyncio.create_task(self._watch_end()))
        self._connect()

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Wait until the model is loaded; start the process if it is not launched.

        Raises:
            ConfigError: the engine refused its configuration.
            DeviceFailedError: the device cannot be used.
            EngineDeadError: the process ended during start-up; the message has its exit status.
        """
        if not self._watchers:
            await self.launch()
        await super().start(on_progress)
        self._watchers.append(asyncio.create_task(self._watch_heartbeat()))

    def log_tail(self) -> list[str]:
        """Return the last lines of the engine's log."""
        return list(self._child.tail)

    def disconnect_client(self, identity: bytes) -> None:
        """Tell the engine that another client is gone, so that it aborts the requests of that client."""
        self._send(messages.ClientDisconnected(identity))

    async def close(self) -> None:
        """Stop the engine process and clean up; kill it if it is still loading or does not stop within seconds."""
        self._closing = True
        if self._child.is_running:
            self._send(messages.Shutdown())
            await self._child.stop(SHUTDOWN_S if self.ready is not None else 0.0)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await super().close()
        self._folder.remove()

    async def _watch_heartbeat(self) -> None:
        """Report when the engine stalls and when it responds again."""
        was_stalled = False
        while True:
            if (is_stalled := self.is_stalled) and not was_stalled:
                self._report_stall()
            elif was_stalled and not is_stalled:
                logger.warning("the engine responds again")
            was_stalled = is_stalled
            await asyncio.sleep(INTERVAL_S)

    def _report_stall(self) -> None:
        """Log why the engine does not respond: it hangs at the stacks that it writes, or it is stopped and has none."""
        if self._child.is_stopped:
            logger.error("the engine has not responded for %d s; its process is stopped", STALLED_S)
            return
        logger.error("the engine has not responded for %d s; it writes the stacks of its threads", STALLED_S)
        self._child.write_stacks()

    async def _watch_end(self) -> None:
        """Fail all requests when the process ends unexpectedly."""
        status = await self._child.wait()
        if self._closing:
            return
        await asyncio.sleep(DRAIN_S)
        self.mark_dead(f"the engine process ended with status {status}")
