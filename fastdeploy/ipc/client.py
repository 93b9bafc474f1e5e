# SPDX-License-Identifier: Apache-2.0
"""The client that owns the engine process: it starts, watches and stops it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.ipc import messages
from fastdeploy.ipc.child import DEFAULT_FACTORY, OWNER, EngineChild
from fastdeploy.ipc.connection import EngineConnection, OnProgress

SHUTDOWN_S = 5.0
DRAIN_S = 0.1  # to receive what the process sent before it ended, such as a start-up error


class EngineClient(EngineConnection):
    """A connection to the engine process that also starts and stops it."""

    def __init__(
        self,
        config: EngineConfig,
        log_file: Path | None = None,
        factory: str = DEFAULT_FACTORY,
        json_log: bool = False,
    ) -> None:
        """Create the client; the process starts with `start`.

        Args:
            config: configuration of the engine.
            log_file: file that receives the engine's log; None keeps only its last lines in memory.
            factory: `module:function` that makes the engine from its configuration.
            json_log: whether the engine writes its log as JSON documents (FD_LOG_FORMAT).
        """
        self._folder = Path(tempfile.mkdtemp(prefix="fastdeploy-"))
        super().__init__(f"ipc://{self._folder}/engine", OWNER)
        self._child = EngineChild(config, self._address, factory, log_file, json_log)
        self._closing = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Return the address at which other processes can connect to the engine."""
        return self._address

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Start the process and wait until the model is loaded.

        Raises:
            ConfigError: the engine refused its configuration.
            EngineDeadError: the process ended during start-up; the message has its exit status.
        """
        await self._child.start()
        self._watcher = asyncio.create_task(self._watch())
        await super().start(on_progress)

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
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self) -> None:
        """Fail all requests when the process ends unexpectedly."""
        status = await self._child.wait()
        if self._closing:
            return
        await asyncio.sleep(DRAIN_S)
        self.mark_dead(f"the engine process ended with status {status}")
