# SPDX-License-Identifier: Apache-2.0
"""The n-gram index against a search through the whole history."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy.ops import host
from fastdeploy.ops.host import MAX_MATCH_LEN, NgramIndex
from fastdeploy.ops.text_batch import TextBatch
from fastdeploy.version import __version__
from tests.ops.anchors import LONG_MATCH, AnchorOracle
from tests.ops.text_batches import extend_batch, propose_batch

CAP = 6


def oracle(tokens: list[int], min_n: int, max_n: int, cap: int) -> tuple[list[int], int]:
    """Return (continuation, match length) by trying every n and every earlier position, the latest first."""
    _, end = search(tokens, min_n, max_n)
    return (continuation(tokens, end, cap), match_len_at(tokens, end)) if end else ([], 0)


def search(tokens: list[int], min_n: int, max_n: int) -> tuple[int, int]:
    """Return the length and the end of the latest occurrence of the longest n-gram; (0, 0) if there is none."""
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return n, end
    return 0, 0


def continuation(tokens: list[int], start: int, cap: int) -> list[int]:
    """Return the tokens from `start` on; beyond the end, they repeat."""
    repeated = list(tokens)
    while len(repeated) < start + cap:
        repeated.append(repeated[start + len(repeated) - len(tokens)])
    return repeated[start : start + cap]


def match_len_at(tokens: list[int], position: int) -> int:
    """Return how many tokens before a position equal the last ones, counted up to MAX_MATCH_LEN."""
    count = 0
    while count < min(position, MAX_MATCH_LEN) and tokens[position - 1 - count] == tokens[-1 - count]:
        count += 1
    return count


class ExpectedText:
    """A text, the drafts that are expected for it, and the position in itself that it copied from at the last draft."""

    def __init__(self, window: tuple[int, int], text: list[int]) -> None:
        self.window, self.text, self.anchor = window, list(text), AnchorOracle([], 0, 0, 0)

    def extend(self, tokens: list[int]) -> None:
        self.text += tokens
        self.anchor.tokens += tokens

    def expected(self, cap: int) -> tuple[list[int], int]:
        text, last = self.text, self.text[-LONG_MATCH:]
        n, position = search(text, *self.window)
        if n == 0:
            return [], 0
        if (
            self.anchor.needs_update()
            and len(last) == LONG_MATCH
            and text[max(0, position - LONG_MATCH) : position] == last
        ):
            self.anchor = AnchorOracle(text, 0, position, LONG_MATCH)
        match_len, resumed = self.anchor.find()
        position = position if match_len < n else resumed
        return continuation(text, position, cap), match_len_at(text, position)


def propose(index: NgramIndex, slot: int, cap: int = CAP) -> tuple[list[int], int]:
    return propose_batch(index, [slot], [cap]).proposals()[0]


@settings(max_examples=300)
@given(
    alphabet=st.sampled_from([1, 2, 3, 50]),
    window=st.sampled_from([(1, 1), (1, 3), (2, 5), (3, 3), (1, 16)]),
    pieces=st.lists(st.lists(st.integers(0, 49), max_size=12), min_size=1, max_size=12),
)
def test_proposal_is_what_a_search_through_the_history_finds(
    alphabet: int, window: tuple[int, int], pieces: list[list[int]]
) -> None:
    index, history = NgramIndex(*window), []
    for number, piece in enumerate(pieces):
        piece = [token % alphabet for token in piece]
        history += piece
        if number == 0:
            index.start(3, piece)
        else:
            extend_batch(index, [3], [piece])
        assert propose(index, 3) == oracle(history, *window, CAP)
    index.check_integrity()


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    edits=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 6), st.integers(0, 6)), max_size=4),
    window=st.sampled_from([(1, 1), (1, 3), (2, 5), (3, 3)]),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=30),
)
def test_copies_with_edits_continue_where_a_search_through_the_history_says(
    seed: int, edits: list[tuple[int, int, int]], window: tuple[int, int], steps: list[int]
) -> None:
    random = np.random.default_rng(seed)
    original = random.integers(0, 6, 100).tolist()
    index, expected_text, rest = NgramIndex(*window), ExpectedText(window, original), list(original)
    for at, num_old, num_new in edits:
        rest[at : at + num_old] = random.integers(0, 6, num_new).tolist()
    index.start(0, original)
    for step in steps:
        added, rest = rest[:step], rest[step:]
        expected_text.extend(added)
        extend_batch(index, [0], [added])
        assert propose(index, 0, 9) == expected_text.expected(9)


def test_after_an_edit_a_match_near_the_divergence_wins_over_the_most_recent_one() -> None:
    index = NgramIndex(2, 5)
    source = list(range(100, 130))
    index.start(0, [*source, 126, 127, 50, *source[:20]])  # 126 127 was last followed by 50
    assert propose(index, 0, 4) == ([120, 121, 122, 123], 16)
    extend_batch(index, [0], [[7, 126, 127]])
    assert propose(index, 0, 4) == ([128, 129, 126, 127], 2)


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    tail=st.lists(st.integers(0, 3), max_size=16),
    window=st.sampled_from([(1, 1), (1, 3), (2, 5), (8, 16)]),
)
def test_a_tail_counts_as_text_and_is_not_stored(tokens: list[int], tail: list[int], window: tuple[int, int]) -> None:
    index, whole = NgramIndex(*window), NgramIndex(*window)
    index.start(0, tokens)
    whole.start(0, tokens + tail)
    before = propose(index, 0)
    found = propose_batch(index, [0], [CAP], [np.array(tail, np.int32)])
    assert found.proposals() == [propose(whole, 0)]
    assert propose(index, 0) == before
    index.check_integrity()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_sequences_do_not_affect_each_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, live = NgramIndex(1, 4), {}
    for _ in range(60):
        slot = int(rng.integers(0, 5))
        if slot not in live:
            live[slot] = rng.integers(0, 3, rng.integers(0, 20)).tolist()
            index.start(slot, live[slot])
        elif rng.random() < 0.15:
            del live[slot]
            index.finish(slot)
        else:
            slots = [s for s in live if rng.random() < 0.7]
            added = [rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in slots]
            extend_batch(index, slots, added)
            for s, part in zip(slots, added, strict=True):
                live[s] += part
        slots = list(live)
        caps = rng.integers(0, CAP + 1, len(slots)).tolist()
        found = propose_batch(index, slots, caps)
        for i, s in enumerate(slots):
            expected = oracle(live[s], 1, 4, caps[i]) if caps[i] else ([], 0)
            assert found.proposals()[i] == expected
    index.check_integrity()


def test_a_batch_grows_for_more_and_longer_drafts_and_may_then_hold_fewer() -> None:
    index, batch, texts = NgramIndex(1, 2), TextBatch(), [[i, 99, *range(100, 140), i] for i in range(50)]
    for slot, text in enumerate(texts):
        index.start(slot, text)
    for count, cap in ((50, 30), (3, 40), (17, 2)):
        batch.fill(range(count), [cap] * count, [np.empty(0, np.int32)] * count)
        index.draft_batch(batch)
        assert len(batch) == count
        assert batch.proposals() == [(text[1 : cap + 1], 1) for text in texts[:count]]


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    index = NgramIndex(1, 3)
    index.start(0, [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3])
    assert propose(index, 0, 2) == ([7, 9], 3)


def test_the_most_recent_of_equal_matches_wins() -> None:
    index = NgramIndex(2, 2)
    index.start(0, [1, 2, 5, 1, 2, 6, 1, 2])
    assert propose(index, 0, 2) == ([6, 1], 2)


def test_a_match_may_cross_from_prompt_to_output() -> None:
    index = NgramIndex(2, 4)
    index.start(0, [9, 1, 2])
    extend_batch(index, [0], [[3, 4, 9, 1, 2, 3]])
    assert propose(index, 0, 3) == ([4, 9, 1], 4)


def test_a_match_may_overlap_the_suffix_and_its_repetition_continues() -> None:
    index = NgramIndex(1, 3)
    index.start(0, [5, 5, 5, 5])
    index.start(1, [1, 2, 3, 1, 2])
    assert propose(index, 0, 4) == ([5, 5, 5, 5], 3)
    assert propose(index, 1, 5) == ([3, 1, 2, 3, 1], 2)


def test_hash_collisions_in_long_random_text_do_no_harm() -> None:
    rng = np.random.default_rng(0)
    history = rng.integers(0, 40, 30_000).astype(np.int32)
    index = NgramIndex(2, 5)
    index.start(0, history[:20_000])
    extend_batch(index, [0], [history[20_000:]])
    index.check_integrity()
    assert propose(index, 0) == oracle(history.tolist(), 2, 5, CAP)


@pytest.mark.parametrize(("window", "limit"), [((1, 5), 40), ((1, 8), 64)])
def test_bytes_per_token_are_bounded(window: tuple[int, int], limit: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 2**31 - 1, 60_000).astype(np.int32)
    index = NgramIndex(*window)
    index.start(0, tokens[:50_000])
    assert index.num_bytes() <= limit * 50_000
    for begin in range(50_000, 60_000, 7):
        part = tokens[begin : begin + 7]
        extend_batch(index, [0], [part])
        assert index.num_bytes() <= limit * (begin + len(part))


def test_finish_frees_the_memory() -> None:
    index = NgramIndex(1, 3)
    empty = index.num_bytes()
    index.start(0, list(range(10_000)))
    index.finish(0)
    assert index.num_bytes() <= empty + 1024


def test_invalid_slots_and_lengths_are_refused_by_name() -> None:
    index = NgramIndex(1, 3)
    index.start(0, [1, 2])
    with pytest.raises(ValueError, match="not in use, got 0"):
        index.start(0, [1])
    with pytest.raises(ValueError, match="live slots, got 4"):
        extend_batch(index, [0, 4], [[1], [2]])
    with pytest.raises(ValueError, match="live slots, got 7"):
        propose_batch(index, [7], [1])
    with pytest.raises(ValueError, match=r"tails: expected 1 of at most 16 tokens, got lengths \[17\]"):
        propose_batch(index, [0], [1], [np.zeros(17, np.int32)])
    with pytest.raises(ValueError, match="expected 2 caps and 2 arrays of tokens, got 1 and 2"):
        propose_batch(index, [0, 0], [1])
    with pytest.raises(ValueError, match="live slot, got 1"):
        index.finish(1)
    with pytest.raises(ValueError, match="min_n"):
        NgramIndex(3, 2)


def test_the_library_belongs_to_this_version() -> None:
    assert host.load_library().fd_library_version().decode() == __version__
    assert len(host.library_hash()) == 16


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(host, "library_path", lambda: tmp_path / "_host.so")
    with pytest.raises(host.HostLibraryError, match="pip install -e"):
        host.load_library.__wrapped__()


def test_the_host_library_needs_no_paddle() -> None:
    code = (
        "import sys; from fastdeploy.ops.host import NgramIndex; NgramIndex(1, 2); assert 'paddle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
