# SPDX-License-Identifier: Apache-2.0
"""Recorded operator calls do what the calls do, for any number of rows up to the recorded one."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from benchmarks.launches import Replay
from fastdeploy.ops.embedding import embedding
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import QUANTIZATIONS, linear, pack_linear
from fastdeploy.ops.norm import rms_norm
from fastdeploy.ops.recording import Recording

ROWS, SIZE = 6, 32
TABLE = paddle.to_tensor(np.random.default_rng(0).standard_normal((9, SIZE)).astype(np.float32))
WEIGHT = pack_linear(paddle.to_tensor(np.random.default_rng(1).standard_normal((SIZE, SIZE)).astype(np.float32)))
IDS = paddle.to_tensor(np.array([8, 0, 3, 3, 5, 1], np.int32))
ONES = paddle.ones([SIZE])


def compute(ids: paddle.Tensor, out: paddle.Tensor, scratch: paddle.Tensor, num_rows: int) -> None:
    embedding(ids, TABLE, scratch, num_rows)
    linear(scratch, WEIGHT, out, num_rows, scratch)
    rms_norm(out, ONES, out, num_rows, 1e-6)


def buffers() -> tuple[paddle.Tensor, paddle.Tensor]:
    return paddle.full([ROWS, SIZE], 7.0), paddle.full([ROWS, SIZE], 7.0)


def test_recording_performs_nothing() -> None:
    out, scratch = buffers()
    Recording(lambda: compute(IDS, out, scratch, ROWS))
    assert (out.numpy() == 7.0).all() and (scratch.numpy() == 7.0).all()


@pytest.mark.parametrize("num_rows", range(ROWS + 1))
def test_a_replay_is_the_calls_bit_for_bit(num_rows: int) -> None:
    expected, scratch = buffers()
    compute(IDS, expected, scratch, num_rows)
    found, scratch = buffers()
    recording = Recording(lambda: compute(IDS, found, scratch, ROWS))
    for _ in range(2):
        recording.replay(num_rows, 1)
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_a_replay_reads_what_the_tensors_hold_then() -> None:
    ids, (out, scratch) = IDS.clone(), buffers()
    recording = Recording(lambda: compute(ids, out, scratch, ROWS))
    ids[0] = 4
    recording.replay(1, 1)
    np.testing.assert_array_equal(scratch.numpy()[0], TABLE.numpy()[4])


def test_more_rows_than_recorded_are_refused() -> None:
    out, scratch = buffers()
    recording = Recording(lambda: compute(IDS, out, scratch, 4))
    recording.replay(4, 1)
    with pytest.raises(ValueError, match="replay: num_rows"):
        recording.replay(5, 1)


def test_values_are_checked_at_each_replay() -> None:
    ids, (out, scratch) = IDS.clone(), buffers()
    recording = Recording(lambda: compute(ids, out, scratch, ROWS))
    ids[2] = 9
    recording.replay(2, 1)
    with pytest.raises(ValueError, match="embedding: token_ids"):
        recording.replay(3, 1)


def test_a_refused_call_ends_the_recording() -> None:
    out, scratch = buffers()
    with pytest.raises(ValueError, match="linear"):
        Recording(lambda: linear(scratch, WEIGHT, out[:, :8], ROWS))
    embedding(IDS, TABLE, scratch, ROWS)
    np.testing.assert_array_equal(scratch.numpy(), TABLE.numpy()[IDS.numpy()])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantized_layers_are_replayed_for_the_rows_asked_for(quantization: str) -> None:
    weight = pack_linear(random_rows(40, 24, "bfloat16", 1), None, quantization)
    x, called, replayed = random_rows(ROWS, 24, "bfloat16", 2), paddle.zeros([ROWS, 40]), paddle.zeros([ROWS, 40])
    recording = Recording(lambda: linear(x, weight, replayed, ROWS))
    linear(x, weight, called, 2)
    recording.replay(2, 0)
    assert called.numpy()[:2].any()
    np.testing.assert_array_equal(replayed.numpy(), called.numpy())


def test_timing_computes_and_names_every_launch_with_its_seconds() -> None:
    expected, scratch = buffers()
    compute(IDS, expected, scratch, 3)
    found, scratch = buffers()
    recording = Recording(lambda: compute(IDS, found, scratch, ROWS))
    seconds = Replay(recording, 3, 1).time_kernels(on_thread_time=False)
    assert recording.describe() == ["Gather", f"Linear [{SIZE}, {SIZE}]", "RmsNorm"]
    assert len(seconds) == 3 and all(0 < one < 60 for one in seconds)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
