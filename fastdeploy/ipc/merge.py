# SPDX-License-Identifier: Apache-2.0
"""Joins deltas of one choice that nobody has read yet."""

from __future__ import annotations

from fastdeploy.core.outputs import TokenDelta


def merge_deltas(waiting: list[TokenDelta], delta: TokenDelta) -> None:
    """Append `delta` to `waiting`, or join it to an earlier delta of the same choice, which it changes then."""
    for earlier in waiting:
        if (earlier.request_id, earlier.index) == (delta.request_id, delta.index):
            _join(earlier, delta)
            return
    waiting.append(delta)


def _join(earlier: TokenDelta, later: TokenDelta) -> None:
    """Extend `earlier` in place: a copy per step would make a long text cost its square."""
    if earlier.steps is None:
        earlier.steps = earlier.step_counts()
    earlier.steps.extend(later.step_counts())
    earlier.token_ids.extend(later.token_ids)
    earlier.num_accepted_drafts += later.num_accepted_drafts
    if later.logprobs is not None:
        if earlier.logprobs is None:
            earlier.logprobs = []
        earlier.logprobs.extend(later.logprobs)
    if later.prompt_logprobs is not None:
        earlier.prompt_logprobs = later.prompt_logprobs
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
    earlier.is_complete = later.is_complete
    earlier.seed = later.seed
    earlier.metrics = later.metrics
    earlier.speculate_metrics = later.speculate_metrics
    earlier.error = later.error
