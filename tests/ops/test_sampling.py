# SPDX-License-Identifier: Apache-2.0
"""Sampling: the order and meaning of its options, statuses of rows, skipped rows, refused ranges."""

import numpy as np
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.sampling import IntColumn, RowStatus, SamplingBatch, sample
from tests.ops.sampling_rows import (
    RowOptions,
    batch_of,
    logits_of,
    mask_of,
    results_of,
)

INF = float("inf")


def processed(logits: list[float], options: RowOptions, backend: str) -> list[float]:
    """Return the processed logits of one row."""
    buffer, batch = logits_of(logits), batch_of([options])
    registry.lookup(backend)("sample")(buffer.tensor, batch, 1, True)
    return buffer.array[0].tolist()


def allowed_ids(logits: list[float], options: RowOptions, backend: str) -> list[int]:
    return [i for i, x in enumerate(processed(logits, options, backend)) if x > -INF]


both = pytest.mark.parametrize("backend", ["cpu", "reference"])
TENTHS = np.log([0.4, 0.3, 0.2, 0.1]).tolist()


@both
def test_top_k_comes_before_top_p_which_sees_renormalised_probabilities(backend: str) -> None:
    assert allowed_ids(TENTHS, RowOptions(top_p=0.5), backend) == [0, 1]
    assert allowed_ids(TENTHS, RowOptions(top_k=2, top_p=0.5), backend) == [0]  # 0.4 of 0.7 reaches 0.5


@both
def test_temperature_comes_before_top_p_and_min_p(backend: str) -> None:
    assert allowed_ids(TENTHS, RowOptions(top_p=0.6), backend) == [0, 1]
    assert allowed_ids(TENTHS, RowOptions(top_p=0.6, temperature=0.25), backend) == [0]
    assert allowed_ids(TENTHS, RowOptions(min_p=0.6), backend) == [0, 1]
    assert allowed_ids(TENTHS, RowOptions(min_p=0.6, temperature=0.25), backend) == [0]
    assert allowed_ids(TENTHS, RowOptions(min_p=0.6, temperature=4.0), backend) == [0, 1, 2, 3]


@both
def test_penalties_come_after_bias_and_before_temperature(backend: str) -> None:
    options = RowOptions(bias={0: 3.0}, repetition=2.0, presence=0.25, frequency=0.5, output=[0, 0], temperature=0.5)
    assert processed([-1.0, 0.0], options, backend) == [(2.0 / 2.0 - 0.25 - 0.5 * 2) / 0.5, 0.0]


@both
def test_repetition_divides_positive_and_multiplies_negative_logits_once_per_id(backend: str) -> None:
    options = RowOptions(repetition=2.0, prompt=[0, 0, 1], output=[1])
    assert processed([3.0, -3.0, 3.0], options, backend) == [1.5, -6.0, 3.0]


@both
def test_presence_and_frequency_penalties_count_output_only(backend: str) -> None:
    options = RowOptions(presence=1.0, frequency=0.5, prompt=[0, 1, 1], output=[1, 2, 2])
    assert processed([5.0, 5.0, 5.0], options, backend) == [5.0, 3.5, 3.0]


@both
def test_banned_ids_and_ids_beyond_the_tokenizer_are_never_allowed(backend: str) -> None:
    assert allowed_ids([9.0, 1.0, 2.0, 9.0], RowOptions(banned=[0], vocab_limit=3), backend) == [1, 2]


@both
def test_bias_cannot_allow_a_banned_id(backend: str) -> None:
    assert allowed_ids([0.0, 0.0], RowOptions(banned=[0], bias={0: 100.0}), backend) == [1]


@both
def test_only_ids_of_the_mask_are_allowed_whatever_their_bias(backend: str) -> None:
    logits = [5.0, 1.0, 2.0, 3.0]
    assert allowed_ids(logits, RowOptions(mask=mask_of([1, 3], 4), bias={0: 100.0}), backend) == [1, 3]
    assert allowed_ids(logits, RowOptions(mask=mask_of([0, 1, 3], 4), banned=[0], vocab_limit=3), backend) == [1]


@both
def test_mask_comes_before_top_k_and_top_p(backend: str) -> None:
    assert allowed_ids(TENTHS, RowOptions(mask=mask_of([1, 2, 3], 4), top_k=2), backend) == [1, 2]
    assert allowed_ids(TENTHS, RowOptions(mask=mask_of([1, 2, 3], 4), top_p=0.5), backend) == [
        1
    ]  # 0.3 of 0.6 reaches 0.5


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_one_id_samples_it(backend: str, temperature: float) -> None:
    vocab_size = 151_936
    values = np.random.default_rng(4).standard_normal((3, vocab_size))
    ids = [0, 70_001, vocab_size - 1]
    row_options = [RowOptions(mask=mask_of([i], vocab_size), temperature=temperature, draft_id=i) for i in ids]
    batch, buffer = batch_of(row_options), logits_of(values)
    registry.lookup(backend)("sample")(buffer.tensor, batch, 3, False)
    assert results_of(batch, 3) == (ids, [0, 0, 0], [1, 1, 1])


@both
def test_an_empty_mask_fails_its_row_and_no_other(backend: str) -> None:
    row_options = [RowOptions(temperature=0.0), RowOptions(mask=[0], temperature=0.0), RowOptions(temperature=0.0)]
    batch, buffer = batch_of(row_options), logits_of([[1.0, 2.0]] * 3)
    registry.lookup(backend)("sample")(buffer.tensor, batch, 3, False)
    assert results_of(batch, 3)[:2] == ([1, -1, 1], [RowStatus.OK, RowStatus.EMPTY, RowStatus.OK])


@both
def test_equal_logits_are_ordered_by_id(backend: str) -> None:
    assert allowed_ids([1.0] * 10, RowOptions(top_k=3), backend) == [0, 1, 2]
    assert allowed_ids([0.0, 1.0, 0.0, 1.0, 0.0], RowOptions(top_k=3), backend) == [0, 1, 3]
    assert allowed_ids([0.0, -0.0, 0.0], RowOptions(top_k=2), backend) == [0, 1]


@both
@pytest.mark.parametrize(("top_p", "kept"), [(0.0, 1), (0.05, 1), (0.1, 1), (0.3, 3), (0.31, 4), (0.9, 9), (0.95, 10)])
def test_top_p_keeps_the_prefix_that_reaches_it_inclusively(backend: str, top_p: float, kept: int) -> None:
    assert allowed_ids([2.0] * 10, RowOptions(top_p=top_p), backend) == list(range(kept))


@both
def test_min_p_is_relative_to_the_most_probable_id(backend: str) -> None:
    assert allowed_ids([5.0, 4.5, 4.0], RowOptions(min_p=0.5), backend) == [0, 1]
    assert allowed_ids([5.0, 5.0, 4.9999], RowOptions(min_p=1.0), backend) == [0, 1]


@both
@pytest.mark.parametrize("top_k", [0, -1, 3, 99])
def test_top_k_beyond_the_vocabulary_is_off(backend: str, top_k: int) -> None:
    assert allowed_ids([1.0, 2.0, 3.0], RowOptions(top_k=top_k), backend) == [0, 1, 2]


@both
def test_temperature_below_the_limit_is_argmax_with_ties_to_the_lowest_id(backend: str) -> None:
    logits, row_options = [[1.0, 7.0, 7.0, 2.0]], [RowOptions(temperature=9e-6, top_k=1, seed=5, draft_id=1)]
    batch, buffer = batch_of(row_options), logits_of(logits)
    registry.lookup(backend)("sample")(buffer.tensor, batch, 1, False)
    assert results_of(batch, 1) == ([1], [0], [1])


@both
def test_failed_rows_do_not_affect_other_rows(backend: str) -> None:
    nan = float("nan")
    logits = [[0.0, 1.0], [nan, 1.0], [0.0, nan], [INF, 0.0], [-INF, -INF], [3.0, 2.0], [1.0, 2.0]]
    row_options = [RowOptions(temperature=0.0, draft_id=1) for _ in logits]
    row_options[5].banned = [0, 1]
    row_options[2].temperature = 1.0
    row_options[6].vocab_limit = 0
    batch, buffer = batch_of(row_options), logits_of(logits)
    registry.lookup(backend)("sample")(buffer.tensor, batch, 7, False)
    tokens, statuses, allowed = results_of(batch, 7)
    assert tokens == [1, -1, -1, -1, -1, -1, -1]
    assert statuses == [RowStatus.OK, *[RowStatus.NAN] * 3, *[RowStatus.EMPTY] * 3]
    assert allowed == [1, 0, 0, 0, 0, 0, 0]


def test_nan_beyond_the_tokenizer_is_ignored() -> None:
    batch = batch_of([RowOptions(temperature=0.0, vocab_limit=2)])
    sample(logits_of([0.0, 1.0, float("nan")]).tensor, batch, 1)
    assert results_of(batch, 1)[:2] == ([1], [0])


# Rows of ids 0, 1, 2, whose argmax is row % 3: two requests of four and three rows, one row alone, one that holds NaN.
@both
@pytest.mark.parametrize(
    ("drafts", "skipped"),
    [
        ([0, 1, 2, -1, 1, 2, -1, -1, 2, -1], [9]),
        ([0, 0, 2, -1, 1, 2, -1, -1, 2, -1], [2, 3, 9]),
        ([1, 1, 2, -1, 1, 0, -1, -1, 2, -1], [1, 2, 3, 6, 9]),
    ],
)
def test_rows_after_a_rejected_draft_are_skipped(backend: str, drafts: list[int], skipped: list[int]) -> None:
    values = np.eye(3, dtype=np.float32)[np.arange(10) % 3]
    values[8, 0] = np.nan
    batch = batch_of([RowOptions(temperature=0.0, draft_id=draft) for draft in drafts])
    registry.lookup(backend)("sample")(logits_of(values).tensor, batch, 10, False, True)
    tokens, statuses, allowed = results_of(batch, 10)
    assert [row for row in range(10) if statuses[row] == RowStatus.SKIPPED] == skipped
    sampled = [row for row in range(10) if row not in skipped and row != 8]
    assert [tokens[row] for row in sampled] == [row % 3 for row in sampled]
    assert statuses[8] == RowStatus.NAN and all(statuses[row] == RowStatus.OK for row in sampled)
    assert all(tokens[row] == -1 and allowed[row] == 0 for row in skipped)


@both
def test_a_prefix_that_rounds_to_top_p_reaches_it(backend: str) -> None:
    shares = np.log([1e-8] + 8 * [9e-9])  # 1 / (1 + 8.2e-8) is nearest to 1 - 2^-24, the largest float below 1
    batch = batch_of([RowOptions(top_p=1 - 2**-24, draft_id=1)])
    registry.lookup(backend)("sample")(logits_of([0.0, *shares]).tensor, batch, 1, False)
    assert results_of(batch, 1) == ([0], [0], [0])


def test_only_the_first_rows_are_read_and_written() -> None:
    batch, buffer = (
        batch_of([RowOptions(temperature=0.0), RowOptions(temperature=0.0)]),
        logits_of([[1.0, 2.0], [3.0, 1.0]]),
    )
    batch.token_ids.array[:] = -7
    sample(buffer.tensor, batch, 1)
    assert batch.token_ids.array.tolist() == [1, -7]


def test_lists_grow_and_preserve_their_contents() -> None:
    batch = SamplingBatch(1)
    first = batch.append_history([4, 5])
    second = batch.append_history(np.arange(5000))
    assert (first, second) == (0, 2)
    assert batch.history.array[:4].tolist() == [4, 5, 0, 1] and batch.history.array[5001] == 4999
    batch.clear()
    assert batch.append_history([9]) == 0


def test_ranges_outside_their_list_are_refused_by_row() -> None:
    batch, logits = batch_of([RowOptions(), RowOptions()]), logits_of([[0.0], [0.0]]).tensor
    batch.int_params.array[1, 5] = batch.history.array.size + 1
    with pytest.raises(ValueError, match=r"sample: history: .* row 1"):
        sample(logits, batch, 2)
    with pytest.raises(ValueError, match="sample: logits"):
        sample(logits, batch, 3)


@pytest.mark.parametrize("begin", [-2, 1023])
def test_a_mask_outside_the_words_is_refused_by_row(begin: int) -> None:
    batch, logits = batch_of([RowOptions(), RowOptions()]), logits_of([[0.0] * 33] * 2).tensor
    batch.int_params.array[1, IntColumn.MASK_BEGIN] = begin
    with pytest.raises(ValueError, match=r"sample: mask_words: expected a range within 1024 entries, got .* row 1"):
        sample(logits, batch, 2)
    batch.int_params.array[1, IntColumn.VOCAB_LIMIT] = 0  # needs no word
    batch.int_params.array[1, IntColumn.MASK_BEGIN] = 1024
    sample(logits, batch, 2)
