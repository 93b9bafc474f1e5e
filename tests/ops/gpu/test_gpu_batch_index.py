# SPDX-License-Identifier: Apache-2.0
"""Index arrays of a step on an emulated GPU: those of the reference, in one launch, and nothing else is written."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.backends.gpu.library import active
from fastdeploy.ops.batch_index import StepBuffers
from tests.ops.gpu.emulated import SEEDS, count, counts_on_device, emulate

UNUSED = -7
INPUTS = ("num_scheduled", "num_computed", "num_logits", "num_blocks")
OUTPUTS = (
    *("totals", "cu_seqlens_q", "cu_logits_rows", "kv_lens", "batch_id_per_row", "positions", "slot_mapping"),
    "logits_rows",
)
Arrays = dict[str, list[int]]


def make_step(num_seqs: int, max_seqs: int, max_rows: int, max_scheduled: int, block_size: int) -> StepBuffers:
    """Return buffers with random inputs; what is not used lies far outside of every array."""
    rng = np.random.default_rng(num_seqs + max_scheduled)
    buffers = StepBuffers(max_rows, max_seqs, 40)
    for name in INPUTS:
        getattr(buffers, name).array[:] = 2**30
    for name in OUTPUTS:
        getattr(buffers, name).array[:] = UNUSED
    scheduled = rng.integers(0, max_scheduled + 1, num_seqs)
    buffers.num_scheduled.array[:num_seqs] = scheduled
    buffers.num_computed.array[:num_seqs] = rng.integers(0, 40 * block_size - max_scheduled, num_seqs)
    buffers.num_logits.array[:num_seqs] = rng.integers(0, scheduled + 1)
    buffers.num_blocks.array[:num_seqs] = 40
    buffers.block_tables.array[:] = 2**20
    buffers.block_tables.array[:num_seqs] = rng.integers(0, 1000, (num_seqs, 40))
    return buffers


def results(buffers: StepBuffers) -> Arrays:
    return {name: getattr(buffers, name).array.tolist() for name in OUTPUTS}


def reference(*shape: int) -> Arrays:
    buffers = make_step(*shape)
    registry.lookup("reference")("virtual_padding")(buffers, shape[0], shape[-1])
    return results(buffers)


@pytest.mark.parametrize("max_scheduled", [1, 6, 90])
@pytest.mark.parametrize("num_seqs", [*range(1, 12), 31, 32, 33, 40])
def test_gpu_index_arrays_are_those_of_the_reference_in_any_order(num_seqs: int, max_scheduled: int) -> None:
    shape = (num_seqs, 40, 3700, max_scheduled, 16)
    buffers = make_step(*shape)
    emulate(SEEDS[num_seqs % 4])("virtual_padding")(buffers, num_seqs, 16)
    assert results(buffers) == reference(*shape)


@pytest.mark.parametrize("num_seqs", [511, 512, 513, 1100])
def test_gpu_index_arrays_of_more_requests_than_a_block_has_threads(num_seqs: int) -> None:
    shape = (num_seqs, 1100, 20000, 18, 48)
    buffers = make_step(*shape)
    emulate(has_checks=num_seqs == 513)("virtual_padding")(buffers, num_seqs, 48)
    assert results(buffers) == reference(*shape)


def test_gpu_index_arrays_of_an_empty_step() -> None:
    buffers = make_step(0, 4, 16, 1, 16)
    emulate()("virtual_padding")(buffers, 0, 16)
    expected = make_step(0, 4, 16, 1, 16)
    expected.totals.array[:] = expected.cu_seqlens_q.array[0] = expected.cu_logits_rows.array[0] = 0
    assert results(buffers) == results(expected)


def test_gpu_index_arrays_need_one_launch_and_no_count_from_the_host() -> None:
    shape = (5, 40, 700, 9, 16)
    buffers, kernel = make_step(*shape), emulate()("virtual_padding")
    with counts_on_device(2**30, 5):
        counted = count(lambda: kernel(buffers, 40, 16))
    assert results(buffers) == reference(*shape)
    assert counted["launches"] == 1


@pytest.mark.parametrize("num_sampled", [1, 31, 512, 700])
@pytest.mark.parametrize("num_rows", [0, 1, 33, 512, 513, 1100])
def test_gpu_rows_of_the_next_logits_batch_are_moved_to_the_front(num_sampled: int, num_rows: int) -> None:
    buffers = StepBuffers(1800, 2, 2)
    buffers.logits_rows.array[:] = before = np.random.default_rng(num_rows).integers(0, 9000, 1800)
    emulate(SEEDS[num_rows % 4])("shift_logits_rows")(buffers, num_sampled, num_rows)
    moved = before[num_sampled : num_sampled + num_rows]
    assert buffers.logits_rows.array.tolist() == [*moved, *before[num_rows:]]


def test_gpu_index_operators_refuse_more_than_there_is_room_for() -> None:
    find, buffers = emulate(), StepBuffers(16, 4, 2)
    with pytest.raises(ValueError, match="virtual_padding: num_seqs: expected at most the capacity, got 5"):
        find("virtual_padding")(buffers, 5, 16)
    with pytest.raises(ValueError, match="num_rows: expected at most the rows that follow, got 6"):
        find("shift_logits_rows")(buffers, 11, 6)


def test_counts_of_a_graph_are_written_on_the_device() -> None:
    emulate()
    counts = paddle.full([3], UNUSED, "int32")
    active().launch("fd_write_counts", counts, 3, 2)
    assert counts.numpy().tolist() == [3, 2, UNUSED]
