# SPDX-License-Identifier: Apache-2.0
"""Verification row i of a request is written as if drafts 1 to i had been emitted."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.request import NO_DRAFT, Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.ops.sampling import FloatColumn, IntColumn, SamplingBatch
from fastdeploy.worker.sampling_metadata import SamplingMetadata
from tests.core.bad_word_search import search_banned_ids

EOS, VOCAB_LIMIT = 2, 90


def write(draft: list[int], **params: Any) -> tuple[SamplingBatch, np.ndarray, np.ndarray]:
    """Write the rows of a request with prompt 10..13 and output 20, 21; return the batch and its parameter rows."""
    source = GenerationRequest("a", [10, 11, 12, 13], SamplingParams(**params))
    request = Request(source, 0, seed=2**64 - 1, max_total_tokens=50, max_drafts=8)
    request.append([20, 21])
    request.set_draft(Draft(list(draft), "test"))
    batch = SamplingBatch(16)
    metadata = SamplingMetadata(batch, [EOS], VOCAB_LIMIT)
    metadata.begin_batch()
    metadata.write(request, request.draft, 3)
    rows = slice(3, 4 + len(draft))
    return batch, batch.float_params.array[rows], batch.int_params.array[rows]


def banned(batch: SamplingBatch, row: np.ndarray) -> list[int]:
    return sorted(batch.banned_ids.array[row[IntColumn.BANNED_BEGIN] : row[IntColumn.BANNED_END]].tolist())


def test_positions_and_drafts_advance_with_the_row() -> None:
    _, _, ints = write([30, 31, 32])
    assert ints[:, IntColumn.POSITION].tolist() == [6, 7, 8, 9]
    assert ints[:, IntColumn.DRAFT_ID].tolist() == [30, 31, 32, -1]
    assert set(ints[:, IntColumn.SEED]) == {-1}
    assert set(ints[:, IntColumn.VOCAB_LIMIT]) == {VOCAB_LIMIT}


def test_parameters_are_written_to_their_columns() -> None:
    _, floats, ints = write(
        [],
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
    )
    assert floats[0].tolist() == [0.5, 0.75, 0.25, 1.5, -0.5, 2.0]
    assert [FloatColumn.TEMPERATURE, FloatColumn.TOP_P, FloatColumn.FREQUENCY] == [0, 1, 5]
    assert ints[0, IntColumn.TOP_K] == 7


def test_history_of_a_row_includes_the_drafts_before_it() -> None:
    batch, _, ints = write([30, 31], presence_penalty=1.0)
    histories, outputs = [], []
    for row in ints:
        end = row[IntColumn.HISTORY_END]
        histories.append(batch.history.array[row[IntColumn.HISTORY_BEGIN] : end].tolist())
        outputs.append(batch.history.array[row[IntColumn.OUTPUT_BEGIN] : end].tolist())
    assert histories == [[10, 11, 12, 13, 20, 21], [10, 11, 12, 13, 20, 21, 30], [10, 11, 12, 13, 20, 21, 30, 31]]
    assert outputs == [[20, 21], [20, 21, 30], [20, 21, 30, 31]]


def test_end_tokens_are_banned_until_min_tokens_counting_drafts() -> None:
    batch, _, ints = write([30, 31], min_tokens=4, stop_token_ids=[9])
    assert [banned(batch, row) for row in ints] == [[EOS, 9], [EOS, 9], []]


def test_ignored_end_token_is_not_banned() -> None:
    batch, _, ints = write([], min_tokens=4, stop_token_ids=[9], ignore_eos=True)
    assert banned(batch, ints[0]) == [9]


def test_last_token_of_a_bad_word_is_banned_after_its_other_tokens_were_emitted_or_drafted() -> None:
    batch, _, ints = write([30, 31], bad_words_token_ids=[[21, 30, 40], [50], [13, 20, 21, 60]])
    assert [banned(batch, row) for row in ints] == [[50, 60], [40, 50], [50]]


def test_rows_that_ban_the_same_ids_share_them() -> None:
    batch, _, ints = write([30, 21, 31], min_tokens=4, bad_words_token_ids=[[50], [21, 60]])
    assert [banned(batch, row) for row in ints] == [[EOS, 50, 60], [EOS, 50], [50, 60], [50]]
    batch, _, ints = write([30, 31, 32], bad_words_token_ids=[[50], [21, 60]])
    assert ints[1:, [IntColumn.BANNED_BEGIN, IntColumn.BANNED_END]].tolist() == [[2, 3]] * 3


IDS = st.integers(0, 2)


@given(
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=5), min_size=1, max_size=8),
    prompt=st.lists(IDS, min_size=1, max_size=8),
    steps=st.lists(st.tuples(st.lists(IDS, max_size=4), st.integers(0, 4), IDS, st.booleans()), max_size=8),
)
def test_rows_behind_accepted_and_rejected_drafts_ban_what_a_search_of_their_context_finds(
    bad_words: list[list[int]], prompt: list[int], steps: list[tuple[list[int], int, int, bool]]
) -> None:
    source = GenerationRequest("a", prompt, SamplingParams(bad_words_token_ids=bad_words))
    request = Request(source, 0, seed=0, max_total_tokens=60, max_drafts=8)
    batch = SamplingBatch(8)
    metadata = SamplingMetadata(batch, [EOS], VOCAB_LIMIT)
    for draft, num_accepted, bonus, is_preempted in steps:
        request.set_draft(Draft(draft, "test"))
        metadata.begin_batch()
        metadata.write(request, request.draft, 0)
        context = request.token_ids.tolist()
        for i, row in enumerate(batch.int_params.array[: 1 + len(draft)]):
            assert set(banned(batch, row)) == search_banned_ids(bad_words, [*context, *draft[:i]])
        if is_preempted:
            request.reset_computed()
        else:
            request.append([*draft[:num_accepted], bonus])


def test_bias_is_written_once_and_used_by_every_row() -> None:
    batch, _, ints = write([30], logit_bias={5: 1.5, 8: -2.0})
    spans = {(int(row[IntColumn.BIAS_BEGIN]), int(row[IntColumn.BIAS_END])) for row in ints}
    assert spans == {(0, 2)}
    assert batch.bias_ids.array[:2].tolist() == [5, 8]
    assert batch.bias_values.array[:2].tolist() == [1.5, -2.0]


def test_rows_without_lists_refer_to_no_list_of_an_earlier_step() -> None:
    source = GenerationRequest("a", [10], SamplingParams(logit_bias={5: 1.0}))
    batch = SamplingBatch(4)
    metadata = SamplingMetadata(batch, [EOS], VOCAB_LIMIT)
    metadata.begin_batch()
    metadata.write(Request(source, 0, 0, 50, 0), NO_DRAFT, 0)
    metadata.begin_batch()
    metadata.write(Request(GenerationRequest("b", [10], SamplingParams()), 0, 0, 50, 0), NO_DRAFT, 0)
    begin_end = batch.int_params.array[0, [IntColumn.BIAS_BEGIN, IntColumn.BIAS_END]]
    assert begin_end[0] == begin_end[1]


def make_request(name: str, seed: int, draft: list[int], **params: Any) -> Request:
    source = GenerationRequest(name, [10, 11], SamplingParams(**params))
    request = Request(source, 0, seed=seed, max_total_tokens=50, max_drafts=8)
    request.set_draft(Draft(list(draft), "test"))
    return request


def test_rows_of_an_earlier_step_are_not_reused_for_another_request() -> None:
    batch = SamplingBatch(16)
    metadata = SamplingMetadata(batch, [EOS], VOCAB_LIMIT)
    one, other, biased = make_request("one", 1, [30, 31]), make_request("other", 2, []), make_request("biased", 3, [])
    biased.params.logit_bias[7] = 2.0
    steps = [[one], [other, one], [biased, other], [one, other, biased], [one, other, biased]]
    columns = [IntColumn.SEED, IntColumn.POSITION, IntColumn.DRAFT_ID, IntColumn.BIAS_END]
    rows_of = {
        one: [[1, 2, 30, 0], [1, 3, 31, 0], [1, 4, -1, 0]],
        other: [[2, 2, -1, 0]],
        biased: [[3, 2, -1, 1]],
    }
    for number, requests in enumerate(steps):
        metadata.begin_batch()
        num_rows = 0
        for request in requests:
            metadata.write(request, request.draft, num_rows)
            num_rows += len(rows_of[request])
        expected = [row for request in requests for row in rows_of[request]]
        assert batch.int_params.array[:num_rows, columns].tolist() == expected, f"step {number}"


def test_a_row_whose_draft_was_emitted_has_no_draft_id() -> None:
    batch = SamplingBatch(16)
    metadata = SamplingMetadata(batch, [EOS], VOCAB_LIMIT)
    request = make_request("one", 1, [30, 31])
    metadata.begin_batch()
    metadata.write(request, request.draft, 0)
    request.append([30])
    metadata.begin_batch()
    metadata.write(request, request.draft, 0)
    assert batch.int_params.array[0, [IntColumn.POSITION, IntColumn.DRAFT_ID]].tolist() == [3, -1]


def test_a_history_grows_from_step_to_step() -> None:
    batch = SamplingBatch(16)
    metadata = SamplingMetadata(batch, [EOS], VOCAB_LIMIT)
    request = make_request("one", 1, [], repetition_penalty=1.5)
    histories = []
    for token in (20, 21):
        metadata.begin_batch()
        metadata.write(request, request.draft, 0)
        begin, end = batch.int_params.array[0, [IntColumn.HISTORY_BEGIN, IntColumn.HISTORY_END]]
        histories.append(batch.history.array[begin:end].tolist())
        request.append([token])
    assert histories == [[10, 11], [10, 11, 20]]
