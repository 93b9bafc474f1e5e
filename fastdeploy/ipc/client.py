# SPDX-License-Identifier: Apache-2.0
"""The engine as its owner sees it: a child process that is started, watched and ended."""

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
LAST_WORDS_S = 0.1  # for messages that a process sent before it ended: a start-up error, the last deltas


class EngineClient(EngineConnection):
    """Starts the engine process and speaks with it."""

    def __init__(
        self,
        config: EngineConfig,
        log_file: Path | None = None,
        factory: str = DEFAULT_FACTORY,
        json_log: bool = False,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            log_file: where the engine's output goes; None keeps its last lines only.
            json_log: the engine writes its log as JSON documents (FD_LOG_FORMAT).
            factory: `module:function` that makes the engine from its configuration.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="fastdeploy-"))
        super().__init__(f"ipc://{self._folder}/engine", OWNER)
        self._child = EngineChild(config, self._address, factory, log_file, json_log)
        self._closing = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where other processes can reach the engine."""
        return self._address

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Start the process and wait until the model is loaded.

        Raises:
            ConfigError: the engine refuses its configuration.
            EngineDeadError: it died while starting; the message carries its exit status.
        """
        await self._child.start()
        self._watcher = asyncio.create_task(self._watch())
        await super().start(on_progress)

    def log_tail(self) -> list[str]:
        """Return the last lines that the engine process wrote."""
        return list(self._child.tail)

    def forget_client(self, identity: bytes) -> None:
        """Tell the engine that another connection is gone: what it asked for is aborted."""
        self._send(messages.ClientGone(identity))

    async def close(self) -> None:
        """End the engine process, by force if it is still loading or takes longer than a few seconds, and clean up."""
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
        """Turn the end of the process into an error for everybody who waits for it."""
        status = await self._child.wait()
        if self._closing:
            return
        await asyncio.sleep(LAST_WORDS_S)
        self.die(f"the engine process ended with status {status}")
