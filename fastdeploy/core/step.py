# SPDX-License-Identifier: Apache-2.0
"""What an engine step computes, and what it found: B requests, of which each drafts at most K tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.core.request import Draft, Request


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """The rows of one request in a step, which are its tokens from position `num_computed_tokens` on.

        |<------------------ num_scheduled_tokens ------------------->|
                  |<- num_prompt_logprob_rows ->|<- num_verify_rows ->|
                                                 last token and draft

    A frozen dataclass would take ten times as long to make.
    """

    request: Request
    num_scheduled_tokens: int  # rows of this step, >= 1, draft tokens included
    num_computed_tokens: int  # tokens whose keys and values are in the cache before the step
    draft: Draft  # verified in this step; NO_DRAFT if there is none. `request.draft` may be longer
    num_verify_rows: int  # 1 + len(draft); 0 for a prefill chunk that ends before the last token: it emits nothing
    num_prompt_logprob_rows: int = 0  # rows before these whose logits are needed for log-probabilities of the prompt


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """The requests of one step, in the order of their rows."""

    requests: list[ScheduledRequest]  # [B]
    num_admitted: int = 0  # the last ones, which waited until this step

    @property
    def num_scheduled_tokens(self) -> int:
        """Rows of the step."""
        return sum([scheduled.num_scheduled_tokens for scheduled in self.requests])


@dataclass(slots=True)
class RequestResult:
    """The result of a step for one request.

    Attributes:
        token_ids: the accepted drafts, then the bonus token; empty for a prompt chunk. With an error, the tokens of the
            rows before it: accepted drafts only.
        num_accepted: number of accepted drafts.
        logprobs: one entry per token, if requested.
        prompt_logprobs: of the prompt tokens after this step's prompt rows with logits, if requested; else empty.
        error: why no further token could be sampled ("" if none). The request ends with it after `token_ids`, unless
            they hold a stop; other requests are not affected.
        error_type: numerics, or no_token if the request's filters and masks allow none.
        exception: raised while the request's rows were written or read; it ends the request with an internal error.
    """

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    error: str = ""
    error_type: str = "numerics"
    exception: Exception | None = None
