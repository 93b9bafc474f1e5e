# SPDX-License-Identifier: Apache-2.0
"""Prefixes are shared only between requests of equal tokens, salt and fingerprint."""

from __future__ import annotations

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.kv_cache.manager import KVCacheManager


def request(prompt: list[int], salt: str = "", **params: int) -> Request:
    source = GenerationRequest("r", prompt, SamplingParams(**params), cache_salt=salt)  # type: ignore[arg-type]
    return Request(source, 0, seed=0, max_total_tokens=64, max_drafts=0)


def compute(kv: KVCacheManager, r: Request, num_tokens: int) -> None:
    assert kv.reserve(r, num_tokens)
    r.num_computed = num_tokens
    kv.commit(r)


def test_prefix_hit_consists_of_full_blocks_and_leaves_one_token_to_compute() -> None:
    kv = KVCacheManager(8, 4, True)
    first = request([1, 2, 3, 4, 5, 6, 7, 8])
    compute(kv, first, 8)
    twin = request([1, 2, 3, 4, 5, 6, 7, 8])
    assert kv.match_prefix(twin) == 4
    assert twin.block_ids == first.block_ids[:1]
    longer = request([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert kv.match_prefix(longer) == 8


def test_a_block_is_published_once_its_last_token_is_computed() -> None:
    kv = KVCacheManager(8, 4, True)
    r = request([1, 2, 3, 4, 5])
    compute(kv, r, 3)
    assert kv.match_prefix(request([1, 2, 3, 4, 5])) == 0
    compute(kv, r, 4)
    assert kv.match_prefix(request([1, 2, 3, 4, 5])) == 4


def test_slots_of_drafts_are_not_published() -> None:
    kv = KVCacheManager(8, 4, True)
    r = request([1, 2, 3])
    compute(kv, r, 3)
    kv.reserve(r, 5)  # two slots of drafts
    kv.commit(r)
    assert kv.match_prefix(request([1, 2, 3, 9, 9])) == 0


def test_another_salt_another_fingerprint_and_prompt_logprobs_have_no_prefix_hits() -> None:
    kv = KVCacheManager(8, 4, True, fingerprint="a")
    compute(kv, request([1, 2, 3, 4, 5], salt="x"), 5)
    assert kv.match_prefix(request([1, 2, 3, 4, 5], salt="y")) == 0
    assert kv.match_prefix(request([1, 2, 3, 4, 5], salt="x", prompt_logprobs=1)) == 0
    assert kv.match_prefix(request([1, 2, 3, 4, 5], salt="x")) == 4
    other = KVCacheManager(8, 4, True, fingerprint="b")
    other.pool = kv.pool
    assert other.match_prefix(request([1, 2, 3, 4, 5], salt="x")) == 0


def test_equal_blocks_after_different_tokens_are_not_shared() -> None:
    kv = KVCacheManager(8, 4, True)
    compute(kv, request([1, 2, 3, 4, 5, 6, 7, 8, 9]), 9)
    assert kv.match_prefix(request([0, 2, 3, 4, 5, 6, 7, 8, 9])) == 0


def test_the_draft_of_a_continued_request_needs_room_too() -> None:
    kv = KVCacheManager(1, 4, True)
    r = request([1, 2, 3])
    assert kv.can_hold(r)
    r.draft = Draft([4], "ngram")
    assert kv.can_hold(r)
    r.draft = Draft([4, 5], "ngram")
    assert not kv.can_hold(r)
