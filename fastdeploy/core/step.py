# SPDX-License-Identifier: Apache-2.0
"""What one engine step is to do, and what it did. B requests are planned; K is the most drafts of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.core.request import Request


@dataclass(slots=True)
class StepPlan:
    """One step over B requests; entry b of every list speaks of requests[b].

    Rows of request b are its tokens num_computed[b] .. num_computed[b] + num_scheduled[b] - 1, drafts last.
    A request whose rows end before its last token (a prompt chunk) emits nothing: num_verify_rows is 0. The last
    `num_admitted` requests waited until now.
    """

    requests: list[Request] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)  # [B] rows of this step, >= 1
    num_computed: list[int] = field(default_factory=list)  # [B] tokens already in the cache
    num_drafts: list[int] = field(default_factory=list)  # [B] drafts among the rows
    num_verify_rows: list[int] = field(default_factory=list)  # [B] 1 + num_drafts if the rows reach the end, else 0
    num_prompt_rows: list[int] = field(default_factory=list)  # [B] more rows with logits, for prompt log-probabilities
    num_admitted: int = 0


@dataclass(slots=True)
class RequestResult:
    """What a step chose for one request.

    Attributes:
        token_ids: the accepted drafts, then the bonus token; empty for a prompt chunk. With an error, the tokens of the
            rows before it: accepted drafts only.
        num_accepted: drafts accepted.
        logprobs: one entry per token if the request asked.
        prompt_logprobs: of the tokens that follow this step's prompt rows, if the request asked; empty otherwise.
        error: why no further token could be sampled ("" if none). The request ends with it after `token_ids`, unless
            they hold a stop; other requests are not affected.
        error_type: numerics, or no_token where the request's own filters and masks leave none.
        fault: what was raised while the request's rows were prepared; the request fails with an internal error.
    """

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    error: str = ""
    error_type: str = "numerics"
    fault: Exception | None = None
