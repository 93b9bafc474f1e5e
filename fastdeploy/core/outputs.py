# SPDX-License-Identifier: Apache-2.0
"""Outputs of the engine: the token deltas of each step, and the complete results that the offline `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token_id: the token at this position.
        logprob: its natural-log probability under the target.
        rank: 1 for the most probable token.
        top: (token id, logprob) of the most probable tokens, the most probable first.
        requested: (token id, logprob, rank) of each of `logprob_token_ids`.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)
    requested: list[tuple[int, float, int]] = field(default_factory=list)


@dataclass
class Logprob:
    """Log-probability of one token at one position of an offline result.

    Attributes:
        logprob: its natural-log probability under the target.
        rank: 1 for the most probable token.
        decoded_token: its text; None if the request asks for no text (`detokenize`).
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class SpeculateMetrics:
    """Speculation metrics of one request, with FastDeploy's fields and a few more.

    Attributes:
        accept_ratio: accepted / drafted tokens.
        average_accept_length: emitted tokens / decoding steps.
        accepted_tokens_per_head: [i] number of steps that accepted draft i.
        accept_ratio_per_head: [i] the same, divided by the number of steps that verified a draft i.
        acceptance_histogram: [n] number of steps that accepted n drafts, of the steps with drafts.
        source: number of drafted tokens by source.
    """

    accepted_tokens: int = 0
    rejected_tokens: int = 0
    accept_ratio: float = 0.0
    average_accept_length: float = 0.0
    accepted_tokens_per_head: list[int] = field(default_factory=list)
    accept_ratio_per_head: list[float] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)
    num_steps: int = 0
    drafted_tokens: int = 0
    source: dict[str, int] = field(default_factory=dict)


@dataclass
class RequestMetrics:
    """Times and counts of one choice; times are seconds since the arrival of the request, at a server of its body.

    Attributes:
        queue_s: until its first step was scheduled; None if none was.
        first_token_s: until its first token was emitted; None if none was.
        finish_s: until it ended.
        num_cached_tokens: prompt tokens found in the prefix cache when it was first scheduled.
        num_preemptions: number of times that it was preempted.
        num_attempts: how often it was begun or continued after a loss, the first time included.
        num_transferred_tokens, transfer_s: tokens whose keys and values came from another node, and how long that took.
        node: that ended it; "" without a cluster.
        path: how it came to that node: `redis`, `local`, or `taken_over` by its owner's engine; "" without a cluster.
    """

    queue_s: float | None = None
    first_token_s: float | None = None
    finish_s: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_attempts: int = 1
    num_transferred_tokens: int = 0
    transfer_s: float = 0.0
    node: str = ""
    path: str = ""


@dataclass
class ErrorInfo:
    """Why a request failed; `type` is numerics, no_token, out_of_memory, timeout or internal_error."""

    type: str
    message: str


@dataclass(slots=True)
class TokenDelta:
    """What one step emitted for one choice of a request.

    Attributes:
        request_id, index: the request and which of its n choices.
        token_ids: the emitted tokens in order, up to a stop.
        first_index: of the first of these tokens in the choice's output, resumed tokens included.
        draft_sources: the source of each accepted draft; accepted drafts are the first tokens of their step.
        logprobs: one entry per token, if requested.
        prompt_logprobs: one entry per prompt token (None for the first), in the first delta of the request, if
            requested.
        finish_reason: None while running; stop, length, abort or error.
        stop_reason: the stop string or token id that ended it; None for the model's end token.
        is_complete: with `stop`: the output's grammar is complete, and the last token is part of the text.
        seed: the seed of this choice.
        metrics, speculate_metrics: set with finish_reason.
        error: set when finish_reason is error.
        steps: (number of tokens, sources of the accepted drafts) of each step, if deltas of several steps were merged.
    """

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    draft_sources: list[str] = field(default_factory=list)
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
    first_index: int = 0

    def sources_per_step(self) -> list[tuple[int, list[str]]]:
        """Return (number of tokens, sources of the accepted drafts) of each step that emitted these tokens."""
        return [(len(self.token_ids), self.draft_sources)] if self.steps is None else self.steps

    def sources(self) -> list[str | None]:
        """Return the source of each token that is an accepted draft; None for tokens sampled from the target."""
        return [name for count, names in self.sources_per_step() for name in (*names, *[None] * (count - len(names)))]


@dataclass
class CompletionOutput:
    """One choice of an offline result.

    Attributes:
        logprobs: for each token, token id -> `Logprob`: the token itself, then the most probable ones; None if the
            request asks for none.
        cumulative_logprob: sum of the log-probabilities of the tokens; None if the request asks for none.
        error: set if the finish_reason is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int = 0
    speculate_metrics: SpeculateMetrics | None = None
    error: ErrorInfo | None = None

    def finished(self) -> bool:
        """Return whether the choice has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """Result of one prompt.

    Attributes:
        outputs: [i] choice i.
        prompt_logprobs: for each prompt token, a mapping as in `CompletionOutput.logprobs`, None for the first token;
            None if the request asks for none.
        finished: whether all choices have ended.
        metrics: those of the choice that ended last.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Number of prompt tokens found in the prefix cache; None until a choice has ended."""
        return None if self.metrics is None else self.metrics.num_cached_tokens
