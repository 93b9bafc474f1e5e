# SPDX-License-Identifier: Apache-2.0
"""What comes out of the engine: token deltas per step, and the whole results that the offline `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its natural-log probability under the target.
        rank: 1 for the most probable token.
        top: (token id, logprob) of the most probable tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class SpeculateMetrics:
    """How speculation went for one request, in the shape FastDeploy's users know, and a little more.

    `accept_ratio` is accepted / drafted; `average_accept_length` is emitted / steps, over the steps that decode.
    `accepted_tokens_per_head[i]` counts steps whose draft i was kept, `accept_ratio_per_head[i]` divides it by the
    steps that drafted so far. `source` counts drafted tokens per proposer.
    """

    accepted_tokens: int = 0
    rejected_tokens: int = 0
    accept_ratio: float = 0.0
    average_accept_length: float = 0.0
    accepted_tokens_per_head: list[int] = field(default_factory=list)
    accept_ratio_per_head: list[float] = field(default_factory=list)
    num_steps: int = 0
    drafted_tokens: int = 0
    source: dict[str, int] = field(default_factory=dict)


@dataclass
class RequestMetrics:
    """Times and counts of one choice; times are seconds on the engine's clock since the request's arrival.

    Attributes:
        queue_s: until its first step was planned; None if it never was.
        first_token_s: until its first token was emitted; None if it never was.
        finish_s: until it ended.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        num_preemptions: times its blocks were taken away.
    """

    queue_s: float | None = None
    first_token_s: float | None = None
    finish_s: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class ErrorInfo:
    """Why a request ended without its whole text; `type` is numerics, no_token, timeout or internal_error."""

    type: str
    message: str


@dataclass(slots=True)
class TokenDelta:
    """What one step emitted for one choice of a request.

    Attributes:
        request_id, index: the request and which of its n choices.
        token_ids: the tokens emitted in this step, in order, cut after a stop.
        drafted_by: the proposer of each accepted draft; these are the first tokens of their step.
        logprobs: one entry per token, if the request asked.
        prompt_logprobs: one entry per prompt token (None for the first), once, if the request asked.
        finish_reason: None while running; stop, length, abort or error.
        stop_reason: the stop string or token id that ended it; None for the model's end token.
        is_complete: with `stop`: no token ended it but its form; the last token is part of the text.
        seed: the seed of this choice.
        metrics, speculate_metrics: set with finish_reason.
        error: set when finish_reason is error.
        steps: (tokens, proposers of the accepted drafts) of each step, when deltas of several steps were joined.
    """

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    drafted_by: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_complete: bool = False
    seed: int = 0
    metrics: RequestMetrics | None = None
    speculate_metrics: SpeculateMetrics | None = None
    error: ErrorInfo | None = None
    steps: list[tuple[int, list[str]]] | None = None

    def step_origins(self) -> list[tuple[int, list[str]]]:
        """Return (tokens, proposers of the accepted drafts) of each step that emitted these tokens."""
        return [(len(self.token_ids), self.drafted_by)] if self.steps is None else self.steps

    def sources(self) -> list[str | None]:
        """Return for each token the proposer of the accepted draft that it is; None for the target's own."""
        return [name for count, names in self.step_origins() for name in (*names, *[None] * (count - len(names)))]


@dataclass
class CompletionOutput:
    """One choice of an offline result; `error` says why a choice with finish_reason "error" has no whole text."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int = 0
    speculate_metrics: SpeculateMetrics | None = None
    error: ErrorInfo | None = None


@dataclass
class RequestOutput:
    """Result of one prompt: `outputs[i]` is choice i, `metrics` those of the choice that ended last."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None
