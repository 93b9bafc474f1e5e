# SPDX-License-Identifier: Apache-2.0
"""Prefixes are shared only when every token, the salt and the numerics agree."""

from __future__ import annotations

from fastdeploy.core.request import GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.kv_cache.manager import KVCacheManager


def request(prompt: list[int], salt: str = "", **params: int) -> Request:
    source = GenerationRequest("r", prompt, SamplingParams(**params), cache_salt=salt)  # type: ignore[arg-type]
    return Request(source, 0, seed=0, max_total_tokens=64, max_drafts=0)


def compute(kv: KVCacheManager, r: Request, num_tokens: int) -> None:
    assert kv.reserve(r, num_tokens)
    r.num_computed = num_tokens
    kv.commit(r)


def test_second_request_finds_full_blocks_but_always_computes_one_token() -> None:
    kv = KVCacheManager(8, 4, True)
    first = request([1, 2, 3, 4, 5, 6, 7, 8])
    compute(kv, first, 8)
    twin = request([1, 2, 3, 4, 5, 6, 7, 8])
    assert kv.match_prefix(twin) == 4
    assert twin.block_ids == first.block_ids[:1]
    longer = request([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert kv.match_prefix(longer) == 8


def test_rejected_draft_never_reaches_the_index() -> None:
    kv = KVCacheManager(8, 4, True)
    r = request([1, 2, 3])
    compute(kv, r, 3)
    kv.reserve(r, 5)  # a draft's slots
    kv.commit(r)
    assert kv.match_prefix(request([1, 2, 3, 9, 9])) == 0


def test_other_salt_other_numerics_and_prompt_logprobs_find_nothing() -> None:
    kv = KVCacheManager(8, 4, True, numerics="a")
    compute(kv, request([1, 2, 3, 4, 5], salt="x"), 5)
    assert kv.match_prefix(request([1, 2, 3, 4, 5], salt="y")) == 0
    assert kv.match_prefix(request([1, 2, 3, 4, 5], salt="x", prompt_logprobs=1)) == 0
    assert kv.match_prefix(request([1, 2, 3, 4, 5], salt="x")) == 4
    other = KVCacheManager(8, 4, True, numerics="b")
    other.pool = kv.pool
    assert other.match_prefix(request([1, 2, 3, 4, 5], salt="x")) == 0


def test_block_in_the_middle_needs_the_same_beginning() -> None:
    kv = KVCacheManager(8, 4, True)
    compute(kv, request([1, 2, 3, 4, 5, 6, 7, 8, 9]), 9)
    assert kv.match_prefix(request([0, 2, 3, 4, 5, 6, 7, 8, 9])) == 0
