# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding drafts what a search through whole texts finds, for any history of requests."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastdeploy.ops.suffix_cache import SuffixCache, SuffixConfig
from tests.ops.suffix_oracle import ExpectedText, assert_drafts, share
from tests.ops.text_batches import extend_batch, propose_batch

CONFIGS = st.builds(
    SuffixConfig,
    max_tree_depth=st.sampled_from([2, 3, 6, 9, 64]),
    max_drafts=st.sampled_from([1, 3, 5, 16]),
    max_spec_factor=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]),
    max_cache_bytes=st.just(1 << 20),
)
TOKENS = st.lists(st.integers(0, 49), max_size=14)


def folded(tokens: list[int], alphabet: int) -> list[int]:
    return [token % alphabet for token in tokens]


@settings(max_examples=400)
@given(
    config=CONFIGS,
    alphabet=st.sampled_from([1, 2, 3, 50]),
    outputs=st.lists(TOKENS, max_size=6),
    pieces=st.lists(TOKENS, min_size=1, max_size=10),
    cap=st.integers(1, 16),
)
def test_drafts_are_what_a_search_through_all_texts_finds(
    config: SuffixConfig, alphabet: int, outputs: list[list[int]], pieces: list[list[int]], cap: int
) -> None:
    cache = SuffixCache(config)
    outputs = [folded(output, alphabet) for output in outputs if output]
    expected_text = ExpectedText(config, [], outputs[-1] if outputs else None)
    for output in outputs:
        cache.start(0, "salt", [1])
        cache.finish(0, output)
    for number, piece in enumerate(pieces):
        piece = folded(piece, alphabet)
        if number == 0:
            expected_text.text = list(piece)
            cache.start(3, "salt", piece)
        else:
            expected_text.extend(piece)
            extend_batch(cache, [3], [piece])
        assert_drafts(propose_batch(cache, [3], [cap]), [expected_text.expected(outputs, cap)])
    cache.check_integrity()


EDITS = st.lists(
    st.tuples(st.sampled_from(["replace", "insert", "delete"]), st.integers(0, 120), st.integers(1, 12)), max_size=4
)


def with_edits(tokens: list[int], edits: list[tuple[str, int, int]], random: np.random.Generator) -> list[int]:
    for kind, at, size in edits:
        new = [] if kind == "delete" else random.integers(0, 8, size).tolist()
        tokens = tokens[:at] + new + tokens[at if kind == "insert" else at + size :]
    return tokens


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    edits=EDITS,
    is_own=st.booleans(),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    tail=st.integers(0, 16),
    config=st.builds(
        SuffixConfig, max_spec_factor=st.sampled_from([0.25, 1.0]), min_token_prob=st.sampled_from([0.1, 0.8])
    ),
)
def test_copies_with_edits_are_drafted_as_a_search_through_all_texts_says(
    seed: int, edits: list[tuple[str, int, int]], is_own: bool, steps: list[int], tail: int, config: SuffixConfig
) -> None:
    random = np.random.default_rng(seed)
    original, cache = random.integers(0, 8, 120).tolist(), SuffixCache(config)
    outputs = [random.integers(0, 8, 30).tolist(), original, random.integers(0, 8, 20).tolist()][: 1 if is_own else 3]
    for output in outputs:
        share(cache, output)
    prompt = [*original, 9] if is_own else [9]
    cache.start(0, "", prompt)
    cache.flush()
    expected_text, rest = ExpectedText(config, prompt, outputs[-1]), with_edits(original, edits, random)
    for step in steps:
        added, rest = rest[:step], rest[step:]
        expected_text.extend(added)
        extend_batch(cache, [0], [added])
        assert_drafts(propose_batch(cache, [0], [16]), [expected_text.expected(outputs, 16)])
        ahead = rest[:tail]
        found = propose_batch(cache, [0], [8], [np.array(ahead, np.int32)])
        assert_drafts(found, [expected_text.expected(outputs, 8, ahead or None)])


@settings(max_examples=80)
@example(seed=7479126, keep=0, alphabet=2)  # three thirds against a one
@given(seed=st.integers(0, 2**32 - 1), keep=st.integers(-1, 4), alphabet=st.sampled_from([1, 2, 4]))
def test_any_history_of_requests_leaves_correct_counts(seed: int, keep: int, alphabet: int) -> None:
    random = np.random.default_rng(seed)
    config = SuffixConfig(max_tree_depth=6, max_drafts=3, max_cached_requests=keep, max_cache_bytes=1 << 20)
    cache = SuffixCache(config)
    live: dict[int, tuple[str, ExpectedText, int]] = {}  # salt, text, length of its prompt
    outputs: list[tuple[str, list[int]]] = []
    for _ in range(50):
        slot, tokens = int(random.integers(4)), random.integers(0, alphabet, random.integers(0, 20)).tolist()
        if slot not in live:
            salt = str(random.integers(2))
            newest = next((output for owner, output in reversed(outputs) if owner == salt), None)
            live[slot] = (salt, ExpectedText(config, tokens, newest), len(tokens))
            cache.start(slot, salt, tokens)
        elif random.random() < 0.4:
            salt, expected_text, num_prompt = live.pop(slot)
            output = expected_text.text[num_prompt:]
            cache.finish(slot, output)
            outputs += [(salt, output)] if output else []
        else:
            live[slot][1].extend(tokens)
            extend_batch(cache, [slot], [tokens])
        cache.flush()
        outputs = outputs if keep < 0 else outputs[max(0, len(outputs) - keep) :]
        assert cache.usage().num_outputs == len(outputs)
        cache.check_integrity()
    drafts = propose_batch(cache, list(live), [3] * len(live))
    shared = {salt: [output for owner, output in outputs if owner == salt] for salt, _, _ in live.values()}
    assert_drafts(drafts, [expected_text.expected(shared[salt], 3) for salt, expected_text, _ in live.values()])


@settings(max_examples=200)
@given(
    config=CONFIGS,
    alphabet=st.sampled_from([1, 2, 3]),
    outputs=st.lists(TOKENS, max_size=4),
    text=st.lists(st.integers(0, 49), min_size=1, max_size=100),
    tail=st.lists(st.integers(0, 49), max_size=16),
)
def test_a_tail_counts_as_text_and_is_not_stored(
    config: SuffixConfig, alphabet: int, outputs: list[list[int]], text: list[int], tail: list[int]
) -> None:
    cache, text, tail = SuffixCache(config), folded(text, alphabet), folded(tail, alphabet)
    for output in outputs:
        share(cache, folded(output, alphabet))
    for slot in range(2):
        cache.start(slot, "", text)
    extend_batch(cache, [1], [tail])
    cache.flush()
    without, expected = (propose_batch(cache, [slot], [16]) for slot in range(2))
    found = propose_batch(cache, [0], [16], [np.array(tail, np.int32)])
    assert (found.proposals(), found.num_shared()) == (expected.proposals(), expected.num_shared())
    assert propose_batch(cache, [0], [16]).proposals() == without.proposals()
    cache.check_integrity()
