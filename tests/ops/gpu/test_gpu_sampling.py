# SPDX-License-Identifier: Apache-2.0
"""Sampling on an emulated GPU: the bits of the CPU for every option, in any order, and few reads of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops import registry
from fastdeploy.ops.backends.gpu import sampling as wrapper
from fastdeploy.ops.sampling import IntColumn, RowStatus
from tests.ops.gpu.emulated import SEEDS, count, counts_on_device, emulate
from tests.ops.sampling_rows import RowOptions, batch_of, logits_of, mask_of, random_logits, random_options

INF, SLICE, UNUSED = float("inf"), 8192, 7
Kernel = Callable[..., Any]
Rows = NDArray[np.float32]


def run(
    kernel: Kernel, logits: Rows, options: list[RowOptions], keep: bool, stop: bool = False, passed: int | None = None
) -> list[bytes]:
    """Sample a row for each of the options, of one row more; return the bits of all results that are defined."""
    num_rows = len(options)
    batch, buffer = batch_of([*options, RowOptions()]), logits_of(np.vstack([logits, np.full(logits.shape[1], np.nan)]))
    results = (batch.token_ids, batch.status, batch.draft_is_allowed)
    for result in results:
        result.array[:] = UNUSED
    kernel(buffer.tensor, batch, num_rows if passed is None else passed, keep, stop)
    assert all(result.array[num_rows] == UNUSED for result in results)
    rows = buffer.array[: num_rows + 1]
    assert np.isnan(rows[num_rows]).all()
    if keep:
        rows = rows[:num_rows][batch.status.array[:num_rows] != RowStatus.SKIPPED]
        assert not np.isnan(rows[(batch.status.array[:num_rows] == RowStatus.OK)[: len(rows)]]).any() or stop
    else:
        assert rows[:num_rows].tobytes() == np.asarray(logits, np.float32).tobytes()
    return [*(result.array[:num_rows].tobytes() for result in results), rows.tobytes()]


def cpu(logits: Rows, options: list[RowOptions], keep: bool, stop: bool = False) -> list[bytes]:
    return run(registry.lookup("cpu")("sample"), logits, options, keep, stop)


def check(kernel: Kernel, logits: Rows, options: list[RowOptions]) -> None:
    """Compare with the CPU, with and without the processed logits."""
    for keep in (False, True):
        assert run(kernel, logits, options, keep) == cpu(logits, options, keep)


@pytest.mark.parametrize("vocab_size", [1, 7, 33, 300, 301])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", [False, True])
def test_gpu_sampling_has_the_bits_of_the_cpu_in_any_order(vocab_size: int, keep: bool, stop: bool) -> None:
    rng = np.random.default_rng(vocab_size)
    logits, options = random_logits(rng, 5, vocab_size), [random_options(rng, vocab_size) for _ in range(5)]
    for seed in SEEDS:
        assert run(emulate(seed)("sample"), logits, options, keep, stop) == cpu(logits, options, keep, stop)


@pytest.mark.parametrize("num_rows", range(1, 21))
def test_gpu_sampling_of_rows_with_options_of_their_own(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    vocab_size = int(rng.integers(50, 2000))
    logits, options = (
        random_logits(rng, num_rows, vocab_size),
        [random_options(rng, vocab_size) for _ in range(num_rows)],
    )
    kernel, keep = emulate(num_rows % 4, has_checks=False)("sample"), num_rows % 2 == 0
    assert run(kernel, logits, options, keep) == cpu(logits, options, keep)


@pytest.mark.parametrize("vocab_size", [SLICE - 1, SLICE, SLICE + 1, 2 * SLICE + 6, 3 * SLICE + 8])
def test_gpu_sampling_of_several_slices(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits, options = random_logits(rng, 6, vocab_size), [random_options(rng, vocab_size) for _ in range(6)]
    check(emulate(2, has_checks=False)("sample"), logits, options)


@pytest.mark.parametrize("vocab_size", [151_937, 152_064, 262_144])
def test_gpu_sampling_of_a_large_vocabulary(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = (rng.standard_normal((4, vocab_size)) * [[1.0], [3.0], [2.0], [4.0]]).astype(np.float32)
    history = rng.integers(0, vocab_size, 40_000).tolist()
    options = [
        RowOptions(top_p=0.95, seed=1, draft_id=77),
        RowOptions(top_k=vocab_size // 2, top_p=0.999, min_p=1e-6, seed=2),
        RowOptions(repetition=1.3, frequency=0.01, presence=0.4, prompt=history[:30_000], output=history[30_000:]),
        RowOptions(top_k=50, temperature=0.7, vocab_limit=vocab_size - 300, bias={vocab_size - 301: 30.0, 0: 29.0}),
    ]
    check(emulate(has_checks=False)("sample"), logits, options)


def test_gpu_sampling_fails_rows_by_their_status() -> None:
    vocab_size = SLICE + 3
    logits = np.random.default_rng(0).standard_normal((9, vocab_size)).astype(np.float32)
    logits[0, -1], logits[1, 5], logits[2, SLICE], logits[5, 5], logits[6, 5] = np.nan, INF, -np.nan, np.nan, np.nan
    logits[3] = -INF
    logits[7], logits[8] = 3e38, -3e38
    options = [RowOptions(temperature=0.0), *(RowOptions(top_p=0.9, draft_id=5) for _ in range(8))]
    options[4] = RowOptions(banned=[1], mask=mask_of([1], vocab_size))
    options[5], options[6] = RowOptions(vocab_limit=5), RowOptions(vocab_limit=0, temperature=0.0)
    options[7], options[8] = RowOptions(temperature=0.5), RowOptions(temperature=0.5, top_k=3)
    check(emulate(1, has_checks=False)("sample"), logits, options)
    statuses = np.frombuffer(run(emulate()("sample"), logits, options, False)[1], np.int32).tolist()
    nan, ok, empty = RowStatus.NAN, RowStatus.OK, RowStatus.EMPTY
    assert statuses == [nan, nan, nan, empty, empty, ok, empty, nan, empty]


@pytest.mark.parametrize("vocab_size", [600, SLICE + 900])
def test_gpu_sampling_orders_ties_by_id(vocab_size: int) -> None:
    logits = np.zeros((6, vocab_size), np.float32)
    logits[1, ::2] = -0.0
    logits[2, 1::3] = 1.0
    logits[5, -1] = -0.5
    options = [
        RowOptions(top_k=550, draft_id=549),
        RowOptions(top_p=0.95, draft_id=569, seed=5),
        RowOptions(top_k=590, top_p=0.97, seed=6),
        RowOptions(temperature=0.0, draft_id=0),
        RowOptions(top_p=0.0, draft_id=0),
        RowOptions(top_k=vocab_size - 1, min_p=0.9, draft_id=vocab_size - 1),
    ]
    check(emulate(3, has_checks=vocab_size <= 600)("sample"), logits, options)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 9e-6, 1e-5, 1e-3, 1e3, 1e30, float("nan")])
def test_gpu_sampling_with_tiny_and_huge_temperatures(temperature: float) -> None:
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 4, 777)
    common = {"temperature": temperature, "draft_id": int(logits[0].argmax())}
    options = [RowOptions(**common), RowOptions(top_p=0.4, **common), RowOptions(top_k=7, **common)]
    check(emulate(1)("sample"), logits[:3], options)
    check(emulate(1)("sample"), logits[3:], [RowOptions(top_k=500, top_p=0.8, min_p=0.2, **common)])


@pytest.mark.parametrize("num_rows", [5, 600])
def test_gpu_sampling_skips_rows_after_a_rejected_draft(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    logits = rng.standard_normal((num_rows, 5)).astype(np.float32)
    best = logits.argmax(1)
    options = []
    for row in range(num_rows):
        draft = int(best[row]) if rng.random() < 0.95 else -1 if rng.random() < 0.3 else int(rng.integers(0, 5))
        options.append(RowOptions(temperature=float(row % 17 == 0), draft_id=draft))
    kernel = emulate(2, has_checks=num_rows == 5)("sample")
    got = run(kernel, logits, options, False, stop=True)
    assert got == cpu(logits, options, False, stop=True)
    assert num_rows == 5 or RowStatus.SKIPPED in np.frombuffer(got[1], np.int32)


def test_gpu_sampling_of_504_rows() -> None:
    rng = np.random.default_rng(504)
    logits, options = random_logits(rng, 504, 4099), [random_options(rng, 4099) for _ in range(504)]
    options[:378] = [RowOptions(temperature=row % 3 / 2, draft_id=row) for row in range(378)]
    kernel = emulate(has_checks=False)("sample")
    assert run(kernel, logits, options, False, stop=True) == cpu(logits, options, False, stop=True)


def test_gpu_sampling_reads_the_number_of_rows_from_the_device() -> None:
    rng = np.random.default_rng(8)
    logits, options = random_logits(rng, 3, 300), [random_options(rng, 300) for _ in range(3)]
    kernel = emulate()("sample")
    for num_rows in (0, 1, 3):
        with counts_on_device(num_rows, 1):
            got = run(kernel, logits[:num_rows], options[:num_rows], True, passed=num_rows + 1)
        assert got == cpu(logits[:num_rows], options[:num_rows], True)


READS = [
    (RowOptions(temperature=0.0), 1),
    (RowOptions(temperature=0.0, bias={3: 1.0}, banned=[4], repetition=1.1, prompt=[5]), 1),
    (RowOptions(), 1),
    (RowOptions(temperature=0.6, frequency=0.1, output=[1, 2]), 1),
    (RowOptions(min_p=0.1), 2),
    (RowOptions(top_k=20), 3),
    (RowOptions(top_k=20_000), 3),
    (RowOptions(top_p=0.9), 3),
    (RowOptions(top_p=0.999, temperature=2.0), 3),
    (RowOptions(top_k=5000, top_p=0.9, min_p=1e-3), 3),
]


@pytest.mark.parametrize("vocab_size", [4 * SLICE, 4 * SLICE + 5])
@pytest.mark.parametrize(("options", "reads"), READS)
def test_gpu_sampling_reads_the_logits_few_times_in_whole_sectors(
    options: RowOptions, reads: int, vocab_size: int
) -> None:
    logits = (np.random.default_rng(1).standard_normal((1, vocab_size)) * 3).astype(np.float32)
    kernel, batch, buffer = emulate()("sample"), batch_of([options]), logits_of(logits)
    counted = count(lambda: kernel(buffer.tensor, batch, 1, False))
    assert counted["launches"] <= 5
    assert counted["global_read_bytes"] < (reads + 1) * logits.nbytes  # with what else is read, less than once more
    assert counted["global_read_bytes"] / (32 * counted["read_sectors"]) >= 0.90


def test_gpu_sampling_allocates_at_the_first_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "_workspaces", {})
    logits, kernel = paddle.zeros([5, 300]), emulate()("sample")
    batch = batch_of([RowOptions()] * 5)
    for num_rows in (1, 5, 2):
        kernel(logits, batch, num_rows, False)
    assert [len(workspaces) for workspaces in wrapper._workspaces.values()] == [1]


def test_gpu_sampling_cuts_ranges_that_exceed_their_lists() -> None:
    kernel, vocab_size = emulate()("sample"), 40
    options = RowOptions(
        temperature=0.0, output=[3], frequency=9.0, bias={4: 3.0}, banned=[5], mask=[-1, -1], draft_id=4
    )
    logits = logits_of(np.where(np.arange(vocab_size) == 5, 9, np.where(np.arange(vocab_size) == 3, 4, 0)))
    beyond, ends = 2**62, (IntColumn.HISTORY_END, IntColumn.BIAS_END, IntColumn.BANNED_END)
    for begins, mask, expected in ((0, 0, 4), (-beyond, 0, 4), (0, beyond, -1), (0, -beyond, -1)):
        batch = batch_of([options])
        for buffer in (batch.history, batch.bias_ids, batch.bias_values, batch.banned_ids):
            buffer.array[1:] = 0
        row = batch.int_params.array[0]
        row[list(ends)] = beyond
        row[[IntColumn.HISTORY_BEGIN, IntColumn.OUTPUT_BEGIN, IntColumn.BIAS_BEGIN, IntColumn.BANNED_BEGIN]] = begins
        row[IntColumn.MASK_BEGIN] = mask
        kernel(logits.tensor, batch, 1, False)
        assert batch.token_ids.array[0] == expected


def test_gpu_sampling_refuses_what_does_not_fit() -> None:
    kernel, batch = emulate()("sample"), batch_of([RowOptions()])
    with pytest.raises(ValueError, match="sample: logits: expected float32, got bfloat16"):
        kernel(paddle.zeros([1, 8], "bfloat16"), batch, 1, False)
    with pytest.raises(ValueError, match=r"sample: logits: expected \[2 or more, 8\], got \[1, 8\]"):
        kernel(paddle.zeros([1, 8]), batch, 2, False)
    with pytest.raises(ValueError, match=r"sample: float_params: expected \[2 or more, 6\], got \[1, 6\]"):
        kernel(paddle.zeros([2, 8]), batch, 2, False)
    with pytest.raises(ValueError, match="sample: vocab_size: expected 1 to 262144, got 262145"):
        kernel(paddle.zeros([1, 262_145]), batch, 1, False)
