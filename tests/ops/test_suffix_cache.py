# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding by small examples: salts, eviction, edits, limits, refused arguments."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.ops.suffix_cache import SuffixCache, SuffixConfig
from tests.ops.suffix_oracle import ExpectedText, assert_drafts, share
from tests.ops.text_batches import extend_batch, propose_batch

LARGE_PAGE = 1 << 16  # nodes


def draft(cache: SuffixCache, slot: int, cap: int = 16) -> list[int]:
    return propose_batch(cache, [slot], [cap]).proposals()[0][0]


def test_outputs_of_another_salt_are_never_used() -> None:
    cache = SuffixCache(SuffixConfig())
    share(cache, [1, 2, 3, 4, 5, 6], salt="theirs")
    cache.start(0, "mine", [9, 1, 2, 3])
    cache.start(1, "theirs", [9, 1, 2, 3])
    cache.start(2, "", [9, 1, 2, 3])
    assert [draft(cache, slot) for slot in range(3)] == [[], [4, 5, 6], []]


def test_nodes_of_an_evicted_output_are_reused_for_another_salt() -> None:
    cache, random = SuffixCache(SuffixConfig(max_cached_requests=2)), np.random.default_rng(5)
    texts = {salt: random.integers(0, 3, 40).tolist() for salt in "abcdefgh"}
    num_nodes = []
    for salt, text in [*texts.items()] * 5:
        share(cache, text, salt)
        cache.flush()
        num_nodes.append(cache.usage().num_nodes)
        cache.start(0, salt, text[:20])
        expected = ExpectedText(SuffixConfig(), text[:20], text).expected([text], 16)
        assert_drafts(propose_batch(cache, [0], [16]), [expected])
        cache.finish(0, [])
    assert max(num_nodes[-8:]) == max(num_nodes[8:16])


def test_the_more_frequent_continuation_wins_and_ends_where_it_is_too_rare() -> None:
    cache = SuffixCache(SuffixConfig(min_token_prob=0.4, max_spec_factor=4))
    for output in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 7]):
        share(cache, output)
    cache.start(0, "", [1])
    assert draft(cache, 0, 8) == [2, 3]  # 3/4, 3/4, then 1/4


def test_the_text_itself_wins_a_tie_and_loses_to_an_output_of_higher_score() -> None:
    cache = SuffixCache(SuffixConfig())
    share(cache, [1, 2, 3, 8, 8])
    cache.start(0, "", [1, 2, 3, 9, 9, 1, 2, 3])
    cache.start(1, "", [3, 9, 3, 7, 1, 2, 3])
    drafts = propose_batch(cache, [0, 1], [2, 2])
    assert drafts.proposals() == [([9, 9], 3), ([8, 8], 3)]
    assert drafts.num_shared() == 1
    drafts.fill([0], [2], [np.empty(0, np.int32)])
    cache.draft_batch(drafts)
    assert drafts.num_shared() == 0


def test_a_repetition_continues_beyond_the_end_of_the_text() -> None:
    cache = SuffixCache(SuffixConfig())
    cache.start(0, "", [1, 2, 3] * 4)
    assert draft(cache, 0, 9) == [1, 2, 3, 1, 2, 3, 1, 2, 3]


SOURCE = list(range(100, 160))  # no token twice


@pytest.mark.parametrize(
    ("edit", "back"),
    [([7, 8, 9], 125), ([], 121), ([7, 8], 118)],
    ids=["tokens replaced", "a token deleted", "tokens inserted"],
)
def test_two_tokens_find_where_copying_continues_after_an_edit(edit: list[int], back: int) -> None:
    cache = SuffixCache(SuffixConfig())
    share(cache, [1, 2, *SOURCE])
    cache.start(0, "", [50])
    cache.flush()
    extend_batch(cache, [0], [SOURCE[:20]])  # 100 .. 119
    assert draft(cache, 0) == SOURCE[20:36]
    extend_batch(cache, [0], [edit])
    extend_batch(cache, [0], [[back]])
    assert len(draft(cache, 0)) == 1  # one token is an ordinary match
    extend_batch(cache, [0], [[back + 1]])
    drafts = propose_batch(cache, [0], [16])
    assert drafts.proposals() == [(list(range(back + 2, back + 14)), 2)]  # 20 / 2 + 2 tokens
    assert drafts.num_shared() == 1


def test_an_output_that_starts_like_the_latest_one_is_drafted_after_two_tokens() -> None:
    cache = SuffixCache(SuffixConfig(max_cached_requests=1))
    share(cache, SOURCE, "mine")
    for slot, salt in enumerate(["mine", "theirs"]):
        cache.start(slot, salt, [50])
        extend_batch(cache, [slot], [SOURCE[:2]])
    assert [len(draft(cache, slot)) for slot in range(2)] == [16, 0]
    share(cache, [60], "theirs")  # evicts the first output
    cache.flush()
    cache.start(2, "mine", [50])
    extend_batch(cache, [2], [SOURCE[:2]])
    assert draft(cache, 2) == []


def test_drafts_of_at_most_one_token_are_possible() -> None:
    cache = SuffixCache(SuffixConfig(max_drafts=1))
    cache.start(0, "", [1, 2, 3, 1, 2])
    assert draft(cache, 0, 1) == [3]
    assert draft(cache, 0, 0) == []
    assert draft(cache, 0, -1) == []
    assert len(propose_batch(cache, [], [])) == 0


def test_nothing_is_cached_when_max_cached_requests_is_0() -> None:
    cache = SuffixCache(SuffixConfig(max_cached_requests=0))
    share(cache, [1, 2, 3, 4, 5, 6])
    cache.start(0, "", [9, 1, 2, 3])
    assert draft(cache, 0) == []
    assert cache.usage().num_tokens == 0


def test_whole_outputs_are_evicted_from_the_oldest_on() -> None:
    cache, random = SuffixCache(SuffixConfig(max_cache_bytes=1 << 20)), np.random.default_rng(0)
    outputs = [random.integers(0, 5000, 300).tolist() for _ in range(120)]
    for output in outputs:
        share(cache, output)
        cache.flush()
        assert cache.usage().shared_bytes <= 1 << 20
    usage = cache.usage()
    assert 20 < usage.num_outputs < 120
    assert usage.num_tokens == 300 * usage.num_outputs
    for slot, output in enumerate(outputs):
        cache.start(slot, "", output[:10])
    first_kept = len(outputs) - usage.num_outputs
    found = [draft(cache, slot, 8) == output[10:18] for slot, output in enumerate(outputs)]
    assert found == [False] * first_kept + [True] * usage.num_outputs
    cache.check_integrity()


def test_nodes_on_a_second_large_page_are_found_and_removed() -> None:
    cache = SuffixCache(SuffixConfig(max_cached_requests=8, max_cache_bytes=64 << 20))
    random = np.random.default_rng(0)
    outputs = [random.integers(0, 5000, 10_000).tolist() for _ in range(8)]
    for slot, output in enumerate(outputs):
        share(cache, output)
        cache.start(100 + slot, "", output[4000:4010])

    def is_drafted() -> list[bool]:
        return [draft(cache, 100 + slot, 8) == output[4010:4018] for slot, output in enumerate(outputs)]

    cache.flush()
    assert cache.usage().num_nodes > LARGE_PAGE
    assert is_drafted() == [True] * 8
    cache.check_integrity()
    for _ in range(7):
        share(cache, [5000])
    cache.flush()
    assert cache.usage().num_nodes < LARGE_PAGE
    assert is_drafted() == [False] * 7 + [True]
    cache.check_integrity()


def test_an_output_larger_than_the_cache_is_not_cached() -> None:
    cache = SuffixCache(SuffixConfig(max_cache_bytes=1 << 20))
    share(cache, [1, 2, 3])
    share(cache, list(range(100_000)))
    assert cache.usage().num_outputs == 1


def test_a_long_output_is_inserted_and_evicted_in_pieces() -> None:
    cache = SuffixCache(SuffixConfig(max_cached_requests=1))
    text = np.random.default_rng(0).integers(0, 20, 9000).tolist()
    share(cache, text)
    waiting = [cache.usage().num_waiting_tokens]
    cache.start(0, "", [1])
    while cache.usage().num_waiting_tokens:
        extend_batch(cache, [0], [[1]])
        waiting.append(cache.usage().num_waiting_tokens)
    assert 0 < max(np.diff(waiting) * -1) <= 1024
    cache.check_integrity()
    cache.finish(0, [5, 5, 5])
    cache.check_integrity()
    assert cache.usage().num_outputs == 2  # the long one is being evicted
    cache.flush()
    assert cache.usage()[2:] == (1, 3, 0, cache.usage().num_nodes, 1)


def test_finishing_a_request_inserts_nothing_and_the_next_start_does() -> None:
    cache = SuffixCache(SuffixConfig())
    cache.start(0, "", [1])
    for number in range(2):
        cache.start(9, "", [])
        cache.finish(9, list(range(200)))
        assert cache.usage().num_waiting_tokens == 200, number
    cache.start(1, "", [5, 6, 7])
    assert cache.usage().num_waiting_tokens == 0
    assert draft(cache, 1, 3) == [8, 9, 10]


def test_bytes_per_token_are_bounded_and_freed() -> None:
    rng = np.random.default_rng(1)
    words = [rng.integers(0, 4096, rng.integers(1, 6)).tolist() for _ in range(2000)]
    text = [token for word in rng.zipf(1.3, 30_000) for token in words[word % 2000]][:50_000]
    cache = SuffixCache(SuffixConfig(max_cached_requests=0))
    empty = cache.usage().live_bytes
    cache.start(0, "", text)
    assert cache.usage().live_bytes <= 64 * len(text)
    cache.finish(0, [])
    assert cache.usage().live_bytes <= empty + 1024


def test_invalid_slots_lengths_and_tokens_are_refused_by_name() -> None:
    cache = SuffixCache(SuffixConfig())
    cache.start(0, "", [1, 2])
    with pytest.raises(ValueError, match="not in use, got 0"):
        cache.start(0, "", [1])
    with pytest.raises(ValueError, match="live slots, got 4"):
        extend_batch(cache, [0, 4], [[1], [2]])
    with pytest.raises(ValueError, match="live slots, got 7"):
        propose_batch(cache, [7], [1])
    with pytest.raises(ValueError, match="expected 1 caps and 1 arrays of tokens, got 2 and 1"):
        propose_batch(cache, [0], [1, 2])
    with pytest.raises(ValueError, match="live slot, got 1"):
        cache.finish(1, [])
    for token in (-1, 1 << 24):
        with pytest.raises(ValueError, match=r"\[0, 2\*\*24\)"):
            cache.start(5, "", [token])
    with pytest.raises(ValueError, match="max_tree_depth"):
        SuffixConfig(max_tree_depth=1)
    with pytest.raises(ValueError, match="max_cache_bytes"):
        SuffixConfig(max_cache_bytes=5)
