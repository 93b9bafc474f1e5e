# SPDX-License-Identifier: Apache-2.0
"""The sampling rule: order and meaning of its steps, equality with the reference, independence of rows."""

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops import registry
from fastdeploy.ops.reference import sampling as reference
from fastdeploy.ops.sampling import IntColumn, LogprobBuffers, RowStatus, SamplingBatch, gumbel_noise, logprobs, sample
from tests.ops.sampling_rows import (
    RowRule,
    batch_of,
    logits_of,
    mask_of,
    random_logits,
    random_rule,
    results_of,
    tensor,
)

INF = float("inf")


def processed(logits: list[float], rule: RowRule, backend: str) -> list[float]:
    """Return one row after processing."""
    buffer, batch = logits_of(logits), batch_of([rule])
    registry.lookup(backend)("sample")(buffer.tensor, batch, 1, True)
    return buffer.array[0].tolist()


def survivors(logits: list[float], rule: RowRule, backend: str) -> list[int]:
    return [i for i, x in enumerate(processed(logits, rule, backend)) if x > -INF]


both = pytest.mark.parametrize("backend", ["cpu", "reference"])
TENTHS = np.log([0.4, 0.3, 0.2, 0.1]).tolist()


@both
def test_top_k_comes_before_top_p_which_sees_renormalised_probabilities(backend: str) -> None:
    assert survivors(TENTHS, RowRule(top_p=0.5), backend) == [0, 1]
    assert survivors(TENTHS, RowRule(top_k=2, top_p=0.5), backend) == [0]  # 0.4 of 0.7 reaches 0.5


@both
def test_temperature_comes_before_top_p_and_min_p(backend: str) -> None:
    assert survivors(TENTHS, RowRule(top_p=0.6), backend) == [0, 1]
    assert survivors(TENTHS, RowRule(top_p=0.6, temperature=0.25), backend) == [0]
    assert survivors(TENTHS, RowRule(min_p=0.6), backend) == [0, 1]
    assert survivors(TENTHS, RowRule(min_p=0.6, temperature=0.25), backend) == [0]
    assert survivors(TENTHS, RowRule(min_p=0.6, temperature=4.0), backend) == [0, 1, 2, 3]


@both
def test_penalties_come_after_bias_and_before_temperature(backend: str) -> None:
    rule = RowRule(bias={0: 3.0}, repetition=2.0, presence=0.25, frequency=0.5, output=[0, 0], temperature=0.5)
    assert processed([-1.0, 0.0], rule, backend) == [(2.0 / 2.0 - 0.25 - 0.5 * 2) / 0.5, 0.0]


@both
def test_repetition_divides_positive_and_multiplies_negative_logits_once_per_id(backend: str) -> None:
    rule = RowRule(repetition=2.0, prompt=[0, 0, 1], output=[1])
    assert processed([3.0, -3.0, 3.0], rule, backend) == [1.5, -6.0, 3.0]


@both
def test_presence_and_frequency_look_at_output_only(backend: str) -> None:
    rule = RowRule(presence=1.0, frequency=0.5, prompt=[0, 1, 1], output=[1, 2, 2])
    assert processed([5.0, 5.0, 5.0], rule, backend) == [5.0, 3.5, 3.0]


@both
def test_banned_ids_and_ids_beyond_the_tokenizer_never_survive(backend: str) -> None:
    assert survivors([9.0, 1.0, 2.0, 9.0], RowRule(banned=[0], vocab_limit=3), backend) == [1, 2]


@both
def test_bias_cannot_bring_a_banned_id_back(backend: str) -> None:
    assert survivors([0.0, 0.0], RowRule(banned=[0], bias={0: 100.0}), backend) == [1]


@both
def test_only_ids_of_the_mask_survive_whatever_their_bias(backend: str) -> None:
    logits = [5.0, 1.0, 2.0, 3.0]
    assert survivors(logits, RowRule(mask=mask_of([1, 3], 4), bias={0: 100.0}), backend) == [1, 3]
    assert survivors(logits, RowRule(mask=mask_of([0, 1, 3], 4), banned=[0], vocab_limit=3), backend) == [1]


@both
def test_mask_comes_before_top_k_and_top_p(backend: str) -> None:
    assert survivors(TENTHS, RowRule(mask=mask_of([1, 2, 3], 4), top_k=2), backend) == [1, 2]
    assert survivors(TENTHS, RowRule(mask=mask_of([1, 2, 3], 4), top_p=0.5), backend) == [1]  # 0.3 of 0.6 reaches 0.5


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_one_id_chooses_it(backend: str, temperature: float) -> None:
    vocab_size = 151_936
    values = np.random.default_rng(4).standard_normal((3, vocab_size))
    ids = [0, 70_001, vocab_size - 1]
    rules = [RowRule(mask=mask_of([i], vocab_size), temperature=temperature, draft_id=i) for i in ids]
    batch, buffer = batch_of(rules), logits_of(values)
    registry.lookup(backend)("sample")(buffer.tensor, batch, 3, False)
    assert results_of(batch, 3) == (ids, [0, 0, 0], [1, 1, 1])


@both
def test_an_empty_mask_fails_its_row_and_no_neighbour(backend: str) -> None:
    rules = [RowRule(temperature=0.0), RowRule(mask=[0], temperature=0.0), RowRule(temperature=0.0)]
    batch, buffer = batch_of(rules), logits_of([[1.0, 2.0]] * 3)
    registry.lookup(backend)("sample")(buffer.tensor, batch, 3, False)
    assert results_of(batch, 3)[:2] == ([1, -1, 1], [RowStatus.OK, RowStatus.EMPTY, RowStatus.OK])


@both
def test_equal_logits_are_ordered_by_id(backend: str) -> None:
    assert survivors([1.0] * 10, RowRule(top_k=3), backend) == [0, 1, 2]
    assert survivors([0.0, 1.0, 0.0, 1.0, 0.0], RowRule(top_k=3), backend) == [0, 1, 3]
    assert survivors([0.0, -0.0, 0.0], RowRule(top_k=2), backend) == [0, 1]


@both
@pytest.mark.parametrize(("top_p", "kept"), [(0.0, 1), (0.05, 1), (0.1, 1), (0.3, 3), (0.31, 4), (0.9, 9), (0.95, 10)])
def test_top_p_keeps_the_prefix_that_reaches_it_inclusively(backend: str, top_p: float, kept: int) -> None:
    assert survivors([2.0] * 10, RowRule(top_p=top_p), backend) == list(range(kept))


@both
def test_min_p_is_relative_to_the_largest_survivor(backend: str) -> None:
    assert survivors([5.0, 4.5, 4.0], RowRule(min_p=0.5), backend) == [0, 1]
    assert survivors([5.0, 5.0, 4.9999], RowRule(min_p=1.0), backend) == [0, 1]


@both
@pytest.mark.parametrize("top_k", [0, -1, 3, 99])
def test_top_k_beyond_the_vocabulary_is_off(backend: str, top_k: int) -> None:
    assert survivors([1.0, 2.0, 3.0], RowRule(top_k=top_k), backend) == [0, 1, 2]


@both
def test_temperature_below_the_limit_is_argmax_with_ties_to_the_lowest_id(backend: str) -> None:
    logits, rules = [[1.0, 7.0, 7.0, 2.0]], [RowRule(temperature=9e-6, top_k=1, seed=5, draft_id=1)]
    batch, buffer = batch_of(rules), logits_of(logits)
    registry.lookup(backend)("sample")(buffer.tensor, batch, 1, False)
    assert results_of(batch, 1) == ([1], [0], [1])


@both
def test_failed_rows_do_not_touch_their_neighbours(backend: str) -> None:
    nan = float("nan")
    logits = [[0.0, 1.0], [nan, 1.0], [0.0, nan], [INF, 0.0], [-INF, -INF], [3.0, 2.0], [1.0, 2.0]]
    rules = [RowRule(temperature=0.0, draft_id=1) for _ in logits]
    rules[5].banned = [0, 1]
    rules[2].temperature = 1.0
    rules[6].vocab_limit = 0
    batch, buffer = batch_of(rules), logits_of(logits)
    registry.lookup(backend)("sample")(buffer.tensor, batch, 7, False)
    tokens, statuses, survives = results_of(batch, 7)
    assert tokens == [1, -1, -1, -1, -1, -1, -1]
    assert statuses == [RowStatus.OK, *[RowStatus.NAN] * 3, *[RowStatus.EMPTY] * 3]
    assert survives == [1, 0, 0, 0, 0, 0, 0]


def test_nan_beyond_the_tokenizer_is_of_no_consequence() -> None:
    batch = batch_of([RowRule(temperature=0.0, vocab_limit=2)])
    sample(logits_of([0.0, 1.0, float("nan")]).tensor, batch, 1)
    assert results_of(batch, 1)[:2] == ([1], [0])


@pytest.mark.parametrize("vocab_size", [1, 5, 63, 64, 65, 200, 1000, 4099])
def test_random_rows_equal_the_reference(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = 60
    rules = [random_rule(rng, vocab_size) for _ in range(rows)]
    values = random_logits(rng, rows, vocab_size)
    got, want = batch_of(rules), batch_of(rules)
    got_logits, want_logits = logits_of(values), logits_of(values)
    sample(got_logits.tensor, got, rows, keep_processed=True)
    reference.sample(want_logits.tensor, want, rows, keep_processed=True)
    different = (np.isinf(got_logits.array) != np.isinf(want_logits.array)).any(axis=1)
    assert not different.any(), f"other survivors in rows {np.flatnonzero(different)}"
    assert results_of(got, rows) == results_of(want, rows)
    assert np.allclose(got_logits.array, want_logits.array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.5, 3.0, 12.0])
def test_filters_equal_the_reference_on_a_large_vocabulary(spread: float) -> None:
    vocab_size = 151_936
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((6, vocab_size)) * spread).astype(np.float32)
    rules = [RowRule(top_p=0.9), RowRule(top_k=50), RowRule(top_k=5000, top_p=0.7), RowRule(min_p=0.1)]
    rules += [RowRule(top_p=0.999, temperature=0.6), RowRule(top_k=151_000, top_p=0.3)]
    for rule in rules:
        rule.seed, rule.position = 17, 99
    batch, buffer = batch_of(rules), logits_of(values)
    sample(buffer.tensor, batch, len(rules), keep_processed=True)
    for row, rule in enumerate(rules):
        want = reference.filtered(values[row] / np.float32(rule.temperature), rule.top_k, rule.top_p, rule.min_p)
        assert np.array_equal(np.isinf(buffer.array[row]), np.isinf(want)), rule
        assert batch.token_ids.array[row] == np.argmax(want + gumbel_noise(17, 99, vocab_size))


@pytest.mark.parametrize("outlier", [0.0, 4.0, 12.0])
@pytest.mark.parametrize("raised", [-3.0, 3.0])
def test_top_p_ends_where_a_sample_of_the_vocabulary_would_not_expect_it(raised: float, outlier: float) -> None:
    vocab_size = 151_936
    rng = np.random.default_rng(6)
    values = rng.standard_normal(vocab_size).astype(np.float32)
    values[np.arange(vocab_size) // 64 % 32 == 0] += np.float32(raised)  # the blocks that the kernel looks at first
    values[77_777] += np.float32(outlier)
    rules = [RowRule(top_p=top_p) for top_p in (0.0, 0.2, 0.5, 0.9, 0.999)]
    rules.append(RowRule(top_p=0.8, top_k=3000))
    batch, buffer = batch_of(rules), logits_of(np.tile(values, (len(rules), 1)))
    sample(buffer.tensor, batch, len(rules), keep_processed=True)
    for row, rule in enumerate(rules):
        want = reference.filtered(values, rule.top_k, rule.top_p, rule.min_p)
        assert np.array_equal(np.isinf(buffer.array[row]), np.isinf(want)), rule


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
def test_rows_behind_a_rejected_draft_are_skipped(backend: str, drafts: list[int], skipped: list[int]) -> None:
    values = np.eye(3, dtype=np.float32)[np.arange(10) % 3]
    values[8, 0] = np.nan
    batch = batch_of([RowRule(temperature=0.0, draft_id=draft) for draft in drafts])
    registry.lookup(backend)("sample")(logits_of(values).tensor, batch, 10, False, True)
    tokens, statuses, survives = results_of(batch, 10)
    assert [row for row in range(10) if statuses[row] == RowStatus.SKIPPED] == skipped
    chosen = [row for row in range(10) if row not in skipped and row != 8]
    assert [tokens[row] for row in chosen] == [row % 3 for row in chosen]
    assert statuses[8] == RowStatus.NAN and all(statuses[row] == RowStatus.OK for row in chosen)
    assert all(tokens[row] == -1 and survives[row] == 0 for row in skipped)


def test_skipping_changes_no_row_before_and_is_the_same_by_several_threads() -> None:
    rows, vocab_size = 48, 70_000  # worth sharing among threads
    rng = np.random.default_rng(4)
    values = random_logits(rng, rows, vocab_size)
    rules = [RowRule(temperature=0.7, seed=row) for row in range(rows)]
    every = batch_of(rules)
    sample(logits_of(values).tensor, every, rows)
    tokens = every.token_ids.array[:rows].copy()
    for row, rule in enumerate(rules):  # six requests of eight rows; of request i the first i drafts are right
        rule.draft_id = -1 if row % 8 == 7 else int(tokens[row]) + (row % 8 >= row // 8)
    for _ in range(5):
        batch = batch_of(rules)
        sample(logits_of(values).tensor, batch, rows, stop_at_rejections=True)
        expected = [int(tokens[row]) if row % 8 <= row // 8 else -1 for row in range(rows)]
        assert batch.token_ids.array[:rows].tolist() == expected


def rows_near_the_end_of_top_p(rng: np.random.Generator, rows: int) -> NDArray[np.float32]:
    """Return rows of 700 ids: random ones, equal ones, some of a few values that are one once divided, large ones."""
    values = random_logits(rng, rows, 700)
    values[1::5] = np.float32(3) + rng.integers(0, 4, (len(values[1::5]), 700)).astype(np.float32) * np.float32(2**-22)
    values[2::5] += np.float32(3e6) * rng.choice([-1, 1], (len(values[2::5]), 1)).astype(np.float32)
    values[4::5] *= np.float32(10) ** rng.integers(0, 30, (len(values[4::5]), 1)).astype(np.float32)
    values[3::5, rng.integers(0, 700, 50)] = -np.inf
    return values


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_top_p_keeps_the_same_ids_whether_or_not_it_has_to_name_them_all(temperature: float) -> None:
    rows = 3000
    rng = np.random.default_rng(8)
    values = rows_near_the_end_of_top_p(rng, rows)
    likely = np.argsort(-values, axis=1)
    rules = [
        RowRule(
            temperature=temperature,
            top_p=float(rng.uniform(0.2, 1)) if row % 7 else 1 - 2**-24,
            top_k=300 if row % 4 == 1 else 0,
            min_p=0.02 if row % 3 == 1 else 0.0,
            seed=row,
            draft_id=int(likely[row, rng.integers(0, 60)]),
        )
        for row in range(rows)
    ]
    asked, named = batch_of(rules), batch_of(rules)
    sample(logits_of(values).tensor, asked, rows)
    sample(logits_of(values).tensor, named, rows, keep_processed=True)
    tokens, _, survives = (np.array(field) for field in results_of(named, rows))
    assert 0.1 < survives.mean() < 0.9 and (tokens >= 0).all()
    assert results_of(asked, rows) == results_of(named, rows)


@both
def test_a_prefix_that_rounds_to_top_p_reaches_it(backend: str) -> None:
    shares = np.log([1e-8] + 8 * [9e-9])  # 1 / (1 + 8.2e-8) is nearest to 1 - 2^-24, the largest float below 1
    batch = batch_of([RowRule(top_p=1 - 2**-24, draft_id=1)])
    registry.lookup(backend)("sample")(logits_of([0.0, *shares]).tensor, batch, 1, False)
    assert results_of(batch, 1) == ([0], [0], [0])


def test_logits_come_back_unchanged_bit_for_bit() -> None:
    rng = np.random.default_rng(11)
    rules = [random_rule(rng, 300) for _ in range(40)]
    for rule in rules:  # the same id in every list: undoing must go backwards
        rule.bias, rule.banned, rule.output, rule.repetition = {7: 1.5, 8: -0.3}, [7, 7, 8], [7, 8, 7], 1.3
    values = random_logits(rng, 40, 300)
    buffer = logits_of(values)
    sample(buffer.tensor, batch_of(rules), 40)
    assert np.array_equal(buffer.array.view(np.int32), values.view(np.int32))


@pytest.mark.parametrize("vocab_size", [70, 4096, 40_000, 140_000])  # of the last, threads share a single row
def test_a_row_gives_the_same_bits_alone_and_in_any_company(vocab_size: int) -> None:
    rng = np.random.default_rng(5)
    rows = 23
    rules = [random_rule(rng, vocab_size) for _ in range(rows)]
    values = random_logits(rng, rows, vocab_size)
    order = rng.permutation(rows)
    together, company = logits_of(values[order]), batch_of([rules[i] for i in order])
    sample(together.tensor, company, rows, keep_processed=True)
    for place, row in enumerate(order):
        alone, single = logits_of(values[row]), batch_of([rules[row]])
        sample(alone.tensor, single, 1, keep_processed=True)
        assert np.array_equal(alone.array[0].view(np.int32), together.array[place].view(np.int32))
        assert [x[0] for x in results_of(single, 1)] == [x[place] for x in results_of(company, rows)]


def test_only_the_first_rows_are_read_and_written() -> None:
    batch, buffer = batch_of([RowRule(temperature=0.0), RowRule(temperature=0.0)]), logits_of([[1.0, 2.0], [3.0, 1.0]])
    batch.token_ids.array[:] = -7
    sample(buffer.tensor, batch, 1)
    assert batch.token_ids.array.tolist() == [1, -7]


def test_lists_grow_and_keep_what_they_hold() -> None:
    batch = SamplingBatch(1)
    first = batch.append_history([4, 5])
    second = batch.append_history(np.arange(5000))
    assert (first, second) == (0, 2)
    assert batch.history.array[:4].tolist() == [4, 5, 0, 1] and batch.history.array[5001] == 4999
    batch.clear()
    assert batch.append_history([9]) == 0


def test_ranges_outside_their_list_are_refused_by_row() -> None:
    batch, logits = batch_of([RowRule(), RowRule()]), logits_of([[0.0], [0.0]]).tensor
    batch.int_params.array[1, 5] = batch.history.array.size + 1
    with pytest.raises(ValueError, match=r"sample: history: .* row 1"):
        sample(logits, batch, 2)
    with pytest.raises(ValueError, match="sample: logits"):
        sample(logits, batch, 3)


@pytest.mark.parametrize("begin", [-2, 1023])
def test_a_mask_outside_the_words_is_refused_by_row(begin: int) -> None:
    batch, logits = batch_of([RowRule(), RowRule()]), logits_of([[0.0] * 33] * 2).tensor
    batch.int_params.array[1, IntColumn.MASK_BEGIN] = begin
    with pytest.raises(ValueError, match=r"sample: mask_words: expected a range within 1024 entries, got .* row 1"):
        sample(logits, batch, 2)
    batch.int_params.array[1, IntColumn.VOCAB_LIMIT] = 0  # needs no word
    batch.int_params.array[1, IntColumn.MASK_BEGIN] = 1024
    sample(logits, batch, 2)


# Log-probabilities


def test_logprobs_match_a_float64_softmax() -> None:
    rng = np.random.default_rng(2)
    values = random_logits(rng, 9, 5000)
    values[4, 100:200] = -INF
    rows, chosen = rng.integers(0, 9, 12).tolist(), rng.integers(0, 5000, 12).tolist()
    got, want = LogprobBuffers(12), LogprobBuffers(12)
    logits = logits_of(values).tensor
    logprobs(logits, tensor(rows), tensor(chosen), 12, 20, got)
    reference.logprobs(logits, tensor(rows), tensor(chosen), 12, 20, want)
    assert np.array_equal(got.top_ids.array, want.top_ids.array)
    assert np.array_equal(got.chosen_rank.array, want.chosen_rank.array)
    assert np.allclose(got.top_logprobs.array, want.top_logprobs.array, rtol=2e-7, atol=2e-6)
    assert np.allclose(got.chosen_logprob.array, want.chosen_logprob.array, rtol=2e-7, atol=2e-6)


def test_ranks_and_top_ids_break_ties_by_id() -> None:
    out = LogprobBuffers(3, 4)
    logits = logits_of([1.0, 2.0, 2.0, 0.0]).tensor
    logprobs(logits, tensor([0, 0, 0]), tensor([1, 2, 3]), 3, 4, out)
    assert out.chosen_rank.array.tolist() == [1, 2, 4]
    assert out.top_ids.array[0].tolist() == [1, 2, 0, 3]


def test_logprobs_of_a_vocabulary_smaller_than_top_n_are_padded() -> None:
    out = LogprobBuffers(1, 5)
    logprobs(logits_of([0.0, 0.0]).tensor, tensor([0]), tensor([1]), 1, 5, out)
    assert out.top_ids.array[0].tolist() == [0, 1, -1, -1, -1]
    assert np.allclose(out.top_logprobs.array[0, :2], -np.log(2))
    assert np.isnan(out.top_logprobs.array[0, 2:]).all()


def test_logprobs_row_alone_has_the_same_bits() -> None:
    rng = np.random.default_rng(8)
    logits = logits_of(random_logits(rng, 16, 40_000)).tensor
    chosen = rng.integers(0, 40_000, 16).tolist()
    together = LogprobBuffers(16)
    logprobs(logits, tensor(list(range(16))), tensor(chosen), 16, 20, together)
    for row in range(16):
        alone = LogprobBuffers(1)
        logprobs(logits, tensor([row]), tensor([chosen[row]]), 1, 20, alone)
        assert alone.chosen_logprob.array[0] == together.chosen_logprob.array[row]
        assert np.array_equal(alone.top_logprobs.array[0], together.top_logprobs.array[row])


def test_logprobs_refuse_what_is_out_of_range() -> None:
    logits, out = logits_of([0.0, 1.0]).tensor, LogprobBuffers(1, 2)
    with pytest.raises(ValueError, match=r"logprobs: chosen: expected 0\.\.1, got 2"):
        logprobs(logits, tensor([0]), tensor([2]), 1, 1, out)
    with pytest.raises(ValueError, match=r"logprobs: rows: expected 0\.\.0, got 1"):
        logprobs(logits, tensor([1]), tensor([0]), 1, 1, out)
    with pytest.raises(ValueError, match="logprobs: top_n"):
        logprobs(logits, tensor([0]), tensor([0]), 1, 3, out)
    with pytest.raises(ValueError, match="logprobs: logits"):
        logprobs(logits.astype(paddle.bfloat16), tensor([0]), tensor([0]), 1, 1, out)
