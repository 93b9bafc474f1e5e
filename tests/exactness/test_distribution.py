# SPDX-License-Identifier: Apache-2.0
"""What is emitted at a drafted position follows the target's distribution; lossy strategies fail the same test.

Sampling and verification are the engine's own operators, a hundred thousand draws each, every draw its own seed.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.sampling import FloatColumn, IntColumn, SamplingBatch, sample
from fastdeploy.ops.verify import AcceptPolicy, VerifyBatch, verify_draft_tokens

VOCAB = 24
TOP_P, TOP_K, TEMPERATURE = 0.9, 16, 0.8
DRAWS, ROWS = 100_000, 2_000
SIGNIFICANCE = 1e-4


def target_logits() -> np.ndarray:
    return np.random.default_rng(5).normal(0.0, 1.5, VOCAB).astype(np.float32)


def exact_distribution(logits: np.ndarray) -> np.ndarray:
    """Return the distribution after temperature, top_k and top_p, from its definition in float64."""
    scaled = logits.astype(np.float64) / TEMPERATURE
    order = np.lexsort((np.arange(VOCAB), -scaled))[:TOP_K]
    kept = np.exp(scaled[order] - scaled.max())
    kept /= kept.sum()
    order = order[: int(np.searchsorted(np.cumsum(kept), TOP_P)) + 1]
    probabilities = np.zeros(VOCAB)
    probabilities[order] = np.exp(scaled[order] - scaled.max())
    return probabilities / probabilities.sum()


def emitted_counts(strategy: str, draft: int) -> np.ndarray:
    """Return how often each id is emitted first where `draft` was proposed."""
    logits = HostBuffer([2 * ROWS, VOCAB], "float32")
    logits.array[:] = target_logits()
    batch, verification = SamplingBatch(2 * ROWS), VerifyBatch(2 * ROWS)
    floats, ints = batch.float_params.array, batch.int_params.array
    floats[:, FloatColumn.TEMPERATURE] = 0.0 if strategy == "greedy" else TEMPERATURE
    floats[:, FloatColumn.TOP_P] = TOP_P
    ints[:, IntColumn.TOP_K] = TOP_K
    ints[:, IntColumn.VOCAB_LIMIT] = VOCAB
    ints[0::2, IntColumn.DRAFT_ID], ints[1::2, IntColumn.DRAFT_ID] = draft, -1
    ints[0::2, IntColumn.POSITION], ints[1::2, IntColumn.POSITION] = 70, 71
    counts = np.zeros(VOCAB, np.int64)
    for go in range(DRAWS // ROWS):
        seeds = np.random.default_rng(go).integers(0, 2**63, ROWS)
        ints[0::2, IntColumn.SEED] = ints[1::2, IntColumn.SEED] = seeds
        sample(logits.tensor, batch, 2 * ROWS)
        verification.fill(2 * np.arange(ROWS), [2] * ROWS)
        verify_draft_tokens(
            batch.token_ids.tensor,
            batch.int_params.tensor,
            batch.draft_survives.tensor,
            verification,
            strategy == "topp_relaxed",
            AcceptPolicy.NORMAL,
        )
        counts += np.bincount(verification.emitted.array[0 : 2 * ROWS : 2], minlength=VOCAB)
    return counts


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the chi-square test's p value; an id that must not occur and does makes it 0."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    return float(stats.chisquare(counts[possible], probabilities[possible] * counts.sum()).pvalue)


def drafts() -> list[int]:
    """A likely draft, an unlikely one of the surviving set, and one outside it."""
    order = np.argsort(-exact_distribution(target_logits()))
    survivors = int((exact_distribution(target_logits()) > 0).sum())
    return [int(order[0]), int(order[survivors - 1]), int(order[-1])]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("strategy", ["topp", "target_match"])
def test_exact_strategies_follow_the_target(strategy: str, which: int) -> None:
    counts = emitted_counts(strategy, drafts()[which])
    assert p_value(counts, exact_distribution(target_logits())) > SIGNIFICANCE


@pytest.mark.parametrize("strategy", ["topp_relaxed", "greedy"])
def test_other_strategies_are_seen_not_to(strategy: str) -> None:
    counts = emitted_counts(strategy, drafts()[1])
    assert p_value(counts, exact_distribution(target_logits())) < SIGNIFICANCE


def test_distribution_has_something_to_filter() -> None:
    probabilities = exact_distribution(target_logits())
    assert 5 < (probabilities > 0).sum() < TOP_K
