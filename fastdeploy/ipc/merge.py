# SPDX-License-Identifier: Apache-2.0
"""Merges the deltas of one choice that its reader has not received yet."""

from __future__ import annotations

from fastdeploy.core.outputs import TokenDelta


def merge_deltas(unread: list[TokenDelta], delta: TokenDelta) -> None:
    """Append `delta` to `unread`, or merge it in place into an earlier delta of the same choice."""
    for earlier in unread:
        if (earlier.request_id, earlier.index) == (delta.request_id, delta.index):
            join_delta(earlier, delta)
            return
    unread.append(delta)


def join_tokens(earlier: TokenDelta, token_ids: list[int], draft_sources: list[str]) -> None:
    """Append the tokens of a step to `earlier`, in place: with copies, a long output would take quadratic time."""
    if earlier.steps is None:
        earlier.steps = [(len(earlier.token_ids), list(earlier.draft_sources))]
    earlier.steps.append((len(token_ids), draft_sources))
    earlier.token_ids.extend(token_ids)
    earlier.draft_sources.extend(draft_sources)


def join_delta(earlier: TokenDelta, later: TokenDelta) -> None:
    """Append all of `later` to `earlier`, in place."""
    if later.steps is None:
        join_tokens(earlier, later.token_ids, later.draft_sources)
    else:
        own = [(len(earlier.token_ids), list(earlier.draft_sources))] if earlier.steps is None else earlier.steps
        earlier.steps = [*own, *later.steps]
        earlier.token_ids.extend(later.token_ids)
        earlier.draft_sources.extend(later.draft_sources)
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
