# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding's native state against a search through the whole texts, and against itself under random use."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy.ops.suffix_cache import SuffixCache, SuffixDrafts, SuffixRules

Guess = tuple[list[int], int, float]


def walk(counts_after: "Oracle", budget: int, min_prob: float) -> tuple[list[int], float]:
    drafted: list[int] = []
    prob, score = 1.0, 0.0
    while len(drafted) < budget:
        total, following = counts_after(drafted)
        if not following:
            break
        token, (count, _) = max(following.items(), key=lambda item: item[1])
        prob *= count / total
        if prob < min_prob:
            break
        drafted.append(token)
        score += prob
    return drafted, score


class Oracle:
    """Counts by looking at every place of every text: `total` and {token: (count, latest place)} after a match."""

    def __init__(self, texts: list[list[int]], match: list[int], own: bool) -> None:
        self.texts, self.match, self.own = texts, match, own

    def __call__(self, drafted: list[int]) -> tuple[int, dict[int, tuple[int, int]]]:
        pattern, following, total, place = self.match + drafted, {}, 0, 0
        for text in self.texts:
            # a text's own occurrences go on in its draft; the match itself, at its end, is no occurrence
            read = text + drafted if self.own else text
            last = len(text) - len(self.match) - 1 if self.own else len(text) - len(pattern)
            for begin in range(last + 1):
                if read[begin : begin + len(pattern)] != pattern:
                    continue
                total += 1
                if begin + len(pattern) < len(read):
                    token = read[begin + len(pattern)]
                    following[token] = (following.get(token, (0, 0))[0] + 1, place + begin)
            place += len(text)
        return total, following


def best_guess(texts: list[list[int]], context: list[int], own: bool, rules: SuffixRules, cap: int) -> Guess:
    best: Guess = ([], 0, 0.0)
    for m in range(1, min(len(context), rules.max_tree_depth - rules.reach) + 1):
        budget = min(cap, rules.reach, math.floor(m * rules.max_spec_factor + 1e-9))
        drafted, score = walk(Oracle(texts, context[-m:], own), budget, rules.min_token_prob)
        if drafted and score >= best[2] - 1e-12:
            best = (drafted, m, score)
    return best


def expected_guess(own: list[int], shared: list[list[int]], rules: SuffixRules, cap: int) -> tuple[Guess, bool]:
    mine, theirs = best_guess([own], own, True, rules, cap), best_guess(shared, own, False, rules, cap)
    return (theirs, True) if theirs[2] > mine[2] + 1e-12 else (mine, False)


def assert_row(drafts: SuffixDrafts, row: int, expected: tuple[Guess, bool]) -> None:
    (tokens, match_len, score), is_shared = expected
    assert drafts.tokens[row, : drafts.counts[row]].tolist() == tokens
    assert (drafts.match_lens[row], bool(drafts.is_shared[row])) == (match_len, is_shared)
    assert drafts.scores[row] == pytest.approx(score, abs=1e-5)


RULES = st.builds(
    SuffixRules,
    max_tree_depth=st.sampled_from([2, 3, 6, 9, 64]),
    max_drafts=st.sampled_from([1, 3, 5, 16]),
    max_spec_factor=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]),
    max_cache_bytes=st.just(1 << 20),
)
TOKENS = st.lists(st.integers(0, 49), max_size=14)


def folded(tokens: list[int], alphabet: int) -> list[int]:
    return [token % alphabet for token in tokens]


@settings(max_examples=400, deadline=None)
@given(
    rules=RULES,
    alphabet=st.sampled_from([1, 2, 3, 50]),
    outputs=st.lists(TOKENS, max_size=6),
    pieces=st.lists(TOKENS, min_size=1, max_size=10),
    cap=st.integers(1, 16),
)
def test_drafts_are_what_a_search_through_all_texts_finds(
    rules: SuffixRules, alphabet: int, outputs: list[list[int]], pieces: list[list[int]], cap: int
) -> None:
    cache, own = SuffixCache(rules), []
    outputs = [folded(output, alphabet) for output in outputs]
    for output in outputs:
        cache.start(0, "salt", [1])
        cache.finish(0, output)
    for number, piece in enumerate(pieces):
        piece = folded(piece, alphabet)
        own += piece
        if number == 0:
            cache.start(3, "salt", piece)
        else:
            cache.extend_batch([3], [0, len(piece)], piece)
        assert_row(cache.propose_batch([3], [cap]), 0, expected_guess(own, outputs, rules, cap))
    cache.check_integrity()
