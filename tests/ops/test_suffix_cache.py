# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding's native state against a search through the whole texts, and against itself under random use."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastdeploy.ops.suffix_cache import SuffixCache, SuffixConfig
from fastdeploy.ops.text_batch import TextBatch
from tests.ops.anchors import LONG_MATCH, AnchorOracle
from tests.ops.text_batches import extend_batch, propose_batch

LARGE_PAGE = 1 << 16  # nodes
Guess = tuple[list[int], int, float]


def walk(counts_after: Oracle, budget: int, min_prob: float) -> tuple[list[int], float]:
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


def best_guess(texts: list[list[int]], context: list[int], own: bool, rules: SuffixConfig, cap: int) -> Guess:
    best: Guess = ([], 0, 0.0)
    for m in range(1, min(len(context), rules.max_tree_depth - rules.reach) + 1):
        budget = min(cap, rules.reach, math.floor(m * rules.max_spec_factor + 1e-9))
        drafted, score = walk(Oracle(texts, context[-m:], own), budget, rules.min_token_prob)
        if drafted and score >= best[2] - 1e-12:
            best = (drafted, m, score)
    return best


class Follower:
    """A text, what is expected to follow it, and where it was copying from when it was last asked."""

    def __init__(self, rules: SuffixConfig, text: list[int], newest: list[int] | None = None) -> None:
        self.rules, self.text, self.is_shared = rules, list(text), True
        self.anchor = None if newest is None else AnchorOracle(newest, 0, 0, 2 * LONG_MATCH, has_left=True)

    def extend(self, tokens: list[int]) -> None:
        self.text += tokens
        if self.anchor is not None:
            self.anchor.said += tokens

    def expected(self, shared: list[list[int]], cap: int, tail: list[int] | None = None) -> tuple[Guess, bool]:
        context = self.text + (tail or [])
        mine = best_guess([context], context, True, self.rules, cap)
        theirs = best_guess(shared, context, False, self.rules, cap)
        best, is_shared = (theirs, True) if theirs[2] > mine[2] + 1e-12 else (mine, False)
        if tail is None:
            self._follow(best, is_shared, shared)
        resumed = self._resumed(max(2, best[1]), cap, tail or [])
        return (resumed, self.is_shared) if resumed[2] > best[2] + 1e-12 else (best, is_shared)

    def _follow(self, best: Guess, is_shared: bool, shared: list[list[int]]) -> None:
        if best[1] < LONG_MATCH or (self.anchor is not None and not self.anchor.is_worn()):
            return
        match, depth = self.text[-best[1] :], self.rules.max_tree_depth
        counted = len(self.text) - depth  # suffixes of the text itself that begin later are not in its tree yet
        for source in reversed(shared) if is_shared else [self.text]:
            last = len(source) - len(match) if is_shared else counted
            for begin in range(last, -1, -1):
                if source[begin : begin + len(match)] == match:
                    first = begin if is_shared else 0
                    self.anchor = AnchorOracle(source, first, begin + len(match), len(match))
                    self.is_shared = is_shared
                    return

    def _resumed(self, min_evidence: int, cap: int, tail: list[int]) -> Guess:
        evidence, place = (0, 0) if self.anchor is None else self.anchor.find(tail)
        probability = evidence / (evidence + 1)
        if evidence < min_evidence or probability < self.rules.min_token_prob:
            return [], 0, 0.0
        match_len = self.anchor.match_len // 2 + evidence
        budget = min(cap, self.rules.reach, math.floor(match_len * self.rules.max_spec_factor + 1e-9))
        tokens = self.anchor.source[place : place + max(0, budget)]
        return tokens, evidence, len(tokens) * probability


def assert_row(drafts: TextBatch, row: int, expected: tuple[Guess, bool]) -> None:
    (tokens, match_len, score), is_shared = expected
    assert drafts.drafts[row, : drafts.counts[row]].tolist() == tokens
    assert (drafts.match_lens[row], bool(drafts.is_shared[row])) == (match_len, is_shared)
    assert drafts.scores[row] == pytest.approx(score, abs=1e-5)


RULES = st.builds(
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


@settings(max_examples=400, deadline=None)
@given(
    rules=RULES,
    alphabet=st.sampled_from([1, 2, 3, 50]),
    outputs=st.lists(TOKENS, max_size=6),
    pieces=st.lists(TOKENS, min_size=1, max_size=10),
    cap=st.integers(1, 16),
)
def test_drafts_are_what_a_search_through_all_texts_finds(
    rules: SuffixConfig, alphabet: int, outputs: list[list[int]], pieces: list[list[int]], cap: int
) -> None:
    cache = SuffixCache(rules)
    outputs = [folded(output, alphabet) for output in outputs if output]
    follower = Follower(rules, [], outputs[-1] if outputs else None)
    for output in outputs:
        cache.start(0, "salt", [1])
        cache.finish(0, output)
    for number, piece in enumerate(pieces):
        piece = folded(piece, alphabet)
        if number == 0:
            follower.text = list(piece)
            cache.start(3, "salt", piece)
        else:
            follower.extend(piece)
            extend_batch(cache, [3], [piece])
        assert_row(propose_batch(cache, [3], [cap]), 0, follower.expected(outputs, cap))
    cache.check_integrity()


EDITS = st.lists(
    st.tuples(st.sampled_from(["replace", "insert", "delete"]), st.integers(0, 120), st.integers(1, 12)), max_size=4
)


def with_edits(tokens: list[int], edits: list[tuple[str, int, int]], random: np.random.Generator) -> list[int]:
    for kind, at, size in edits:
        new = [] if kind == "delete" else random.integers(0, 8, size).tolist()
        tokens = tokens[:at] + new + tokens[at if kind == "insert" else at + size :]
    return tokens


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    edits=EDITS,
    is_own=st.booleans(),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    tail=st.integers(0, 16),
    rules=st.builds(
        SuffixConfig, max_spec_factor=st.sampled_from([0.25, 1.0]), min_token_prob=st.sampled_from([0.1, 0.8])
    ),
)
def test_copies_with_edits_are_drafted_as_a_search_through_all_texts_says(
    seed: int, edits: list[tuple[str, int, int]], is_own: bool, steps: list[int], tail: int, rules: SuffixConfig
) -> None:
    random = np.random.default_rng(seed)
    original, cache = random.integers(0, 8, 120).tolist(), SuffixCache(rules)
    outputs = [random.integers(0, 8, 30).tolist(), original, random.integers(0, 8, 20).tolist()][: 1 if is_own else 3]
    for output in outputs:
        share(cache, output)
    prompt = [*original, 9] if is_own else [9]
    cache.start(0, "", prompt)
    cache.flush()
    follower, rest = Follower(rules, prompt, outputs[-1]), with_edits(original, edits, random)
    for step in steps:
        said, rest = rest[:step], rest[step:]
        follower.extend(said)
        extend_batch(cache, [0], [said])
        assert_row(propose_batch(cache, [0], [16]), 0, follower.expected(outputs, 16))
        ahead = rest[:tail]
        found = propose_batch(cache, [0], [8], [np.array(ahead, np.int32)])
        assert_row(found, 0, follower.expected(outputs, 8, ahead) if ahead else follower.expected(outputs, 8))


@settings(max_examples=80, deadline=None)
@example(seed=7479126, keep=0, alphabet=2)  # three thirds against a one
@given(seed=st.integers(0, 2**32 - 1), keep=st.integers(-1, 4), alphabet=st.sampled_from([1, 2, 4]))
def test_any_history_of_requests_leaves_the_right_counts(seed: int, keep: int, alphabet: int) -> None:
    random = np.random.default_rng(seed)
    rules = SuffixConfig(max_tree_depth=6, max_drafts=3, max_cached_requests=keep, max_cache_bytes=1 << 20)
    cache = SuffixCache(rules)
    live: dict[int, tuple[str, Follower, int]] = {}  # salt, text, length of its prompt
    outputs: list[tuple[str, list[int]]] = []
    for _ in range(50):
        slot, tokens = int(random.integers(4)), random.integers(0, alphabet, random.integers(0, 20)).tolist()
        if slot not in live:
            salt = str(random.integers(2))
            newest = next((output for owner, output in reversed(outputs) if owner == salt), None)
            live[slot] = (salt, Follower(rules, tokens, newest), len(tokens))
            cache.start(slot, salt, tokens)
        elif random.random() < 0.4:
            salt, follower, num_prompt = live.pop(slot)
            said = follower.text[num_prompt:]
            cache.finish(slot, said)
            outputs += [(salt, said)] if said else []
        else:
            live[slot][1].extend(tokens)
            extend_batch(cache, [slot], [tokens])
        cache.flush()
        outputs = outputs if keep < 0 else outputs[max(0, len(outputs) - keep) :]
        assert cache.usage().num_outputs == len(outputs)
        cache.check_integrity()
    drafts = propose_batch(cache, list(live), [3] * len(live))
    for row, (salt, follower, _) in enumerate(live.values()):
        shared = [output for owner, output in outputs if owner == salt]
        assert_row(drafts, row, follower.expected(shared, 3))


@settings(max_examples=200, deadline=None)
@given(
    rules=RULES,
    alphabet=st.sampled_from([1, 2, 3]),
    outputs=st.lists(TOKENS, max_size=4),
    text=st.lists(st.integers(0, 49), min_size=1, max_size=100),
    tail=st.lists(st.integers(0, 49), max_size=16),
)
def test_a_tail_counts_as_text_and_is_not_kept(
    rules: SuffixConfig, alphabet: int, outputs: list[list[int]], text: list[int], tail: list[int]
) -> None:
    cache, text, tail = SuffixCache(rules), folded(text, alphabet), folded(tail, alphabet)
    for output in outputs:
        share(cache, folded(output, alphabet))
    for slot in range(2):
        cache.start(slot, "", text)
    extend_batch(cache, [1], [tail])
    cache.flush()
    expected = propose_batch(cache, [0, 1], [16, 16])
    found = propose_batch(cache, [0], [16], [np.array(tail, np.int32)])
    for name in ("drafts", "counts", "match_lens", "scores", "is_shared"):
        assert np.array_equal(getattr(found, name)[0], getattr(expected, name)[1]), name
    assert np.array_equal(propose_batch(cache, [0], [16]).drafts[0], expected.drafts[0])
    cache.check_integrity()


def share(cache: SuffixCache, output: list[int], salt: str = "") -> None:
    cache.start(99, salt, [])
    cache.finish(99, output)


def draft(cache: SuffixCache, slot: int, cap: int = 16) -> list[int]:
    drafts = propose_batch(cache, [slot], [cap])
    return drafts.drafts[0, : drafts.counts[0]].tolist()


def test_another_salt_is_never_followed() -> None:
    cache = SuffixCache(SuffixConfig())
    share(cache, [1, 2, 3, 4, 5, 6], salt="theirs")
    cache.start(0, "mine", [9, 1, 2, 3])
    cache.start(1, "theirs", [9, 1, 2, 3])
    cache.start(2, "", [9, 1, 2, 3])
    assert [draft(cache, slot) for slot in range(3)] == [[], [4, 5, 6], []]


def test_nodes_of_an_evicted_output_serve_another_salt_without_a_trace() -> None:
    cache, random = SuffixCache(SuffixConfig(max_cached_requests=2)), np.random.default_rng(5)
    texts = {salt: random.integers(0, 3, 40).tolist() for salt in "abcdefgh"}
    num_nodes = []
    for salt, text in [*texts.items()] * 5:
        share(cache, text, salt)
        cache.flush()
        num_nodes.append(cache.usage().num_nodes)
        cache.start(0, salt, text[:20])
        assert_row(propose_batch(cache, [0], [16]), 0, Follower(SuffixConfig(), text[:20], text).expected([text], 16))
        cache.finish(0, [])
    assert max(num_nodes[-8:]) == max(num_nodes[8:16])


def test_the_more_frequent_continuation_wins_and_ends_where_it_is_too_rare() -> None:
    cache = SuffixCache(SuffixConfig(min_token_prob=0.4, max_spec_factor=4))
    for output in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 7]):
        share(cache, output)
    cache.start(0, "", [1])
    drafts = propose_batch(cache, [0], [8])
    assert drafts.drafts[0, : drafts.counts[0]].tolist() == [2, 3]  # 3/4, 3/4, then 1/4
    assert drafts.scores[0] == pytest.approx(1.5)


def test_the_request_s_own_text_wins_a_tie_and_loses_to_a_surer_output() -> None:
    cache = SuffixCache(SuffixConfig())
    share(cache, [1, 2, 3, 8, 8])
    cache.start(0, "", [1, 2, 3, 9, 9, 1, 2, 3])
    cache.start(1, "", [3, 9, 3, 7, 1, 2, 3])
    drafts = propose_batch(cache, [0, 1], [2, 2])
    assert drafts.drafts[:, :2].tolist() == [[9, 9], [8, 8]]
    assert (drafts.is_shared.tolist(), drafts.num_shared()) == ([0, 1], 1)
    drafts.fill([0], [2], [np.empty(0, np.int32)])
    cache.draft_batch(drafts)
    assert drafts.num_shared() == 0


def test_a_repetition_goes_on_beyond_the_end_of_the_text() -> None:
    cache = SuffixCache(SuffixConfig())
    cache.start(0, "", [1, 2, 3] * 4)
    assert draft(cache, 0, 9) == [1, 2, 3, 1, 2, 3, 1, 2, 3]


SOURCE = list(range(100, 160))  # no token twice


@pytest.mark.parametrize(
    ("edit", "back"),
    [([7, 8, 9], 125), ([], 121), ([7, 8], 118)],
    ids=["tokens replaced", "a token deleted", "tokens inserted"],
)
def test_two_tokens_tell_where_copying_goes_on_behind_an_edit(edit: list[int], back: int) -> None:
    cache = SuffixCache(SuffixConfig())
    share(cache, [1, 2, *SOURCE])
    cache.start(0, "", [50])
    cache.flush()
    extend_batch(cache, [0], [SOURCE[:20]])  # 100 .. 119
    assert draft(cache, 0) == SOURCE[20:36]
    extend_batch(cache, [0], [edit])
    extend_batch(cache, [0], [[back]])
    assert len(draft(cache, 0)) == 1  # one token is a match like any other
    extend_batch(cache, [0], [[back + 1]])
    drafts = propose_batch(cache, [0], [16])
    assert drafts.drafts[0, : drafts.counts[0]].tolist() == list(range(back + 2, back + 14))  # 20 / 2 + 2
    assert (drafts.match_lens[0], drafts.scores[0], drafts.is_shared[0]) == (2, pytest.approx(8), 1)  # 2 of 3 are right


def test_an_output_that_begins_as_the_last_one_is_drafted_after_two_tokens() -> None:
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


def test_one_draft_at_a_time_works() -> None:
    cache = SuffixCache(SuffixConfig(max_drafts=1))
    cache.start(0, "", [1, 2, 3, 1, 2])
    assert draft(cache, 0, 1) == [3]
    assert draft(cache, 0, 0) == []
    assert draft(cache, 0, -1) == []
    assert len(propose_batch(cache, [], [])) == 0


def test_nothing_is_shared_when_no_requests_are_kept() -> None:
    cache = SuffixCache(SuffixConfig(max_cached_requests=0))
    share(cache, [1, 2, 3, 4, 5, 6])
    cache.start(0, "", [9, 1, 2, 3])
    assert draft(cache, 0) == []
    assert cache.usage().num_tokens == 0


def test_old_outputs_leave_as_a_whole_when_bytes_run_out() -> None:
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


def test_nodes_beyond_a_large_page_are_found_and_removed() -> None:
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


def test_an_output_larger_than_the_cache_is_left_out() -> None:
    cache = SuffixCache(SuffixConfig(max_cache_bytes=1 << 20))
    share(cache, [1, 2, 3])
    share(cache, list(range(100_000)))
    assert cache.usage().num_outputs == 1


def test_a_long_output_is_counted_in_pieces_and_removed_in_pieces() -> None:
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
    assert cache.usage().num_outputs == 2  # the long one is on its way out
    cache.flush()
    assert cache.usage()[2:] == (1, 3, 0, cache.usage().num_nodes, 1)


def test_the_end_of_a_request_counts_nothing_and_the_next_start_makes_up_for_it() -> None:
    cache = SuffixCache(SuffixConfig())
    cache.start(0, "", [1])
    for number in range(2):
        cache.start(9, "", [])
        cache.finish(9, list(range(200)))
        assert cache.usage().num_waiting_tokens == 200, number
    cache.start(1, "", [5, 6, 7])
    assert cache.usage().num_waiting_tokens == 0
    assert draft(cache, 1, 3) == [8, 9, 10]


def test_bytes_per_token_stay_bounded_on_text_and_are_given_back() -> None:
    rng = np.random.default_rng(1)
    words = [rng.integers(0, 4096, rng.integers(1, 6)).tolist() for _ in range(2000)]
    text = [token for word in rng.zipf(1.3, 30_000) for token in words[word % 2000]][:50_000]
    cache = SuffixCache(SuffixConfig(max_cached_requests=0))
    empty = cache.usage().live_bytes
    cache.start(0, "", text)
    assert cache.usage().live_bytes <= 64 * len(text)
    cache.finish(0, [])
    assert cache.usage().live_bytes <= empty + 1024


def test_wrong_slots_offsets_and_tokens_are_refused_by_name() -> None:
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
