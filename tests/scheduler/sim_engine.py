# SPDX-License-Identifier: Apache-2.0
"""An engine whose texts are a function of the request, for the simulator.

A token is a digest of (seed, choice, index, previous token, salt). The salt is 0 for exact requests, whose text is
therefore known. For the others it is drawn from node and leg: two legs then have different texts, and mixing them shows
as a token that was not computed from the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.scheduler.request_states import Ticket

RunId = tuple[str, int, int]  # owner, number, leg
CHUNK = 4  # prompt tokens per step


@dataclass(frozen=True)
class Text:
    """What a request asks for: `lengths` are tokens per choice."""

    seed: int
    lengths: tuple[int, ...]
    is_exact: bool = True
    is_poison: bool = False
    is_invalid: bool = False
    wants_prompt_logprobs: bool = False

    def token(self, choice: int, index: int, previous: int, salt: int) -> int:
        return hash((self.seed, choice, index, previous, 0 if self.is_exact else salt))

    def answer(self, choice: int) -> list[int]:
        """Return the right tokens of a choice of an exact request."""
        tokens: list[int] = []
        for index in range(self.lengths[choice]):
            tokens.append(self.token(choice, index, tokens[-1] if tokens else 0, 0))
        return tokens


@dataclass
class Run:
    """One leg in an engine; `report` takes its events: a delta with its first index, or a name."""

    client: Any
    ticket: Ticket
    text: Text
    hands_over: bool
    missing: int  # tokens to compute before the first new one
    salt: int
    report: Callable[[Any], None]
    tokens: list[list[int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    has_started: bool = False


@dataclass(frozen=True)
class HandedOver:
    """The engine ended a leg with an image."""


@dataclass(frozen=True)
class Computed:
    """The engine has computed so many tokens."""

    count: int


class SimEngine:
    """Runs legs in steps; `origins` notes of each token what it was computed from."""

    def __init__(self, random: Random, origins: dict[int, tuple[int, int, int, int]]) -> None:
        self.runs: dict[RunId, Run] = {}
        self.num_runs = 0
        self._random = random
        self._origins = origins

    def start(
        self, client: Any, ticket: Ticket, text: Text, hands_over: bool, cached: bool, report: Callable[[Any], None]
    ) -> None:
        """Begin a leg; the context is computed unless it is `cached`."""
        num_tokens = len(ticket.request.prompt_token_ids) + sum(len(tokens or ()) for tokens in ticket.resumed)
        self.num_runs += 1
        run = Run(client, ticket, text, hands_over, 0 if cached else num_tokens, self._random.getrandbits(32), report)
        run.tokens = [list(tokens or ()) for tokens in ticket.resumed]
        run.open = {choice for choice, tokens in enumerate(ticket.resumed) if tokens is not None}
        self.runs[(*ticket.key, ticket.leg)] = run

    def stop(self, run_id: RunId) -> None:
        self.runs.pop(run_id, None)

    def hand_over(self, run_id: RunId) -> None:
        """End a leg with an image, after its first token at the earliest."""
        if run_id in self.runs:
            self.runs[run_id].hands_over = True

    def disconnect(self, client: Any) -> None:
        """End what a client that died had started."""
        self.runs = {run_id: run for run_id, run in self.runs.items() if run.client is not client}

    def find_poison(self) -> Ticket | None:
        """Return the ticket that ends this engine."""
        return next((run.ticket for run in self.runs.values() if run.text.is_poison), None)

    def step(self) -> None:
        """Compute a chunk of each context that is incomplete, and tokens of the others."""
        for run_id, run in [*self.runs.items()]:
            if run.missing > 0:
                run.missing -= CHUNK
                run.report(Computed(-run.missing))
            elif run.hands_over and run.has_started:
                del self.runs[run_id]
                run.report(HandedOver())
            else:
                self._emit(run)
                if not run.open:
                    del self.runs[run_id]

    def _emit(self, run: Run) -> None:
        for choice in [min(run.open)] if run.hands_over else sorted(run.open):
            first, length = len(run.tokens[choice]), run.text.lengths[choice]
            count = min(self._random.randint(1, 3), max(0, length - first)) if not run.hands_over else 1
            for index in range(first, min(first + count, length)):
                previous = run.tokens[choice][-1] if run.tokens[choice] else 0
                token = run.text.token(choice, index, previous, run.salt)
                self._origins[token] = run.text.seed, choice, index, previous
                run.tokens[choice].append(token)
            tokens = run.tokens[choice][first:]
            ends = len(run.tokens[choice]) >= length and (not tokens or self._random.random() < 0.7)
            delta = TokenDelta("", choice, tokens, logprobs=list(tokens))  # type: ignore[arg-type]
            if run.ticket.prompt_logprobs and not run.has_started:
                delta.prompt_logprobs = [None]
            if ends:
                delta.finish_reason = "length"
                run.open.discard(choice)
            run.has_started = True
            run.report((first, delta))
