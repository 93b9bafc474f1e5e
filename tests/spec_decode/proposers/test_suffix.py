# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding drafts from cached outputs of the same cache salt, and counts drafts by the kind of match."""

from __future__ import annotations

import pytest

from fastdeploy.core.request import DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.ops.suffix_cache import SuffixConfig
from fastdeploy.spec_decode.proposers import match_proposer
from fastdeploy.spec_decode.proposers.suffix import SuffixProposer


def finish_with(proposer: SuffixProposer, index: int, salt: str, output: list[int]) -> None:
    request = Request(GenerationRequest("a", [90], SamplingParams(), cache_salt=salt), index, 0, 100, 8)
    proposer.start(request)
    request.append(output)
    proposer.finish(request)


def draft(proposer: SuffixProposer, salt: str, prompt: list[int]) -> list[int]:
    request = Request(GenerationRequest("b", prompt, SamplingParams(), cache_salt=salt), 0, 0, 100, 8)
    proposer.start(request)
    drafted = proposer.propose([request], [DraftQuota(8, 8)])[0].token_ids
    proposer.finish(request)
    return [int(token) for token in drafted]


def test_cached_outputs_are_used_by_requests_of_the_same_salt_only() -> None:
    proposer = SuffixProposer(SuffixConfig(max_cache_bytes=1 << 20))
    finish_with(proposer, 0, "key of alice", [1, 2, 3, 4, 5, 6])
    finish_with(proposer, 1, "key of bob", [1, 2, 3, 7, 8, 9])
    assert draft(proposer, "key of alice", [50, 1, 2, 3]) == [4, 5, 6]
    assert draft(proposer, "key of bob", [50, 1, 2, 3]) == [7, 8, 9]
    assert draft(proposer, "", [50, 1, 2, 3]) == []
    proposer.check_integrity([])


def test_stats_count_drafts_from_the_context_and_from_cached_outputs_separately() -> None:
    proposer = SuffixProposer(SuffixConfig(max_cache_bytes=1 << 20))
    finish_with(proposer, 0, "s", [1, 2, 3, 4, 5, 6])
    draft(proposer, "s", [50, 1, 2, 3])
    draft(proposer, "s", [7, 8, 9, 7, 8])
    draft(proposer, "s", [60, 61])
    stats = proposer.suffix_cache_stats()
    assert (stats.num_own_drafts, stats.num_shared_drafts, stats.num_evicted_outputs) == (1, 1, 0)
    assert (stats.num_outputs, stats.num_tokens, stats.live_bytes < stats.shared_bytes) == (1, 6, True)


def test_a_request_that_waits_needs_no_memory_in_the_index() -> None:
    proposer = SuffixProposer(SuffixConfig(max_cache_bytes=1 << 20))
    before = proposer.suffix_cache_stats()
    requests = [Request(GenerationRequest("a", [1, 2] * 500, SamplingParams()), i, 0, 2000, 8) for i in range(100)]
    for request in requests:
        proposer.start(request)
    assert proposer.suffix_cache_stats() == before
    proposer.check_integrity(requests)
    for request in requests:
        proposer.finish(request)
    assert proposer.suffix_cache_stats() == before, "none had an output to keep"
    proposer.check_integrity([])


def test_a_step_indexes_a_limited_number_of_prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_proposer, "MAX_PROMPT_TOKENS", 8)
    proposer = SuffixProposer(SuffixConfig(max_cache_bytes=1 << 20))
    prompt = [1, 2, 3, 1, 2]
    requests = [Request(GenerationRequest("a", prompt, SamplingParams()), i, 0, 100, 8) for i in range(5)]
    for request in requests:
        proposer.start(request)
        request.append([3])
    has_draft = [[len(d) > 0 for d in proposer.propose(requests, [DraftQuota(2, 2)] * 5)] for _ in range(3)]
    assert has_draft == [[True, True, False, False, False], [True, True, True, True, False], [True] * 5]
    for request in requests:
        proposer.finish(request)
    proposer.check_integrity([])
