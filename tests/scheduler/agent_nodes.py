# SPDX-License-Identifier: Apache-2.0
"""Agents in this process with mock engines in threads, over a real Redis, and a scripted owner of requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.engine_config import EngineConfig, SchedulerConfig
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine_server import EngineServer
from fastdeploy.ipc import messages
from fastdeploy.ipc.child import agent_identity
from fastdeploy.kv_cache.arena_socket import arena_file, serve_arena
from fastdeploy.scheduler.agent import Agent
from fastdeploy.scheduler.agent_config import AgentConfig
from fastdeploy.scheduler.agent_engine import AgentEngine
from fastdeploy.scheduler.agent_process import make_agent
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.messages import ToOwner, decode_to_owner
from fastdeploy.scheduler.request_states import (
    Abort,
    Claimed,
    Handed,
    Image,
    NodeMessage,
    Refused,
    Release,
    Resend,
    Stage,
    Ticket,
    Tokens,
)
from fastdeploy.scheduler.store import Store, StoreError
from tests.cluster.redis_server import RedisServer
from tests.mock_engine import MockEngine, next_token, save_mock_model

KEYS = Keys("default", "mock")
AGENT_NUMBERS = itertools.count(1)  # all in one process


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait up to 30 seconds for a condition."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never came true: {what}")


def expected_tokens(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """Return what the mock engine emits, with greedy sampling."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, 0, vocab_size))
    return context[len(prompt) :]


class EngineThread:
    """A mock engine served from a thread of this process.

    Attributes:
        engine: the mock engine.
        address: where it is served.
    """

    def __init__(self, folder: Path, step_tokens: int = 2048, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"ipc://{folder}/engine"
        config = EngineConfig(
            model=str(save_mock_model(folder, **options)),
            max_model_len=2000,
            seed=7,
            scheduler=SchedulerConfig(max_num_batched_tokens=step_tokens),
            hands_over=True,
        )
        self.engine = MockEngine(config, options)
        assert self.engine.transfer is not None
        serve_arena(self.engine.transfer.arena, arena_file(self.address))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=EngineServer(self.engine, self._socket, set()).run, daemon=True)
        self._thread.start()

    def send(self, message: messages.ToEngine) -> None:
        """Send a message as another client."""
        with self._context.socket(zmq.DEALER) as client:
            client.connect(self.address)
            client.send(messages.encode(message))

    def close(self) -> None:
        self.send(messages.Shutdown())
        self._thread.join(10)
        self._socket.close()
        self._context.term()


class Node:
    """An agent of this process.

    Attributes:
        thread: its engine.
        agent, error: the agent, and what has ended it.
    """

    def __init__(self, name: str, thread: EngineThread, redis: RedisServer, role: str, **config: Any) -> None:
        self.name, self.thread = name, thread
        cluster = ClusterConfig(
            scheduler_name="splitwise",
            splitwise_role=role,
            scheduler_port=redis.port,
            node_id=name,
            scheduler_sync_period=100,
            scheduler_expire_period=1500,
        )
        self._config = AgentConfig(cluster, **config)
        self.agent: Agent
        self._task: asyncio.Task[None]
        self.error: BaseException | None = None
        self._has_ended = False

    async def start(self) -> None:
        self._identity = agent_identity(next(AGENT_NUMBERS))
        self._engine = AgentEngine(self.thread.address, self._identity, self._fail)
        await self._engine.start()
        self.agent, self._store = make_agent(self._config, self._engine, self.thread.address)
        self._task = asyncio.create_task(self._run())
        await until(lambda: self.agent.is_redis_up or self.error, f"{self.name} is up")

    async def stop(self) -> None:
        """End the agent as SIGTERM does."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.agent.leave()
        await self.kill()

    async def kill(self) -> None:
        """End the agent without a word, unless it has ended."""
        if self._has_ended:
            return
        self._has_ended = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._engine.close()
        self.thread.send(messages.ClientDisconnected(self._identity))
        await self._store.close()

    @property
    def num_tickets(self) -> int:
        return len(self.agent.states.tickets)

    def set_role(self, role: str) -> None:
        self.thread.send(messages.SetRole(role))

    def _fail(self, reason: str) -> None:
        raise AssertionError(reason)

    async def _run(self) -> None:
        try:
            await self.agent.run()
        except Exception as error:
            self.error = error


class ScriptedOwner:
    """An owner whose steps the test makes.

    Attributes:
        name: of the owner, which belongs to the node `home`.
        messages: from nodes, in order of arrival, without `Holding`.
        tokens: of choice 0 by number of the request; each index once, and without gaps.
        ends: finish reason by number.
    """

    def __init__(self, redis: RedisServer, home: str, vocab_size: int) -> None:
        self.name = f"{home}.0.abcd"
        self.messages: list[NodeMessage] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.store = Store(ClusterConfig(scheduler_name="splitwise", scheduler_port=redis.port), KEYS)
        self._stream = KEYS.owner_inbox(self.name)
        self._tasks: list[asyncio.Task[None]] = []
        self._prompts: dict[int, list[int]] = {}
        self._vocab_size = vocab_size

    async def start(self) -> None:
        await self.store.create_inbox(self._stream)
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._read())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()

    async def enqueue(
        self, number: int, stage: Stage = Stage.PREFILL, leg: int = 1, prompt: int = 70, hint: str = "", **fields: Any
    ) -> None:
        """Put a leg into its queue; it resumes behind the tokens that have arrived."""
        params = SamplingParams(temperature=0.0, **fields.pop("params", {"max_tokens": 6}))
        self._prompts[number] = [10 + number, *range(20, 19 + prompt)]
        request = GenerationRequest(f"client-{number}", self._prompts[number], params)
        resumed = fields.pop("resumed", [list(self.tokens.setdefault(number, []))])
        await self.store.enqueue(Ticket(self.name, number, leg, stage, request, resumed, **fields), hint)

    async def abort(self, node: str, number: int, leg: int = 1) -> None:
        await self.store.send_to_node(node, [Abort(self.name, number, leg)])

    async def release(self, image: Image, number: int) -> None:
        await self.store.send_to_node(image.node, [Release(self.name, number, image.leg)])

    def find(self, kind: type[NodeMessage], number: int | None = None) -> list[Any]:
        """Return the messages of a kind."""
        found = [message for message in self.messages if isinstance(message, kind)]
        return [message for message in found if number in (None, message.number)]

    async def wait_claimed(self, number: int, leg: int = 1) -> str:
        """Wait until a leg was claimed; return by which node."""
        await until(lambda: self._claims(number, leg), f"{number} is claimed")
        return str(self._claims(number, leg)[0].node)

    def _claims(self, number: int, leg: int) -> list[Any]:
        return [message for message in self.find(Claimed, number) if message.leg == leg]

    async def wait_handed(self, number: int, leg: int = 1) -> Image | None:
        """Wait until a leg was handed over; return its image."""
        handed = lambda: [message for message in self.find(Handed, number) if message.leg == leg]  # noqa: E731
        await until(handed, f"{number} is handed over")
        image: Image | None = handed()[0].image
        return image

    async def wait_refused(self, number: int) -> Refused:
        await until(lambda: self.find(Refused, number), f"{number} is refused")
        refused: Refused = self.find(Refused, number)[0]
        return refused

    async def wait_ended(self, number: int, count: int = 6) -> None:
        """Wait until a request has ended, and check its text."""
        await until(lambda: number in self.ends, f"{number} has ended")
        assert self.tokens[number] == expected_tokens(self._prompts[number], count, self._vocab_size)

    async def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            with contextlib.suppress(StoreError):
                await self.store.create_inbox(self._stream)
                await self.store.beat_owner(self.name, count, 1.5)
            await asyncio.sleep(0.1)

    async def _read(self) -> None:
        while True:
            try:
                found = await self.store.read_inbox(self._stream, b"0", 0.2)
                await self.store.delete_entries(self._stream, [entry_id for entry_id, _ in found])
            except StoreError:
                await asyncio.sleep(0.05)
                continue
            for _, payload in found:
                for message in decode_to_owner(payload):
                    if isinstance(message, Tokens) and message.first_index > len(self.tokens[message.number]):
                        resend = Resend(self.name, message.number, message.leg, 0, len(self.tokens[message.number]))
                        await self.store.send_to_node(message.node, [resend])
                    else:
                        self._take(message)

    def _take(self, message: ToOwner) -> None:
        if not isinstance(message, NodeMessage):
            return
        self.messages.append(message)
        if isinstance(message, Tokens) and message.delta.index == 0:
            known = self.tokens.setdefault(message.number, [])
            new = message.delta.token_ids[len(known) - message.first_index :]
            known += new
            if message.delta.finish_reason is not None:
                self.ends[message.number] = message.delta.finish_reason


class Cluster:
    """Nodes and owners that are closed at the end."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.redis = folder, redis
        self._nodes: list[Node] = []
        self._owners: list[ScriptedOwner] = []
        self._threads: list[EngineThread] = []

    async def node(self, name: str, role: str = "mixed", engine: EngineThread | None = None, **options: Any) -> Node:
        """Start a node; options with `config_` are those of the agent, others those of the mock engine."""
        config = {key.removeprefix("config_"): options.pop(key) for key in [*options] if key.startswith("config_")}
        if engine is None:
            engine = EngineThread(self.folder / name, **options)
            self._threads.append(engine)
        node = Node(name, engine, self.redis, role, **config)
        await node.start()
        self._nodes.append(node)
        return node

    async def owner(self, home: str = "home") -> ScriptedOwner:
        owner = ScriptedOwner(self.redis, home, self._threads[0].engine.vocab_size)
        self._owners.append(owner)
        await owner.start()
        return owner

    async def close(self) -> None:
        for node in self._nodes:
            await node.kill()
        for owner in self._owners:
            await owner.stop()
        for thread in self._threads:
            await asyncio.to_thread(thread.close)

    def is_empty(self) -> bool:
        """Return whether no ticket stands in a queue or is pending."""
        for queue in map(KEYS.queue, Stage):
            if self.redis.execute("XLEN", queue) or self.redis.execute("XPENDING", queue, "nodes")["pending"]:
                return False
        return True


@contextlib.asynccontextmanager
async def cluster(folder: Path, redis: RedisServer) -> AsyncIterator[Cluster]:
    """Return a cluster without nodes on an empty Redis."""
    redis.execute("FLUSHALL")
    made = Cluster(folder, redis)
    try:
        yield made
    finally:
        await made.close()
