# SPDX-License-Identifier: Apache-2.0
"""Legs of tickets as requests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import KVImage
from fastdeploy.core.outputs import ErrorInfo, TokenDelta
from fastdeploy.scheduler.agent_rooms import Load
from fastdeploy.scheduler.node_events import EngineTokens, Key, RunId
from fastdeploy.scheduler.request_states import Ticket

NUM_STATS = 2  # messages with counters after which one of them includes a new request: the first may be older


@dataclass
class Leg:
    """A leg that the engine runs.

    Attributes:
        open: choices of the engine's request that have not ended.
        has_others: whether other choices of the ticket are open, which only another node will run.
        output: tokens of the first open choice.
        num_stats: counters that were received since it was started.
        num_computed: grows as long as the engine makes progress, until there are tokens.
        handing_s: when the hand-over was decided.
    """

    ticket: Ticket
    request: GenerationRequest
    has_others: bool = False
    open: set[int] = field(default_factory=set)
    output: list[int] = field(default_factory=list)
    num_stats: int = 0
    num_computed: int = 0
    has_tokens: bool = False
    handing_s: float | None = None

    def __post_init__(self) -> None:
        self.open = {index for index, _ in self.request.open_choices}
        self.output = list(self.request.open_choices[0][1])

    @property
    def key(self) -> Key:
        """Return whose request this is."""
        return self.ticket.key

    @property
    def run(self) -> RunId:
        """Return the identity of the ticket."""
        return (*self.ticket.key, self.ticket.leg)

    @property
    def num_context_tokens(self) -> int:
        """Return the number of tokens of the first open choice, prompt included."""
        return len(self.request.prompt_token_ids) + len(self.output)

    @property
    def is_counted(self) -> bool:
        """Return whether the engine's counters include it."""
        return self.has_tokens or self.num_stats >= NUM_STATS

    def note(self, delta: TokenDelta) -> None:
        """Take note of what the engine emitted."""
        self.has_tokens = True
        if delta.index == self.request.open_choices[0][0]:
            self.output += delta.token_ids
        if delta.finish_reason is not None:
            self.open.discard(delta.index)

    def fail(self, message: str) -> list[EngineTokens]:
        """Return the deltas that end all choices of the ticket with an error of this node."""
        error = ErrorInfo("internal_error", message)
        return [
            EngineTokens(
                self.key,
                self.ticket.leg,
                len(tokens),
                TokenDelta("", index, finish_reason="error", error=error, first_index=len(tokens)),
            )
            for index, tokens in enumerate(self.ticket.resumed)
            if tokens is not None
        ]


def make_request(
    ticket: Ticket, hands_over: bool = False, slots: Sequence[int] = (), image: KVImage | None = None
) -> GenerationRequest:
    """Return the engine's request of a ticket; one that hands over runs the first open choice only."""
    request = ticket.engine_request()
    resumed = request.resumed
    if hands_over:
        first = _first_open(ticket)
        resumed = [tokens if index == first else None for index, tokens in enumerate(ticket.resumed)]
    return replace(request, resumed=resumed, hands_over=hands_over, export_slots=list(slots), image=image)


def make_leg(ticket: Ticket, request: GenerationRequest) -> Leg:
    """Return the leg of a request of `make_request`."""
    num_open = sum(tokens is not None for tokens in ticket.resumed)
    return Leg(ticket, request, num_open > len(request.open_choices))


def num_context_tokens(ticket: Ticket) -> int:
    """Return the number of tokens of the first open choice of a ticket, prompt included."""
    return len(ticket.request.prompt_token_ids) + len(ticket.resumed[_first_open(ticket)] or ())


def load_of(ticket: Ticket, hands_over: bool, block_size: int) -> Load:
    """Return what a ticket adds to the engine; nothing is computed of what its image holds."""
    num_seqs = 1 if hands_over else sum(tokens is not None for tokens in ticket.resumed)
    num_tokens = num_context_tokens(ticket)
    return Load(0 if ticket.image is not None else num_tokens, num_seqs, num_blocks(num_tokens, block_size) + num_seqs)


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that so many tokens take."""
    return -(-num_tokens // block_size)


def _first_open(ticket: Ticket) -> int:
    return next(index for index, tokens in enumerate(ticket.resumed) if tokens is not None)
