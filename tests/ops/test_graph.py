# SPDX-License-Identifier: Apache-2.0
"""Replaying captured operators equals calling them, for any number of rows up to the captured one."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from benchmarks.launches import Replay
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.batch_index import BatchIndex, virtual_padding
from fastdeploy.ops.embedding import embedding
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.graph import CapturedGraph
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.norm import rms_norm
from fastdeploy.ops.quantized_form import FORMS
from fastdeploy.ops.sampling import FloatColumn, IntColumn, SamplingBatch, sample
from fastdeploy.ops.verify import AcceptPolicy, VerifyBatch, verify_draft_tokens

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


def test_capturing_executes_nothing() -> None:
    out, scratch = buffers()
    OpGraph(lambda: compute(IDS, out, scratch, ROWS))
    assert (out.numpy() == 7.0).all() and (scratch.numpy() == 7.0).all()


@pytest.mark.parametrize("num_rows", range(ROWS + 1))
def test_a_replay_equals_the_calls_bit_for_bit(num_rows: int) -> None:
    expected, scratch = buffers()
    compute(IDS, expected, scratch, num_rows)
    found, scratch = buffers()
    graph = OpGraph(lambda: compute(IDS, found, scratch, ROWS))
    for _ in range(2):
        graph.replay(num_rows, 1)
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_a_replay_reads_the_current_contents_of_tensors() -> None:
    ids, (out, scratch) = IDS.clone(), buffers()
    graph = OpGraph(lambda: compute(ids, out, scratch, ROWS))
    ids[0] = 4
    graph.replay(1, 1)
    np.testing.assert_array_equal(scratch.numpy()[0], TABLE.numpy()[4])


def test_more_rows_than_captured_are_refused() -> None:
    out, scratch = buffers()
    graph = OpGraph(lambda: compute(IDS, out, scratch, 4))
    graph.replay(4, 1)
    with pytest.raises(ValueError, match="replay: num_rows"):
        graph.replay(5, 1)


def test_values_are_checked_at_each_replay() -> None:
    ids, (out, scratch) = IDS.clone(), buffers()
    graph = OpGraph(lambda: compute(ids, out, scratch, ROWS))
    ids[2] = 9
    graph.replay(2, 1)
    with pytest.raises(ValueError, match="embedding: token_ids"):
        graph.replay(3, 1)


def make_batch() -> BatchIndex:
    batch = BatchIndex(8, 3, 2, 16)
    batch.write_inputs([3, 2], [0, 20], [0, 1], [[4], [2, 0]])
    return batch


def test_index_arrays_are_replayed_for_fewer_sequences() -> None:
    batch = make_batch()
    graph = OpGraph(lambda: virtual_padding(batch.buffers, 3, 16))
    assert graph.describe() == ["VirtualPadding"]
    graph.replay(5, 2)
    assert batch.positions.numpy()[:5].tolist() == [0, 1, 2, 20, 21]
    assert batch.slot_mapping.numpy()[:5].tolist() == [64, 65, 66, 4, 5]


@pytest.mark.parametrize("num_rows", [4, 6])
def test_a_number_of_rows_other_than_the_scheduled_one_is_refused(num_rows: int) -> None:
    batch = make_batch()
    graph = OpGraph(lambda: virtual_padding(batch.buffers, 3, 16))
    with pytest.raises(
        ValueError, match="virtual_padding: num_scheduled: expected the number of rows of the step, got 5"
    ):
        graph.replay(num_rows, 2)


def sample_and_verify(logits: paddle.Tensor, sampling: SamplingBatch, batch: VerifyBatch, num_rows: int) -> None:
    ids, params, allowed = sampling.token_ids.tensor, sampling.int_params.tensor, sampling.draft_is_allowed.tensor
    sample(logits, sampling, num_rows)
    verify_draft_tokens(ids, params, allowed, batch, False, AcceptPolicy.NORMAL)


def test_sampling_and_verification_are_replayed() -> None:
    logits, sampling, batch = paddle.eye(4, 9), SamplingBatch(4), VerifyBatch(4)
    sampling.float_params.array[:, FloatColumn.TEMPERATURE] = 0.0
    batch.num_seqs = 4
    graph = OpGraph(lambda: sample_and_verify(logits, sampling, batch, 4))
    sampling.int_params.array[:2, IntColumn.DRAFT_ID] = [0, 8]
    batch.fill([0], [3])
    graph.replay(3, 1)
    assert batch.num_accepted.array[0] == 1
    assert batch.emitted.array[:2].tolist() == [0, 1]
    with pytest.raises(ValueError, match="verify_draft_tokens: row_count"):
        graph.replay(2, 1)
    sampling.int_params.array[0, IntColumn.HISTORY_END] = 10**6
    with pytest.raises(ValueError, match="sample: history"):
        graph.replay(3, 1)


def test_a_graph_is_captured_once_and_again_once_invalidated() -> None:
    (out, scratch), calls = buffers(), []

    def function(num_rows: int, num_seqs: int) -> None:
        calls.append((num_rows, num_seqs))
        compute(IDS, out, scratch, num_rows)

    captured = CapturedGraph(function, ROWS, 3)
    for num_rows in (1, 2):
        captured.run(num_rows, 1)
    assert calls == [(ROWS, 3)]
    assert (out.numpy()[2:] == 7.0).all() and (out.numpy()[:2] != 7.0).any()
    captured.invalidate()
    captured.run(1, 1)
    assert calls == [(ROWS, 3)] * 2


def test_an_error_ends_the_capture() -> None:
    out, scratch = buffers()
    with pytest.raises(ValueError, match="linear"):
        OpGraph(lambda: linear(scratch, WEIGHT, out[:, :8], ROWS))
    embedding(IDS, TABLE, scratch, ROWS)
    np.testing.assert_array_equal(scratch.numpy(), TABLE.numpy()[IDS.numpy()])


@pytest.mark.parametrize("quantization", FORMS)
def test_quantized_layers_are_replayed_for_fewer_rows(quantization: str) -> None:
    weight = pack_linear(random_rows(40, 24, "bfloat16", 1), None, quantization)
    x, called, replayed = random_rows(ROWS, 24, "bfloat16", 2), paddle.zeros([ROWS, 40]), paddle.zeros([ROWS, 40])
    graph = OpGraph(lambda: linear(x, weight, replayed, ROWS))
    linear(x, weight, called, 2)
    graph.replay(2, 0)
    assert called.numpy()[:2].any()
    np.testing.assert_array_equal(replayed.numpy(), called.numpy())


def test_timing_executes_every_launch_and_returns_its_seconds() -> None:
    expected, scratch = buffers()
    compute(IDS, expected, scratch, 3)
    found, scratch = buffers()
    graph = OpGraph(lambda: compute(IDS, found, scratch, ROWS))
    seconds = Replay(graph, 3, 1).time_kernels(on_thread_time=False)
    assert graph.describe() == ["Gather", f"Linear [{SIZE}, {SIZE}]", "RmsNorm"]
    assert len(seconds) == 3 and all(0 < one < 60 for one in seconds)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
