# SPDX-License-Identifier: Apache-2.0
"""Divides the engine between clients: whose request is next, how much one client may hold, and who is preempted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Sequence

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.errors import InvalidRequestError, QueueFullError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.request import Request, RequestStatus
from fastdeploy.core.stats import ClientLoad
from fastdeploy.kv_cache.manager import KVCacheManager


class Client:
    """The sequences of one client.

    Attributes:
        name: of the API key; empty for an address.
        weight: of its latest request; rows and blocks are divided in proportion to the weights.
        waiting: its waiting sequences, sorted by priority, then by arrival.
        num_running: number of its running sequences.
        served: virtual token counter: the rows that were computed for it, divided by its weight.
    """

    __slots__ = ("client_id", "name", "num_running", "served", "waiting", "weight")

    def __init__(self, client_id: str, name: str) -> None:
        self.client_id, self.name = client_id, name
        self.weight = 1.0
        self.waiting: list[Request] = []
        self.num_running = 0
        self.served = 0.0

    @property
    def num_sequences(self) -> int:
        """Number of its sequences, running and waiting."""
        return self.num_running + len(self.waiting)


class ClientShares:
    """The clients with sequences in the engine.

    Rows are divided by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
    Each client has a counter of the rows that were computed for it, of prompts and of decoding, divided by its weight.
    Of the clients with prompts to compute, that with the smallest counter is next. A client that had none gets at least
    the smallest counter of those that have, so that nobody saves up rows. Once nobody has any, all counters are 0.

    A client holds at most `max_client_share` of the running sequences and of the KV blocks, except that one sequence
    of its own may always run. Blocks that several sequences of a client share count once.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._clients: dict[str, Client] = {}
        self._max_waiting = config.max_waiting_requests
        share = config.max_client_share
        self._share_of_blocks = None if share == 1 else share
        self._max_running = max(1, int((share or 1) * config.max_num_seqs))
        self._max_waiting_of_client = (
            None if self._max_waiting is None else max(1, int((share or 1) * self._max_waiting))
        )
        self.num_waiting = 0

    @property
    def _max_blocks(self) -> int | None:
        """Blocks of the cache, which may become smaller, that one client may hold; None is no limit."""
        share = self._share_of_blocks
        return None if share is None else int(share * self._kv_cache_manager.pool.num_blocks)

    @property
    def has_several(self) -> bool:
        """Whether there is anything to divide."""
        return len(self._clients) > 1

    @property
    def waiting(self) -> list[Request]:
        """The waiting sequences: each client's own in order, one client after the other."""
        return [request for client in self._clients.values() for request in client.waiting]

    def check_room(self, request: GenerationRequest) -> None:
        """Check whether the choices of a request may wait.

        Raises:
            InvalidRequestError: it has more choices than a limit allows in an empty engine.
            QueueFullError: the queue, the client's part of it or the client's number of sequences would exceed a limit.
        """
        client, n = self._clients.get(request.client_id), request.params.n
        num_waiting, num_sequences = (len(client.waiting), client.num_sequences) if client else (0, 0)
        limits = (
            (num_waiting, self._max_waiting_of_client, "requests of this client are waiting"),
            (num_sequences, request.client_max_sequences, "requests of this client are running or waiting"),
            (self.num_waiting, self._max_waiting, "requests are waiting"),
        )
        for _, limit, _ in limits:
            if limit is not None and n > limit:
                raise InvalidRequestError("n", f"expected at most {limit}, the limit of requests, got {n}")
        for count, limit, what in limits:
            if limit is not None and count + n > limit:
                raise QueueFullError(f"{count} {what}; the limit is {limit}")

    def loads(self) -> dict[str, ClientLoad]:
        """Return the sequences of each API key that has any, by its name."""
        loads: dict[str, ClientLoad] = {}
        for client in self._clients.values():
            if client.name and client.num_sequences:
                load = loads.setdefault(client.name, ClientLoad())  # keys of several nodes may have the same name
                load.num_running += client.num_running
                load.num_waiting += len(client.waiting)
        return loads

    def clients_with_prompts(self, begun: Container[str]) -> list[Client]:
        """Return the clients that have waiting sequences, or whose id is in `begun`."""
        return [client for client in self._clients.values() if client.waiting or client.client_id in begun]

    def add(self, request: Request, running: Sequence[Request]) -> None:
        """Add a waiting sequence; `running` are the running sequences of all clients."""
        client = self._clients.get(request.client_id)
        if client is None or not client.waiting:
            client = self._activate(request, running)
        client.weight = request.client_weight
        insort(client.waiting, request, key=priority_key)
        self.num_waiting += 1

    def remove(self, request: Request) -> None:
        """Remove a sequence that ends."""
        client = self._clients[request.client_id]
        if request.status is RequestStatus.WAITING:
            self._take(client, request)
        else:
            client.num_running -= 1

    def start(self, request: Request) -> None:
        """Count a waiting sequence as running."""
        client = self._clients[request.client_id]
        self._take(client, request)
        client.num_running += 1

    def preempt(self, request: Request, running: Sequence[Request]) -> None:
        """Let a running sequence, which is not in `running` any more, wait again."""
        self._clients[request.client_id].num_running -= 1
        self.add(request, running)

    def charge(self, request: Request, num_rows: int) -> None:
        """Count rows that are computed for a sequence."""
        client = self._clients[request.client_id]
        client.served += num_rows / client.weight

    def may_run(self, request: Request) -> bool:
        """Return whether a waiting sequence, whose cached prefix has been matched, fits into its client's share."""
        client, kv_cache = self._clients[request.client_id], self._kv_cache_manager
        if client.num_running >= self._max_running:
            return False
        max_blocks = self._max_blocks
        if max_blocks is None or client.num_running == 0:
            return True
        num_held = kv_cache.num_held(client.client_id)
        return num_held + kv_cache.num_missing(request, request.num_tokens) <= max_blocks

    def may_grow(self, request: Request, num_tokens: int) -> bool:
        """Return whether its client's share allows a running sequence to get blocks for `num_tokens` tokens in all."""
        max_blocks = self._max_blocks
        if max_blocks is None or self._clients[request.client_id].num_running == 1:
            return True
        num_missing = self._kv_cache_manager.num_missing(request, num_tokens)
        return self._kv_cache_manager.num_held(request.client_id) + num_missing <= max_blocks

    def heaviest(self, request: Request) -> str:
        """Return the client that must give up blocks for a running sequence.

        It is the client that holds most blocks in relation to its weight. If several do, the sequence's own is taken.
        """
        own = request.client_id
        if not self.has_several:
            return own
        num_held = self._kv_cache_manager.num_held
        loads = {c.client_id: num_held(c.client_id) / c.weight for c in self._clients.values() if c.num_running}
        return max(loads, key=lambda client_id: (loads[client_id], client_id == own))

    def sort(self, requests: Sequence[Request]) -> list[Request]:
        """Return sequences by the counters of their clients, smallest first; those of one client keep their order."""
        return sorted(requests, key=lambda request: self._clients[request.client_id].served)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise AssertionError unless the counts are those of the queues, and the queues are sorted."""
        num_running: dict[str, int] = {}
        for request in running:
            num_running[request.client_id] = num_running.get(request.client_id, 0) + 1
        assert {c.client_id: c.num_running for c in self._clients.values() if c.num_running} == num_running
        assert self.num_waiting == len(self.waiting)
        for client in self._clients.values():
            assert client.waiting == sorted(client.waiting, key=priority_key)
            assert all(r.client_id == client.client_id and r.status is RequestStatus.WAITING for r in client.waiting)

    def _activate(self, request: Request, running: Sequence[Request]) -> Client:
        """Return a client that gets a waiting sequence, its counter raised to those of the others with prompts left."""
        client_id = request.client_id
        if self._clients.keys() == {client_id}:
            return self._clients[client_id]
        prefilling = {other.client_id for other in running if other.num_pending > 1}
        counters = [c.served for c in self._clients.values() if c.waiting or c.client_id in prefilling]
        smallest = min(counters, default=None)
        self._forget_idle(smallest)
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = Client(client_id, request.client_name)
        if smallest is not None:
            client.served = max(client.served, smallest)
        return client

    def _forget_idle(self, smallest: float | None) -> None:
        """Remove clients without sequences, unless a counter says that others are next; reset the counters if None."""
        for client in list(self._clients.values()):
            if not client.num_sequences and (smallest is None or client.served <= smallest):
                del self._clients[client.client_id]
            elif smallest is None:
                client.served = 0.0

    def _take(self, client: Client, request: Request) -> None:
        index = bisect_left(client.waiting, priority_key(request), key=priority_key)
        assert client.waiting.pop(index) is request
        self.num_waiting -= 1


def priority_key(request: Request) -> tuple[int, int]:
    """Return the sort key of the sequences of one client: lower values are scheduled first."""
    return request.priority, request.arrival_number
