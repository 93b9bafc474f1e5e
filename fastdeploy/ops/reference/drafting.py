# SPDX-License-Identifier: Apache-2.0
"""Drafting with one operator call after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import paddle

from fastdeploy.ops.reference.sampling import sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastdeploy.ops.drafting import DraftLoop, DraftStage

_POSITION_COLUMN = 1  # of SamplingBatch.int_params


def fill_stage(loop: DraftLoop, stage: int, num_seqs: int) -> None:
    """As `fastdeploy.ops.drafting.DraftLoop.fill_stage`; every stage computes its whole output."""
    metadata = loop.batch.compute(num_seqs)
    num_rows = metadata.num_rows
    if loop.input_states is not None and stage:
        loop.input_states[:num_rows] = loop.output[:num_rows]
    elif loop.input_states is not None and loop.states is not None:
        loop.input_states[:num_rows] = paddle.gather(loop.states, paddle.to_tensor(_slots_before(loop, num_rows)))
    loop.stages[stage].compute(metadata)


def draft(loop: DraftLoop, num_seqs: int) -> None:
    """As `fastdeploy.ops.drafting.DraftLoop.draft`."""
    wanted, last = loop.num_drafts.array[:num_seqs], len(loop.stages) - 1
    for index in range(int(wanted.max(initial=0))):
        num_seqs = int((wanted > index).sum())
        if index:
            _advance(loop, num_seqs, shifts=index <= last)
        if index <= last:
            fill_stage(loop, index, num_seqs)
        else:
            loop.stages[last].compute(loop.batch.compute(num_seqs))
        _sample_drafts(loop, loop.stages[min(index, last)], num_seqs, index)


def _slots_before(loop: DraftLoop, num_rows: int) -> NDArray[np.int64]:
    """Return the slot of the position before each row; for position 0, the extra entry at the end of the states."""
    assert loop.states is not None
    batch, size = loop.batch.buffers, loop.batch.block_size
    before = batch.positions.array[:num_rows].astype(np.int64) - 1
    blocks = batch.block_tables.array[batch.batch_id_per_row.array[: len(before)], before // size]
    return np.where(before < 0, loop.states.shape[0] - 1, blocks * size + before % size)


def _advance(loop: DraftLoop, num_seqs: int, shifts: bool) -> None:
    """Write the tokens of the next pass.

    Args:
        shifts: the next pass computes the same number of rows one position further on, instead of one row per sequence.
    """
    batch, tokens = loop.batch.buffers, loop.token_ids.array
    drafted = np.maximum(loop.sampling.token_ids.array, 0)
    ends = batch.cu_seqlens_q.array[1 : num_seqs + 1].copy()
    if shifts:
        tokens[: ends[-1] - 1] = tokens[1 : ends[-1]]
        tokens[ends - 1] = drafted[:num_seqs]
        batch.num_computed.array[:num_seqs] += 1
        return
    if loop.input_states is not None:
        loop.input_states[:num_seqs] = paddle.gather(loop.output, paddle.to_tensor(ends - 1))
    tokens[:num_seqs] = drafted[:num_seqs]
    batch.num_computed.array[:num_seqs] += batch.num_scheduled.array[:num_seqs]
    batch.num_scheduled.array[:num_seqs] = 1


def _sample_drafts(loop: DraftLoop, stage: DraftStage, num_seqs: int, index: int) -> None:
    """Sample a token from the last row of every sequence."""
    batch, sampling = loop.batch.buffers, loop.sampling
    sampling.int_params.array[:num_seqs, _POSITION_COLUMN] = batch.kv_lens.array[:num_seqs]
    logits = paddle.zeros([num_seqs, loop.vocab_sizes[loop.vocab_index]], "float32")
    last_rows = paddle.to_tensor(batch.cu_seqlens_q.array[1 : num_seqs + 1] - 1)
    stage.compute_logits(paddle.gather(loop.output, last_rows), num_seqs, logits)
    sample(logits, sampling, num_seqs)
    if loop.vocab_index == 0 and loop.target_ids is not None:
        drafted = sampling.token_ids.array[:num_seqs]
        drafted[:] = np.where(drafted < 0, drafted, loop.target_ids.numpy()[drafted])
    loop.drafts.array[:num_seqs, index] = sampling.token_ids.array[:num_seqs]
