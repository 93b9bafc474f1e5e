# SPDX-License-Identifier: Apache-2.0
"""What suffix decoding is expected to draft, by a search through whole texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastdeploy.ops.suffix_cache import SuffixCache, SuffixConfig
from fastdeploy.ops.text_batch import TextBatch
from tests.ops.anchors import LONG_MATCH, AnchorOracle

Guess = tuple[list[int], int, float]  # tokens, match length, score


def follow(counts_after: Oracle, max_tokens: int, min_prob: float) -> tuple[list[int], float]:
    """Return the most frequent continuation and its score."""
    drafted: list[int] = []
    prob, score = 1.0, 0.0
    while len(drafted) < max_tokens:
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
    """Counts all occurrences of a match in all texts: their number and {next token: (count, latest position)}."""

    def __init__(self, texts: list[list[int]], match: list[int], own: bool) -> None:
        self.texts, self.match, self.own = texts, match, own

    def __call__(self, drafted: list[int]) -> tuple[int, dict[int, tuple[int, int]]]:
        pattern, following, total, offset = self.match + drafted, {}, 0, 0
        for text in self.texts:
            # occurrences in the text itself continue in its draft; the match at its end does not count
            read = text + drafted if self.own else text
            last = len(text) - len(self.match) - 1 if self.own else len(text) - len(pattern)
            for begin in range(last + 1):
                if read[begin : begin + len(pattern)] != pattern:
                    continue
                total += 1
                if begin + len(pattern) < len(read):
                    token = read[begin + len(pattern)]
                    following[token] = (following.get(token, (0, 0))[0] + 1, offset + begin)
            offset += len(text)
        return total, following


def best_guess(texts: list[list[int]], context: list[int], own: bool, config: SuffixConfig, cap: int) -> Guess:
    """Return the draft of the highest score over all match lengths."""
    best: Guess = ([], 0, 0.0)
    for m in range(1, min(len(context), config.max_tree_depth - config.max_draft_len) + 1):
        max_tokens = min(cap, config.max_draft_len, math.floor(m * config.max_spec_factor + 1e-9))
        drafted, score = follow(Oracle(texts, context[-m:], own), max_tokens, config.min_token_prob)
        if drafted and score >= best[2] - 1e-12:
            best = (drafted, m, score)
    return best


class ExpectedText:
    """A text, the drafts that are expected for it, and the place that it was copying from at the last draft."""

    def __init__(self, config: SuffixConfig, text: list[int], newest: list[int] | None = None) -> None:
        self.config, self.text, self.is_shared = config, list(text), True
        self.anchor = None if newest is None else AnchorOracle(newest, 0, 0, 2 * LONG_MATCH, has_diverged=True)

    def extend(self, tokens: list[int]) -> None:
        self.text += tokens
        if self.anchor is not None:
            self.anchor.tokens += tokens

    def expected(self, shared: list[list[int]], cap: int, tail: list[int] | None = None) -> tuple[Guess, bool]:
        context = self.text + (tail or [])
        mine = best_guess([context], context, True, self.config, cap)
        theirs = best_guess(shared, context, False, self.config, cap)
        best, is_shared = (theirs, True) if theirs[2] > mine[2] + 1e-12 else (mine, False)
        if tail is None:
            self._set_anchor(best, is_shared, shared)
        resumed = self._resumed(max(2, best[1]), cap, tail or [])
        return (resumed, self.is_shared) if resumed[2] > best[2] + 1e-12 else (best, is_shared)

    def _set_anchor(self, best: Guess, is_shared: bool, shared: list[list[int]]) -> None:
        if best[1] < LONG_MATCH or (self.anchor is not None and not self.anchor.needs_update()):
            return
        match, depth = self.text[-best[1] :], self.config.max_tree_depth
        last_begin = len(self.text) - depth  # later suffixes of the text are not in its tree yet
        for source in reversed(shared) if is_shared else [self.text]:
            last = len(source) - len(match) if is_shared else last_begin
            for begin in range(last, -1, -1):
                if source[begin : begin + len(match)] == match:
                    first = begin if is_shared else 0
                    self.anchor = AnchorOracle(source, first, begin + len(match), len(match))
                    self.is_shared = is_shared
                    return

    def _resumed(self, min_match_len: int, cap: int, tail: list[int]) -> Guess:
        match_len, position = (0, 0) if self.anchor is None else self.anchor.find(tail)
        probability = match_len / (match_len + 1)
        if match_len < min_match_len or probability < self.config.min_token_prob:
            return [], 0, 0.0
        counted_len = self.anchor.match_len // 2 + match_len
        max_tokens = min(cap, self.config.max_draft_len, math.floor(counted_len * self.config.max_spec_factor + 1e-9))
        tokens = self.anchor.source[position : position + max(0, max_tokens)]
        return tokens, match_len, len(tokens) * probability


def assert_drafts(batch: TextBatch, expected: Sequence[tuple[Guess, bool]]) -> None:
    """Check tokens and match length of every text, and how many drafts follow a cached output."""
    assert batch.proposals() == [(tokens, match_len) for (tokens, match_len, _), _ in expected]
    assert batch.num_shared() == sum(is_shared for _, is_shared in expected)


def share(cache: SuffixCache, output: list[int], salt: str = "") -> None:
    """Cache an output of a finished request."""
    cache.start(99, salt, [])
    cache.finish(99, output)
