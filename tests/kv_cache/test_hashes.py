# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.request import Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.kv_cache.hashes import hash_blocks
from fastdeploy.kv_cache.manager import KVCacheManager


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hash_blocks("f", "", [7] * count, 4)) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_depends_on_all_tokens_before_and_on_seed_and_salt() -> None:
    first, second = hash_blocks("f", "s", [1, 2, 3, 4], 2)
    assert hash_blocks("f", "s", [1, 2, 3, 5], 2)[0] == first
    others = [("f", "s", [1, 5, 3, 4]), ("f", "s", [1, 2, 3, 5]), ("g", "s", [1, 2, 3, 4]), ("f", "t", [1, 2, 3, 4])]
    assert second not in [hash_blocks(*other, 2)[1] for other in others]


def test_the_cache_manager_uses_the_same_hashes() -> None:
    manager = KVCacheManager(8, 16, True, fingerprint="f")
    request = Request(GenerationRequest("r", list(range(40)), SamplingParams(), cache_salt="s"), 0, 0, 64, 0)
    manager.match_prefix(request)
    assert request.block_hashes == hash_blocks("f", "s", range(40), 16)
