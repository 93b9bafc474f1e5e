# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on an emulated GPU: the bits of the CPU, in any order, and two reads of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops import registry
from fastdeploy.ops.backends.gpu import logprobs as wrapper
from fastdeploy.ops.sampling import LogprobBuffers
from tests.ops.gpu.emulated import SEEDS, count, counts_on_device, emulate

INF, SLICE, UNUSED = float("inf"), 8192, 7
Kernel = Callable[..., Any]
Rows = NDArray[np.float32]


def random_logits(num_rows: int, vocab_size: int) -> Rows:
    """Return logits with many ties, and some that are -inf."""
    rng = np.random.default_rng(num_rows + vocab_size)
    logits = rng.standard_normal((num_rows, vocab_size)).astype(np.float32) * 4
    logits[::2] = np.round(logits[::2])
    logits[rng.random(logits.shape) < 0.05] = -INF
    return logits


def run(kernel: Kernel, logits: Rows, num_rows: int, top_n: int, passed: int | None = None) -> list[bytes]:
    """Compute num_rows rows, in a random order, of more; return the bits of all results."""
    rng = np.random.default_rng(5)
    capacity, columns = num_rows + 2, top_n + 1
    rows, chosen = np.full((2, capacity), 2**30, np.int32)
    rows[:num_rows] = rng.integers(0, len(logits), num_rows)
    chosen[:num_rows] = rng.integers(0, logits.shape[1], num_rows)
    out = LogprobBuffers(capacity, columns)
    results = (out.chosen_logprob, out.chosen_rank, out.top_ids, out.top_logprobs)
    for buffer in results:
        buffer.array[:] = UNUSED
    inputs = paddle.to_tensor(logits), paddle.to_tensor(rows), paddle.to_tensor(chosen)
    kernel(*inputs, num_rows if passed is None else passed, top_n, out)
    assert (out.top_ids.array[:, top_n:] == UNUSED).all()
    assert (out.top_logprobs.array[:, top_n:] == UNUSED).all()
    return [buffer.array.tobytes() for buffer in results]


def cpu(logits: Rows, num_rows: int, top_n: int) -> list[bytes]:
    return run(registry.lookup("cpu")("logprobs"), logits, num_rows, top_n)


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 301])
@pytest.mark.parametrize("top_n", [0, 1, 20, 64, 65])
def test_gpu_logprobs_have_the_bits_of_the_cpu_in_any_order(vocab_size: int, top_n: int) -> None:
    logits = random_logits(4, vocab_size)
    for seed in SEEDS if top_n < 65 else SEEDS[:2]:  # more keys are sorted, which takes longer
        assert run(emulate(seed)("logprobs"), logits, 3, top_n) == cpu(logits, 3, top_n)


@pytest.mark.parametrize("vocab_size", [SLICE - 1, SLICE, SLICE + 1, 2 * SLICE + 5, 3 * SLICE + 8])
@pytest.mark.parametrize("top_n", [20, 70])
def test_gpu_logprobs_of_several_slices(vocab_size: int, top_n: int) -> None:
    logits = random_logits(3, vocab_size)
    assert run(emulate(2, has_checks=vocab_size <= SLICE + 1)("logprobs"), logits, 5, top_n) == cpu(logits, 5, top_n)


@pytest.mark.parametrize("num_rows", range(1, 21))
def test_gpu_logprobs_of_a_row_do_not_depend_on_the_others(num_rows: int) -> None:
    logits = random_logits(20, 77)
    assert run(emulate(num_rows % 4)("logprobs"), logits, num_rows, 5) == cpu(logits, num_rows, 5)


@pytest.mark.parametrize("vocab_size", [300, SLICE + 1])
def test_gpu_logprobs_of_the_whole_vocabulary_are_in_order(vocab_size: int) -> None:
    logits = random_logits(2, vocab_size)
    for top_n in (vocab_size - 1, vocab_size, vocab_size + 3):
        assert run(emulate(has_checks=False)("logprobs"), logits, 2, top_n) == cpu(logits, 2, top_n)


def test_gpu_logprobs_of_a_large_vocabulary_and_of_504_rows() -> None:
    kernel = emulate(has_checks=False)("logprobs")
    large, many = random_logits(1, 152_064), random_logits(9, 4099)
    assert run(kernel, large, 1, 20) == cpu(large, 1, 20)
    assert run(kernel, large[:, :40_003], 1, 40_003) == cpu(large[:, :40_003], 1, 40_003)
    assert run(kernel, many, 504, 20) == cpu(many, 504, 20)


def test_gpu_logprobs_of_rows_without_probabilities_are_nan() -> None:
    logits = random_logits(5, SLICE + 10)
    logits[0, 3], logits[1, -1], logits[2, SLICE + 5] = np.nan, np.nan, INF
    logits[3] = -INF
    for top_n in (0, 4):
        got = run(emulate(1, has_checks=False)("logprobs"), logits, 12, top_n)
        want = cpu(logits, 12, top_n)
        for one, other, dtype in zip(got, want, ("float32", "int32", "int32", "float32"), strict=True):
            assert np.array_equal(np.frombuffer(one, dtype), np.frombuffer(other, dtype), equal_nan=dtype == "float32")


def test_gpu_logprobs_ranks_break_ties_by_id_when_all_logits_are_equal() -> None:
    logits = np.zeros((2, 3000), np.float32)
    logits[1, ::2] = -0.0
    for top_n in (1, 64, 100):
        assert run(emulate(3)("logprobs"), logits, 4, top_n) == cpu(logits, 4, top_n)


def test_gpu_logprobs_in_several_calls_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(6, 300)
    monkeypatch.setattr(wrapper, "_scratch", {})
    monkeypatch.setattr(wrapper, "MAX_SCRATCH_BYTES", 500)
    kernel, results = emulate()("logprobs"), list[bytes]()
    counted = count(lambda: results.extend(run(kernel, logits, 7, 20)))
    assert counted["launches"] > 3
    assert results == cpu(logits, 7, 20)


def test_gpu_logprobs_read_the_number_of_rows_from_the_device() -> None:
    logits = random_logits(6, 300)
    with counts_on_device(3, 1):
        assert run(emulate()("logprobs"), logits, 3, 20, passed=5) == cpu(logits, 3, 20)


@pytest.mark.parametrize(("vocab_size", "top_n"), [(SLICE, 0), (SLICE, 20), (SLICE, 100), (2 * SLICE - 9, 20)])
def test_gpu_logprobs_read_the_logits_twice_in_whole_sectors(vocab_size: int, top_n: int) -> None:
    logits, kernel = random_logits(2, vocab_size), emulate()("logprobs")
    counted = count(lambda: run(kernel, logits, 2, top_n))
    assert counted["launches"] == 3
    assert 2 * (2 * vocab_size * 4) / (32 * counted["read_sectors"]) >= 0.90


def test_gpu_logprobs_refuse_what_does_not_fit() -> None:
    kernel, out = emulate()("logprobs"), LogprobBuffers(1, 2)
    logits, ids = paddle.zeros([1, 8]), paddle.zeros([1], "int32")
    with pytest.raises(ValueError, match="logprobs: top_n: expected 0 to 2, the columns of top_ids, got 3"):
        kernel(logits, ids, ids, 1, 3, out)
    with pytest.raises(ValueError, match="logprobs: logits: expected float32, got bfloat16"):
        kernel(logits.astype("bfloat16"), ids, ids, 1, 1, out)
    with pytest.raises(ValueError, match=r"logprobs: rows: expected \[2 or more\], got \[1\]"):
        kernel(logits, ids, ids, 2, 1, out)
