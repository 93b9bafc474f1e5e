# SPDX-License-Identifier: Apache-2.0
"""Sampling of random rows: equality with the reference, and independence of rows and threads."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fastdeploy.ops.reference import sampling as reference
from fastdeploy.ops.sampling import sample
from tests.ops.noise import gumbel_noise
from tests.ops.sampling_rows import RowOptions, batch_of, logits_of, random_logits, random_options, results_of


@pytest.mark.parametrize("vocab_size", [1, 5, 63, 64, 65, 200, 1000, 4099])
def test_random_rows_are_sampled_as_by_the_reference(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = 60
    row_options = [random_options(rng, vocab_size) for _ in range(rows)]
    values = random_logits(rng, rows, vocab_size)
    got, want = batch_of(row_options), batch_of(row_options)
    got_logits, want_logits = logits_of(values), logits_of(values)
    sample(got_logits.tensor, got, rows, keep_processed=True)
    reference.sample(want_logits.tensor, want, rows, keep_processed=True)
    different = (np.isinf(got_logits.array) != np.isinf(want_logits.array)).any(axis=1)
    assert not different.any(), f"another allowed set in rows {np.flatnonzero(different)}"
    assert results_of(got, rows) == results_of(want, rows)
    assert np.allclose(got_logits.array, want_logits.array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.5, 3.0, 12.0])
def test_filters_of_a_large_vocabulary_equal_the_reference(spread: float) -> None:
    vocab_size = 151_936
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((6, vocab_size)) * spread).astype(np.float32)
    row_options = [
        RowOptions(top_p=0.9),
        RowOptions(top_k=50),
        RowOptions(top_k=5000, top_p=0.7),
        RowOptions(min_p=0.1),
    ]
    row_options += [RowOptions(top_p=0.999, temperature=0.6), RowOptions(top_k=151_000, top_p=0.3)]
    for options in row_options:
        options.seed, options.position = 17, 99
    batch, buffer = batch_of(row_options), logits_of(values)
    sample(buffer.tensor, batch, len(row_options), keep_processed=True)
    for row, options in enumerate(row_options):
        want = reference.filtered(
            values[row] / np.float32(options.temperature), options.top_k, options.top_p, options.min_p
        )
        assert np.array_equal(np.isinf(buffer.array[row]), np.isinf(want)), options
        assert batch.token_ids.array[row] == np.argmax(want + gumbel_noise(17, 99, vocab_size))


@pytest.mark.parametrize("outlier", [0.0, 4.0, 12.0])
@pytest.mark.parametrize("raised", [-3.0, 3.0])
def test_top_p_is_exact_where_a_sample_of_the_vocabulary_misleads(raised: float, outlier: float) -> None:
    vocab_size = 151_936
    rng = np.random.default_rng(6)
    values = rng.standard_normal(vocab_size).astype(np.float32)
    values[np.arange(vocab_size) // 64 % 32 == 0] += np.float32(raised)  # the blocks that the kernel samples
    values[77_777] += np.float32(outlier)
    row_options = [RowOptions(top_p=top_p) for top_p in (0.0, 0.2, 0.5, 0.9, 0.999)]
    row_options.append(RowOptions(top_p=0.8, top_k=3000))
    batch, buffer = batch_of(row_options), logits_of(np.tile(values, (len(row_options), 1)))
    sample(buffer.tensor, batch, len(row_options), keep_processed=True)
    for row, options in enumerate(row_options):
        want = reference.filtered(values, options.top_k, options.top_p, options.min_p)
        assert np.array_equal(np.isinf(buffer.array[row]), np.isinf(want)), options


def test_skipping_does_not_change_earlier_rows_and_does_not_depend_on_threads() -> None:
    rows, vocab_size = 48, 70_000  # enough work for several threads
    rng = np.random.default_rng(4)
    values = random_logits(rng, rows, vocab_size)
    row_options = [RowOptions(temperature=0.7, seed=row) for row in range(rows)]
    every = batch_of(row_options)
    sample(logits_of(values).tensor, every, rows)
    tokens = every.token_ids.array[:rows].copy()
    for row, options in enumerate(
        row_options
    ):  # six requests of eight rows; the first i drafts of request i are accepted
        options.draft_id = -1 if row % 8 == 7 else int(tokens[row]) + (row % 8 >= row // 8)
    for _ in range(5):
        batch = batch_of(row_options)
        sample(logits_of(values).tensor, batch, rows, stop_at_rejections=True)
        expected = [int(tokens[row]) if row % 8 <= row // 8 else -1 for row in range(rows)]
        assert batch.token_ids.array[:rows].tolist() == expected


def rows_near_the_end_of_top_p(rng: np.random.Generator, rows: int) -> NDArray[np.float32]:
    """Return rows of 700 ids: random, equal, equal only after division by the temperature, and large logits."""
    values = random_logits(rng, rows, 700)
    values[1::5] = np.float32(3) + rng.integers(0, 4, (len(values[1::5]), 700)).astype(np.float32) * np.float32(2**-22)
    values[2::5] += np.float32(3e6) * rng.choice([-1, 1], (len(values[2::5]), 1)).astype(np.float32)
    values[4::5] *= np.float32(10) ** rng.integers(0, 30, (len(values[4::5]), 1)).astype(np.float32)
    values[3::5, rng.integers(0, 700, 50)] = -np.inf
    return values


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_checking_top_p_for_single_ids_agrees_with_computing_the_allowed_set(temperature: float) -> None:
    rows = 3000
    rng = np.random.default_rng(8)
    values = rows_near_the_end_of_top_p(rng, rows)
    likely = np.argsort(-values, axis=1)
    row_options = [
        RowOptions(
            temperature=temperature,
            top_p=float(rng.uniform(0.2, 1)) if row % 7 else 1 - 2**-24,
            top_k=300 if row % 4 == 1 else 0,
            min_p=0.02 if row % 3 == 1 else 0.0,
            seed=row,
            draft_id=int(likely[row, rng.integers(0, 60)]),
        )
        for row in range(rows)
    ]
    checked, computed = batch_of(row_options), batch_of(row_options)
    sample(logits_of(values).tensor, checked, rows)
    sample(logits_of(values).tensor, computed, rows, keep_processed=True)
    tokens, _, allowed = (np.array(field) for field in results_of(computed, rows))
    assert 0.1 < allowed.mean() < 0.9 and (tokens >= 0).all()
    assert results_of(checked, rows) == results_of(computed, rows)


def test_logits_are_restored_bit_for_bit() -> None:
    rng = np.random.default_rng(11)
    row_options = [random_options(rng, 300) for _ in range(40)]
    for options in row_options:  # the same id in every list: edits must be undone in reverse order
        options.bias, options.banned, options.output, options.repetition = {7: 1.5, 8: -0.3}, [7, 7, 8], [7, 8, 7], 1.3
    values = random_logits(rng, 40, 300)
    buffer = logits_of(values)
    sample(buffer.tensor, batch_of(row_options), 40)
    assert np.array_equal(buffer.array.view(np.int32), values.view(np.int32))


@pytest.mark.parametrize("vocab_size", [70, 4096, 40_000, 140_000])  # in the last case, threads share a single row
def test_a_row_has_the_same_bits_alone_and_among_other_rows(vocab_size: int) -> None:
    rng = np.random.default_rng(5)
    rows = 23
    row_options = [random_options(rng, vocab_size) for _ in range(rows)]
    values = random_logits(rng, rows, vocab_size)
    order = rng.permutation(rows)
    together, batch = logits_of(values[order]), batch_of([row_options[i] for i in order])
    sample(together.tensor, batch, rows, keep_processed=True)
    for index, row in enumerate(order):
        alone, single = logits_of(values[row]), batch_of([row_options[row]])
        sample(alone.tensor, single, 1, keep_processed=True)
        assert np.array_equal(alone.array[0].view(np.int32), together.array[index].view(np.int32))
        assert [x[0] for x in results_of(single, 1)] == [x[index] for x in results_of(batch, rows)]
