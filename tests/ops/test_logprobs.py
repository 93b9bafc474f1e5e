# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities: equality with a float64 softmax, ranks, ties, independence of rows."""

import numpy as np
import paddle
import pytest

from fastdeploy.ops.reference import sampling as reference
from fastdeploy.ops.sampling import LogprobBuffers, logprobs
from tests.ops.sampling_rows import logits_of, random_logits, tensor

INF = float("inf")


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


@pytest.mark.parametrize("vocab_size", [5, 300, 4097])
def test_the_whole_vocabulary_is_in_order(vocab_size: int) -> None:
    values = random_logits(np.random.default_rng(4), 2, vocab_size)
    values[1, : vocab_size // 3] = -INF
    logits, got, want = logits_of(values).tensor, LogprobBuffers(2, vocab_size), LogprobBuffers(2, vocab_size)
    for top_n in (vocab_size - 1, vocab_size):
        logprobs(logits, tensor([0, 1]), tensor([0, 1]), 2, top_n, got)
        reference.logprobs(logits, tensor([0, 1]), tensor([0, 1]), 2, top_n, want)
        assert np.array_equal(got.top_ids.array[:, :top_n], want.top_ids.array[:, :top_n])
        assert np.allclose(got.top_logprobs.array[:, :top_n], want.top_logprobs.array[:, :top_n], atol=2e-6)


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
