# SPDX-License-Identifier: Apache-2.0
"""Connections to Redis, and the commands that go over them. The only importer of `redis`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis import exceptions
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.maint_notifications import MaintNotificationsConfig

from fastdeploy.config.redis_address import RedisAddress
from fastdeploy.scheduler.redis_errors import (
    ANOTHER_SERVER,
    WRONG_KIND,
    WRONG_PASSWORD,
    StoreError,
    describe_answer,
    describe_silence,
)

Command = tuple[str | bytes | int, ...]
Server = dict[str, Any]
"""Where one server is: host and port, or path, as arguments of a connection."""

_LIBRARY_ERRORS = (exceptions.RedisError, OSError, UnicodeDecodeError)


class RedisClient:
    """Sends commands to the one server that has our keys; used from one event loop.

    Every call has a connection of its own while it runs, so that a read that waits delays nothing. A connection whose
    call has failed, timed out or was cancelled is closed, since answers may still be on their way.

    Attributes:
        num_commands: commands sent so far, MULTI and EXEC included.
    """

    def __init__(self, address: RedisAddress, slot_key: str, timeout_s: float) -> None:
        """Prepare a client; nothing is sent before the first command.

        Args:
            slot_key: any of our keys, to find the server of a Redis Cluster that has them.
            timeout_s: how long a call may take, besides the time that its commands wait.
        """
        self.num_commands = 0
        self._address, self._slot_key, self._timeout_s = address, slot_key, timeout_s
        self._hosts = list(address.hosts)
        self._server: Server | None = None  # None: sentinels or cluster have to be asked
        self._generation = 0  # how often all connections had to be made again
        self._idle: list[tuple[int, AbstractConnection]] = []
        if address.kind == "tcp":
            self._server = dict(zip(("host", "port"), address.hosts[0]))
        elif address.kind == "unix":
            self._server = {"path": address.path}

    async def run(self, *commands: Command, atomic: bool = False, block_s: float = 0.0) -> list[Any]:
        """Send commands at once and return their answers; an answer that is an error is a StoreError in the list.

        Args:
            atomic: as one transaction.
            block_s: how long they wait by themselves.

        Raises:
            StoreError: there is no answer, or one that concerns the whole server or transaction.
        """
        self.num_commands += len(commands) + 2 * atomic
        timeout_s, generation = self._timeout_s + block_s, self._generation
        try:
            async with asyncio.timeout(timeout_s):
                return await self._converse(commands, atomic)
        except TimeoutError:
            error = describe_silence(self._address.shown, None, timeout_s)
        except _LIBRARY_ERRORS as cause:
            error = self._describe(cause)
        except StoreError as cause:
            error = cause
        self._note_wrong_server(error, generation)
        raise error from None

    async def run_all(self, *commands: Command, atomic: bool = False) -> list[Any]:
        """Like `run`, but raise the first error among the answers."""
        generation = self._generation
        answers = await self.run(*commands, atomic=atomic)
        for answer in answers:
            if isinstance(answer, StoreError):
                self._note_wrong_server(answer, generation)
                raise answer
        return answers

    async def run_one(self, *command: str | bytes | int, block_s: float = 0.0) -> Any:
        """Send one command and return its answer; raise StoreError."""
        generation = self._generation
        (answer,) = await self.run(command, block_s=block_s)
        if isinstance(answer, StoreError):
            self._note_wrong_server(answer, generation)
            raise answer
        return answer

    async def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            _, connection = self._idle.pop()
            await connection.disconnect(nowait=True)

    async def _converse(self, commands: Sequence[Command], atomic: bool) -> list[Any]:
        """Send commands and read their answers; close the connection unless all were read."""
        generation, has_read_all = self._generation, False
        sent = [("MULTI",), *commands, ("EXEC",)] if atomic else commands
        connection = await self._take()
        try:
            await connection.connect()
            await connection.send_packed_command(connection.pack_commands(sent), check_health=False)
            answers = [await self._read(connection) for _ in sent]
            has_read_all = True
        finally:
            if has_read_all:
                self._idle.append((generation, connection))
            else:
                await connection.disconnect(nowait=True)
        if not atomic:
            return answers
        *queued, executed = answers
        for answer in (*queued, executed):
            if isinstance(answer, StoreError):
                raise answer
        return [self._describe(one) if isinstance(one, Exception) else one for one in executed]

    async def _read(self, connection: AbstractConnection) -> Any:
        try:
            return await connection.read_response()
        except exceptions.ResponseError as error:
            return self._describe(error)

    async def _take(self) -> AbstractConnection:
        """Return a connection that is not in use; those that the server has closed are dropped."""
        while self._idle:
            generation, connection = self._idle.pop()
            if generation == self._generation and not await _is_spoilt(connection):
                return connection
            await connection.disconnect(nowait=True)
        if self._server is None:
            self._server = await self._locate()
        return self._connection(self._server, db=self._address.db)

    def _connection(self, server: Server, db: int = 0, authenticates: bool = True) -> AbstractConnection:
        address = self._address
        keys: dict[str, Any] = {
            **server,
            "db": db,
            "protocol": address.protocol,
            "socket_timeout": None,  # every call has a timeout as a whole
            "socket_connect_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }
        if authenticates and (address.username or address.password):
            keys |= {"username": address.username or None, "password": address.password}
        if "path" in server:
            return UnixDomainSocketConnection(**keys)
        if not address.tls:
            return Connection(**keys)
        keys |= {"ssl_ca_certs": address.ca or None, "ssl_certfile": address.cert or None}
        return SSLConnection(**keys, ssl_keyfile=address.key or None)

    # Sentinels and clusters.

    async def _locate(self) -> Server:
        """Ask one sentinel or server of the cluster after the other, beginning with the one that answered last."""
        error: StoreError | None = None
        for host, port in list(self._hosts):
            try:
                async with asyncio.timeout(self._timeout_s / 2):
                    return await self._ask(host, port)
            except TimeoutError:
                error = describe_silence(f"{host}:{port}", None, self._timeout_s / 2)
            except _LIBRARY_ERRORS as cause:
                error = self._describe(cause)
            except StoreError as cause:
                error = cause
            self._hosts.append(self._hosts.pop(0))
        assert error is not None, "an address without hosts"
        raise error

    async def _ask(self, host: str, port: int) -> Server:
        if self._address.kind == "cluster":
            slots = await self._ask_one(host, port, True, "CLUSTER", "SLOTS")
            return _find_slot(slots, key_slot(self._slot_key.encode()), host)
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.master)
        try:
            found = await self._ask_one(host, port, False, *question)
        except exceptions.AuthenticationError:
            found = await self._ask_one(host, port, True, *question)
        if not found:
            raise StoreError(f"the sentinel at {host}:{port} has no master named {self._address.master!r}", WRONG_KIND)
        return {"host": found[0].decode(), "port": int(found[1])}

    async def _ask_one(self, host: str, port: int, authenticates: bool, *command: str) -> Any:
        connection = self._connection({"host": host, "port": port}, authenticates=authenticates)
        self.num_commands += 1
        try:
            await connection.connect()
            await connection.send_command(*command, check_health=False)
            return await connection.read_response()
        except exceptions.ResponseError as error:
            if isinstance(error, exceptions.NoPermissionError):
                raise
            raise StoreError(f"{host}:{port} is no {self._address.kind}: {error}", WRONG_KIND) from None
        finally:
            await connection.disconnect(nowait=True)

    def _note_wrong_server(self, error: StoreError, generation: int) -> None:
        """Connect again before the next command, if another server may have taken the place of this one by then."""
        if generation == self._generation and (not error.code or error.code in ANOTHER_SERVER):
            self._generation += 1
            if self._hosts and self._address.kind != "tcp":
                self._server = None

    def _describe(self, error: Exception) -> StoreError:
        """Return what an error of the library means."""
        if isinstance(error.__cause__, exceptions.AuthenticationError):  # without a password, while connecting
            error = error.__cause__
        code = getattr(error, "status_code", None) or ""
        text = str(error)
        if isinstance(error, exceptions.AuthenticationError):
            code = code if code in WRONG_PASSWORD else WRONG_PASSWORD[0]
        elif isinstance(error, exceptions.ResponseError) and not code:
            first = text.partition(" ")[0]
            code = first if first.isupper() else "ERR"
        if not code:
            return describe_silence(self._address.shown, error, self._timeout_s)
        return describe_answer(self._address.shown, code, text)


async def _is_spoilt(connection: AbstractConnection) -> bool:
    """Return whether a connection that is not in use was closed, or has an answer that nobody waits for."""
    try:
        return await connection.can_read()
    except (exceptions.RedisError, OSError):
        return True


def _find_slot(slots: list[Any], slot: int, host: str) -> Server:
    """Return the server that has a slot, by the answer to CLUSTER SLOTS of the server at `host`."""
    for first, last, server, *_ in slots:
        if first <= slot <= last:
            return {"host": server[0].decode() if server[0] else host, "port": int(server[1])}
    raise StoreError(f"the cluster of {host} has no server for our keys", "CLUSTERDOWN")
