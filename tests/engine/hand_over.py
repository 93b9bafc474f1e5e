# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process, of which one computes prompts or begins texts and the other one continues them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.handover import Handover
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_kv_transfer
from fastdeploy.engine.kv_transfer import KVTransfer
from tests.exactness.engines import Texts, build, config, configured, proposer_of
from tests.exactness.requests import join

NUM_SLOTS = 400
DIGESTS = {"target": "demo", "drafting": "demo draft", "states": "demo"}


Deltas = dict[tuple[str, int], list[TokenDelta]]


@dataclass
class Pair:
    """Two engines and the arena between them.

    Attributes:
        num_slots: of each engine's arena.
        slots: those of each request that is exported, until the second engine has it.
        free_slots: slots of the first engine's arena that are not needed.
        deltas: what the choices of each request have emitted.
    """

    first: Engine
    second: Engine
    num_slots: int = NUM_SLOTS
    slots: dict[str, list[int]] = field(default_factory=dict)
    free_slots: list[int] = field(default_factory=list)
    deltas: Deltas = field(default_factory=dict)
    handovers: list[Handover] = field(default_factory=list)
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    waiting: list[GenerationRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_slots += range(self.num_slots)
        for engine in (self.first, self.second):
            engine.transfer = make_kv_transfer(engine, self.num_slots, DIGESTS)
        self.importing.attach("first", self.exporting.arena)

    @property
    def exporting(self) -> KVTransfer:
        assert self.first.transfer is not None
        return self.first.transfer

    @property
    def importing(self) -> KVTransfer:
        assert self.second.transfer is not None
        return self.second.transfer

    def add(self, request: GenerationRequest, hands_over: bool = True) -> None:
        """Add a request to the first engine: its first choice alone, if it is to be handed over with the prompt."""
        self.requests[request.request_id] = request
        num_blocks = -(-(len(request.prompt_token_ids) + 64) // self.exporting.block_size)
        slots = [self.free_slots.pop() for _ in range(min(num_blocks, len(self.free_slots)))]
        self.slots[request.request_id] = slots
        others = [None] * (request.params.n - 1) if hands_over else [[]] * (request.params.n - 1)
        ticket = replace(request, resumed=[[], *others], hands_over=hands_over, export_slots=slots)
        self.collect(self.first.add_request(ticket))

    def step(self) -> None:
        """Step both engines, pass on what is handed over, and check their integrity."""
        self.collect(self.first.step())
        for handover in self.first.pop_handovers():
            self.handovers.append(handover)
            self.pass_on(handover)
        for ticket in [ticket for ticket in self.waiting if self.is_due(ticket)]:
            self.waiting.remove(ticket)
            self.collect(self.second.add_request(ticket))
            self.release(ticket.request_id)
        self.collect(self.second.step())
        self.first.check_integrity()
        self.second.check_integrity()

    def is_due(self, ticket: GenerationRequest) -> bool:
        """Return whether a prepared request is added in this step."""
        return True

    def pass_on(self, handover: Handover) -> None:
        """Prepare a request in the second engine, and let its blocks arrive."""
        ticket = self.ticket_for(handover)
        prepared = self.second.prepare(ticket)
        if prepared is not None:
            wait([prepared])
        self.waiting.append(ticket)

    def ticket_for(self, handover: Handover) -> GenerationRequest:
        """Return the request that goes on behind what was emitted."""
        request = self.requests[handover.request_id]
        ended = [self.has_ended(request.request_id, index) for index in range(request.params.n)]
        resumed = [
            None if has_ended else tokens or [] for has_ended, tokens in zip(ended, handover.resumed, strict=True)
        ]
        image = handover.image and replace(handover.image, arena="first")
        params = replace(request.params, prompt_logprobs=None) if any(handover.resumed) else request.params
        return replace(request, params=params, resumed=resumed, image=image)

    def release(self, request_id: str) -> None:
        """Let other requests have the slots of this one."""
        self.free_slots += self.slots.pop(request_id, ())

    def has_ended(self, request_id: str, index: int) -> bool:
        deltas = self.deltas.get((request_id, index))
        return bool(deltas) and deltas[-1].finish_reason is not None

    def collect(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            known = self.deltas.setdefault((delta.request_id, delta.index), [])
            assert delta.first_index == sum(len(earlier.token_ids) for earlier in known), "no token twice or missing"
            known.append(delta)
            if delta.index == 0 and delta.finish_reason is not None:
                self.release(delta.request_id)

    def is_busy(self) -> bool:
        transfers = self.exporting.is_moving or self.importing.is_moving
        return self.first.has_unfinished() or self.second.has_unfinished() or transfers or bool(self.waiting)

    def texts(self) -> Texts:
        """Run to the end; return all texts."""
        while self.is_busy():
            self.step()
        for engine in (self.first, self.second):
            stats = engine.stats()
            assert stats.num_free_blocks == stats.num_blocks
        return {key: join(deltas) for key, deltas in self.deltas.items()}


def make_pair(
    plain: Texts,
    prefill: str,
    decode: str,
    chunk: int = 2048,
    num_drafts: int = 3,
    caches_prefixes: bool = True,
    change: Callable[[EngineConfig], EngineConfig] = lambda cfg: cfg,
) -> Pair:
    """Return engines of two methods; `change` is applied to both configurations."""

    def engine(method: str) -> Engine:
        cfg = config(configured(method), num_drafts if method != "naive" else 0, chunk, prefix_caching=caches_prefixes)
        return build(change(cfg), proposer_of(method, plain, num_drafts))

    return Pair(engine(prefill), engine(decode))


def run_moving(pair: Pair, requests: Sequence[GenerationRequest], generator: random.Random) -> Texts:
    """Run requests of which each is handed over after a random number of steps."""
    moments = {request.request_id: generator.randrange(1, 30) for request in requests}
    for request in requests:
        pair.add(request, hands_over=False)
    for step in range(1, 31):
        for request_id, moment in moments.items():
            if moment == step:
                pair.first.hand_over(request_id)
        pair.step()
    return pair.texts()
