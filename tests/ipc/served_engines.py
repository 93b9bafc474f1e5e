# SPDX-License-Identifier: Apache-2.0
"""Engine servers in threads of this process, and clients that exchange single messages with them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from fastdeploy.config.engine_config import EngineConfig, SchedulerConfig
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import EngineStats
from fastdeploy.engine.engine_server import EngineLike, EngineServer
from fastdeploy.ipc import messages
from fastdeploy.ipc.child import agent_identity
from fastdeploy.kv_cache.arena_socket import serve_arena
from fastdeploy.metrics.stats_log import StatsLog
from tests.mock_engine import MockEngine, make_engine, save_mock_model

WAIT_MS = 30_000
FIRST_AGENT, SECOND_AGENT = agent_identity(1), agent_identity(2)
M = TypeVar("M", bound=messages.Message)


class Client:
    """A client of one engine.

    Attributes:
        received: all messages, in order; statistics are left out.
        stats: the latest.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.received: list[messages.ToClient] = []
        self.stats = messages.Stats(EngineStats())
        self._socket = socket

    def send(self, *sent: messages.ToEngine) -> None:
        for message in sent:
            self._socket.send(messages.encode(message))

    def receive(self) -> messages.ToClient:
        """Return the next message other than statistics."""
        while True:
            if not self._socket.poll(WAIT_MS):
                pytest.fail("the engine sends nothing")
            message = messages.decode_to_client(self._socket.recv())
            if not isinstance(message, messages.Stats):
                self.received.append(message)
                return message
            self.stats = message

    def expect(self, kind: type[M]) -> M:
        """Return the next message of a kind; skip others."""
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def deltas(self, request_id: str) -> list[TokenDelta]:
        """Return what has been received of a request."""
        found = []
        for message in self.received:
            if isinstance(message, messages.Deltas):
                found += [TokenDelta(key, i, ids, first_index=first) for key, i, ids, _, _, first in message.plain]
                found += message.others
        return [delta for delta in found if delta.request_id == request_id]

    def tokens(self, request_id: str, first_index: int = 0) -> list[int]:
        """Return the tokens that have been received of choice 0, of which none may be missing."""
        tokens: list[int] = []
        for delta in self.deltas(request_id):
            assert delta.first_index == first_index + len(tokens)
            tokens += delta.token_ids
        return tokens

    def finish(self, request_id: str) -> TokenDelta:
        """Receive to the end of a request; return its last delta."""
        while not (deltas := self.deltas(request_id)) or deltas[-1].finish_reason is None:
            self.receive()
        return deltas[-1]


class ServedEngine:
    """An engine whose server runs in a thread.

    Attributes:
        agent: connected as FIRST_AGENT.
        arena_path: where its arena is served, if it has one.
    """

    def __init__(
        self,
        engine: EngineLike,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        name: str,
        stats_log: StatsLog | None = None,
    ) -> None:
        self.engine, self.arena_path = engine, str(folder / f"{name}.arena")
        self._context, self._address = context, f"ipc://{folder}/{name}.socket"
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(self._address)
        if engine.transfer is not None:
            serve_arena(engine.transfer.arena, self.arena_path)
        self.server = EngineServer(engine, self._router, set(), stats_log)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        self._sockets = [self._router]
        self._last = self.connect(b"last")
        self.agent = self.connect(FIRST_AGENT)

    def connect(self, identity: bytes) -> Client:
        """Return a new client, which the engine has greeted."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address)
        self._sockets.append(socket)
        client = Client(socket)
        client.send(messages.Hello())
        client.expect(messages.Ready)
        return client

    def close(self) -> None:
        """End the server and check that no request is left."""
        self._last.send(messages.Shutdown())
        self._thread.join()
        for socket in self._sockets:
            socket.close(linger=0)
        server = self.server
        assert not (server._in_flight or server._prepared or server._peers.is_opening or self.engine.is_moving)


@contextlib.contextmanager
def served(folder: Path, *engines: EngineLike) -> Iterator[list[ServedEngine]]:
    """Serve engines; on leaving, they must be idle."""
    with zmq.Context() as context:
        all_served = [ServedEngine(engine, context, folder, f"e{i}") for i, engine in enumerate(engines)]
        try:
            yield all_served
        finally:
            for one in all_served:
                one.close()


def mock_engine(folder: Path, hands_over: bool = True, **options: object) -> MockEngine:
    """Return a mock engine with an arena."""
    folder.mkdir(exist_ok=True)
    model = str(save_mock_model(folder, **options))
    scheduler = SchedulerConfig(max_num_batched_tokens=128)
    return make_engine(
        EngineConfig(model=model, max_model_len=2048, seed=7, hands_over=hands_over, scheduler=scheduler)
    )


def request(request_id: str = "r", num_prompt: int = 150, **params: object) -> GenerationRequest:
    """Return a request whose prompt takes several blocks."""
    return GenerationRequest(request_id, [10 + i % 50 for i in range(num_prompt)], SamplingParams(**params))  # type: ignore[arg-type]
