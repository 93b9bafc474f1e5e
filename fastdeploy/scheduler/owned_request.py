# SPDX-License-Identifier: Apache-2.0
"""One request as its owner keeps it: what was delivered, the present leg, and who runs it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.scheduler.request_states import Image, NodeMessage, Stage, Ticket


class OwnedState(Enum):
    """The states of the diagram in `request_states.py`; a request that has ended is no longer kept."""

    WAITING = auto()
    QUEUED = auto()
    RUNNING = auto()
    LOCAL = auto()


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who runs a leg; deltas of the owner's own engine come from `LOCAL_CLAIMANT`."""

    node: str
    incarnation: int


LOCAL_CLAIMANT = Claimant("", 0)


@dataclass
class OwnedRequest:
    """A request in flight.

    Attributes:
        arrived_at, started_at, progress_at: times of arrival, of the first claim, and of the last progress of any leg.
        deadline: when it ends with a timeout; None never.
        hint: the node that alone may claim its ticket for a while; "" any.
        leg: number of the present leg; 0 before the first.
        leg_at, leg_progress_at: when the present leg was queued, and its last progress.
        num_entries: how often its ticket was written for this leg.
        last_audit: the number of audits begun before its ticket was last written.
        claimant, claim_seq, claimed_at: who runs the present leg, and the message that said so and its arrival.
        resend_at: when tokens were last asked for again.
        num_computed: what its claimant last said to have computed.
        tokens: per choice, what was delivered; `ended`: whether its last delta was.
        leg_has_tokens: whether the present leg delivered any.
        image, image_seq, image_at: computed blocks for the present leg, the message that brought them, its arrival.
        num_cached_tokens: prompt tokens that the first leg which was handed over found cached; None before.
        losses: why each lost leg was lost.
        num_attempts: the losses of legs that delivered no token.
    """

    number: int
    request: GenerationRequest
    arrived_at: float
    stage: Stage
    hint: str
    state: OwnedState = OwnedState.WAITING
    deadline: float | None = None
    started_at: float | None = None
    progress_at: float = 0.0
    leg: int = 0
    leg_at: float = 0.0
    leg_progress_at: float = 0.0
    num_entries: int = 0
    last_audit: int = 0
    claimant: Claimant | None = None
    claim_seq: int = 0
    claimed_at: float = 0.0
    resend_at: float | None = None
    num_computed: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    needs_prompt_logprobs: bool = False
    leg_has_tokens: bool = False
    image: Image | None = None
    image_seq: int = 0
    image_at: float = 0.0
    num_cached_tokens: int | None = None
    losses: list[str] = field(default_factory=list)
    num_attempts: int = 0

    def __post_init__(self) -> None:
        params = self.request.params
        self.progress_at = self.arrived_at
        self.tokens = [[] for _ in range(params.n)]
        self.ended = [False] * params.n
        self.needs_prompt_logprobs = params.prompt_logprobs is not None
        if self.request.timeout_s is not None:
            self.deadline = self.arrived_at + self.request.timeout_s

    @property
    def has_tokens(self) -> bool:
        """Return whether anything was delivered."""
        return any(self.tokens) or any(self.ended)

    @property
    def path(self) -> str:
        """Return which way the request took: `redis`, `local` or `taken_over`; "" if no leg has begun."""
        if self.leg == 0:
            return ""
        if self.claimant != LOCAL_CLAIMANT:
            return "redis"
        return "local" if self.leg == 1 else "taken_over"

    def is_current(self, message: NodeMessage) -> bool:
        """Return whether a message comes from the present claimant of the present leg."""
        return message.leg == self.leg and Claimant(message.node, message.incarnation) == self.claimant

    def is_unclaimed(self, leg: int) -> bool:
        """Return whether this is the present leg and its ticket stands in a queue."""
        return leg == self.leg and self.state is OwnedState.QUEUED

    def made(self, message_leg: int, node: str, incarnation: int) -> bool:
        """Return whether the image for the present leg was made by that leg of that node."""
        image = self.image
        return image is not None and (image.leg, image.node, image.incarnation) == (message_leg, node, incarnation)

    def begin_leg(self, now: float) -> None:
        """Begin the next leg, which nobody has claimed."""
        self.leg += 1
        self.leg_at = self.leg_progress_at = now
        self.num_entries = 0
        self.claimant = None
        self.resend_at = None
        self.num_computed = 0
        self.leg_has_tokens = False

    def note_start(self, now: float) -> None:
        """Note the first time that an engine got the request."""
        if self.started_at is None:
            self.started_at = now

    def note_progress(self, now: float) -> None:
        """Restart the clocks that end a leg or the request without progress."""
        self.progress_at = self.leg_progress_at = now

    def resumed(self) -> list[list[int] | None]:
        """Return per choice the delivered tokens; None if it has ended."""
        return [None if ended else list(tokens) for tokens, ended in zip(self.tokens, self.ended)]

    def ticket(self, owner: str, now: float) -> Ticket:
        """Return the ticket of the present leg."""
        return Ticket(
            owner=owner,
            number=self.number,
            leg=self.leg,
            stage=self.stage,
            request=self.request,
            resumed=self.resumed(),
            num_attempts=self.num_attempts,
            prompt_logprobs=self.needs_prompt_logprobs,
            timeout_s=None if self.deadline is None else self.deadline - now,
            image=self.image,
        )

    def accept(self, first_index: int, delta: TokenDelta) -> TokenDelta | None:
        """Note and return what a delta without gap adds to its choice; None if nothing."""
        tokens = self.tokens[delta.index]
        if self.ended[delta.index]:
            return None
        new = cut_delta(delta, len(tokens) - first_index)
        if not self.needs_prompt_logprobs:
            new = replace(new, prompt_logprobs=None) if new.prompt_logprobs is not None else new
        if not (new.token_ids or new.finish_reason or new.prompt_logprobs):
            return None
        self.needs_prompt_logprobs &= new.prompt_logprobs is None
        self.leg_has_tokens = True
        tokens.extend(new.token_ids)
        self.ended[delta.index] = new.finish_reason is not None
        return new


def cut_delta(delta: TokenDelta, count: int) -> TokenDelta:
    """Return a delta without its first `count` tokens, their log-probabilities and draft sources."""
    if count <= 0:
        return delta
    steps, left = [], count
    for num_tokens, sources in delta.sources_per_step():
        if left < num_tokens:
            steps.append((num_tokens - left, sources[left:]))
        left = max(0, left - num_tokens)
    return replace(
        delta,
        token_ids=delta.token_ids[count:],
        logprobs=delta.logprobs[count:] if delta.logprobs is not None else None,
        draft_sources=[name for _, sources in steps for name in sources],
        steps=steps if delta.steps is not None else None,
    )
