# SPDX-License-Identifier: Apache-2.0
"""Sampled tokens follow the exact distribution: chi-square tests with fixed seeds, and samples that must fail them."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fastdeploy.ops.reference.sampling import filtered
from fastdeploy.ops.sampling import IntColumn, SamplingBatch, sample
from fastdeploy.ops.verify import VerifyBatch, verify_draft_tokens
from tests.ops.sampling_rows import RowOptions, batch_of, logits_of

NUM_DRAWS = 100_000
LARGE = 151_936
RNG = np.random.default_rng(20)
SMALL_LOGITS = (RNG.standard_normal(24) * 1.5).astype(np.float32)
OPTIONS = [
    RowOptions(),
    RowOptions(temperature=0.6),
    RowOptions(top_k=9),
    RowOptions(top_p=0.8),
    RowOptions(min_p=0.08),
    RowOptions(temperature=1.4, top_k=15, top_p=0.9, min_p=0.05),
]


def p_value(tokens: NDArray, probability: NDArray) -> float:
    """Return the p-value of a chi-square test; 0 if an id of probability 0 was drawn."""
    counts = np.bincount(tokens, minlength=len(probability))
    if counts[probability == 0].any():
        return 0.0
    kept = probability > 0
    return float(stats.chisquare(counts[kept], probability[kept] / probability.sum() * counts.sum()).pvalue)


def probability_of(logits: NDArray, options: RowOptions) -> NDArray[np.float64]:
    """Return the exact distribution after the filters."""
    kept = filtered(logits / np.float32(options.temperature), options.top_k, options.top_p, options.min_p).astype(
        np.float64
    )
    weights = np.exp(kept - kept.max())
    return weights / weights.sum()


def draw(
    logits: NDArray, options: RowOptions, seeds: NDArray, positions: NDArray, drafts: NDArray | None = None
) -> SamplingBatch:
    """Return a sampled batch with one row per (seed, position)."""
    batch, single = SamplingBatch(len(seeds)), batch_of([options])
    ints = batch.int_params.array
    batch.float_params.array[:], ints[:] = single.float_params.array[0], single.int_params.array[0]
    ints[:, IntColumn.SEED], ints[:, IntColumn.POSITION] = seeds, positions
    if drafts is not None:
        ints[:, IntColumn.DRAFT_ID] = drafts
    sample(logits_of(np.broadcast_to(logits, (len(seeds), len(logits)))).tensor, batch, len(seeds))
    return batch


def verified(options: RowOptions, relaxed: bool) -> NDArray:
    """Return the tokens emitted first when every request carries one random draft."""
    drafts = np.repeat(np.random.default_rng(1).integers(0, len(SMALL_LOGITS), NUM_DRAWS), 2)
    drafts[1::2] = -1
    batch = draw(SMALL_LOGITS, options, np.arange(2 * NUM_DRAWS), np.full(2 * NUM_DRAWS, 7), drafts)
    verification = VerifyBatch(2 * NUM_DRAWS)
    verification.fill(np.arange(0, 2 * NUM_DRAWS, 2), np.full(NUM_DRAWS, 2))
    verify_draft_tokens(
        batch.token_ids.tensor, batch.int_params.tensor, batch.draft_is_allowed.tensor, verification, relaxed, 0
    )
    accepted = verification.num_accepted.array[:NUM_DRAWS]
    assert 0 < accepted.sum() < NUM_DRAWS
    return verification.emitted.array[::2]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_at_many_positions_follow_the_distribution(options: RowOptions) -> None:
    batch = draw(SMALL_LOGITS, options, np.full(NUM_DRAWS, 1234), np.arange(NUM_DRAWS))
    assert p_value(batch.token_ids.array, probability_of(SMALL_LOGITS, options)) > 1e-3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_of_many_seeds_follow_the_distribution(options: RowOptions) -> None:
    batch = draw(SMALL_LOGITS, options, np.arange(NUM_DRAWS), np.full(NUM_DRAWS, 40))
    assert p_value(batch.token_ids.array, probability_of(SMALL_LOGITS, options)) > 1e-3


def test_the_test_detects_a_slightly_wrong_temperature() -> None:
    batch = draw(SMALL_LOGITS, RowOptions(temperature=1.03), np.full(NUM_DRAWS, 1234), np.arange(NUM_DRAWS))
    assert p_value(batch.token_ids.array, probability_of(SMALL_LOGITS, RowOptions())) < 1e-6


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=str)
def test_verified_tokens_follow_the_distribution(options: RowOptions) -> None:
    assert p_value(verified(options, relaxed=False), probability_of(SMALL_LOGITS, options)) > 1e-3


def test_relaxed_verification_and_greedy_sampling_fail_the_test() -> None:
    exact = probability_of(SMALL_LOGITS, OPTIONS[-1])
    assert p_value(verified(OPTIONS[-1], relaxed=True), exact) < 1e-6
    greedy = draw(SMALL_LOGITS, RowOptions(temperature=0.0), np.arange(100), np.arange(100))
    assert p_value(greedy.token_ids.array, exact) < 1e-6


def test_draws_at_neighbouring_positions_are_independent() -> None:
    tokens = draw(np.zeros(4, np.float32), RowOptions(), np.full(NUM_DRAWS, 9), np.arange(NUM_DRAWS)).token_ids.array
    pairs = tokens[0::2] * 4 + tokens[1::2]
    assert p_value(pairs, np.full(16, 1 / 16)) > 1e-3


def draw_large(logits: NDArray, num_draws: int) -> NDArray:
    """Return draws from one row of 151,936 ids, 32 rows at a time."""
    rows, batch = logits_of(np.broadcast_to(logits, (32, LARGE))).tensor, batch_of([RowOptions(seed=77)] * 32)
    tokens = []
    for first in range(0, num_draws, 32):
        batch.int_params.array[:, IntColumn.POSITION] = np.arange(first, first + 32)
        sample(rows, batch, 32)
        tokens.append(batch.token_ids.array.copy())
    return np.concatenate(tokens)


def test_two_ids_of_a_large_vocabulary_are_drawn_in_their_ratio() -> None:
    logits = np.full(LARGE, -80.0, np.float32)
    logits[77], logits[151_001] = 1.0, 0.0
    tokens = draw_large(logits, 20_000)
    assert set(tokens.tolist()) == {77, 151_001}
    first = 1 / (1 + np.exp(-1.0))
    assert stats.binomtest(int((tokens == 77).sum()), len(tokens), first).pvalue > 1e-3


def test_a_flat_large_row_has_no_bias_by_id() -> None:
    tokens = draw_large(np.zeros(LARGE, np.float32), 8_000)
    for groups, parts in ((tokens * 64 // LARGE, 64), (tokens % 64, 64), (tokens % 4, 4)):
        assert p_value(groups, np.full(parts, 1 / parts)) > 1e-3
    assert len(set(tokens.tolist())) > 0.95 * len(tokens)  # 8,000 of 151,936: about 2.6 % repeat
