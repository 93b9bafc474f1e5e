# SPDX-License-Identifier: Apache-2.0
"""Drafting one operator after the other."""

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
    """As `fastdeploy.ops.drafting.DraftLoop.fill_stage`; outputs are whole in every stage."""
    loop.batch.index(num_seqs)
    num_rows = loop.batch.num_rows
    if loop.source is not None and loop.states is not None:
        before = loop.states[paddle.to_tensor(_slots_before(loop))] if stage == 0 else loop.output[:num_rows]
        loop.source[:num_rows] = before
    loop.stages[stage].compute(loop.batch, num_rows)


def draft(loop: DraftLoop, num_seqs: int) -> None:
    """As `fastdeploy.ops.drafting.DraftLoop.draft`."""
    wanted, last = loop.num_drafts.array[:num_seqs], len(loop.stages) - 1
    for step in range(int(wanted.max(initial=0))):
        num_seqs = int((wanted > step).sum())
        if step:
            _advance(loop, num_seqs, shifts=step <= last)
        if step <= last:
            fill_stage(loop, step, num_seqs)
        else:
            loop.batch.index(num_seqs)
            loop.stages[last].compute(loop.batch, loop.batch.num_rows)
        _choose(loop, loop.stages[min(step, last)], num_seqs, step)


def _slots_before(loop: DraftLoop) -> NDArray[np.int64]:
    """Return the slot before each row's, the last one for position 0."""
    assert loop.states is not None
    batch, size = loop.batch.buffers, loop.batch.block_size
    before = batch.positions.array[: loop.batch.num_rows].astype(np.int64) - 1
    blocks = batch.block_tables.array[batch.batch_id_per_row.array[: len(before)], before // size]
    return np.where(before < 0, loop.states.shape[0] - 1, blocks * size + before % size)


def _advance(loop: DraftLoop, num_seqs: int, shifts: bool) -> None:
    """Lay out the next call's tokens, behind those of the last one."""
    batch, tokens = loop.batch.buffers, loop.token_ids.array
    drafted = np.maximum(loop.sampling.token_ids.array, 0)
    ends = batch.cu_seqlens_q.array[1 : num_seqs + 1].copy()
    if shifts:
        tokens[: ends[-1] - 1] = tokens[1 : ends[-1]]
        tokens[ends - 1] = drafted[:num_seqs]
        batch.num_computed.array[:num_seqs] += 1
        return
    if loop.source is not None:
        loop.source[:num_seqs] = loop.output[paddle.to_tensor(ends - 1)]
    tokens[:num_seqs] = drafted[:num_seqs]
    batch.num_computed.array[:num_seqs] += batch.num_scheduled.array[:num_seqs]
    batch.num_scheduled.array[:num_seqs] = 1


def _choose(loop: DraftLoop, stage: DraftStage, num_seqs: int, step: int) -> None:
    """Draw a token for the last row of every sequence."""
    batch, sampling = loop.batch.buffers, loop.sampling
    sampling.int_params.array[:num_seqs, _POSITION_COLUMN] = batch.kv_lens.array[:num_seqs]
    logits = paddle.zeros([num_seqs, loop.vocab_sizes[loop.size]], "float32")
    last_rows = paddle.to_tensor(batch.cu_seqlens_q.array[1 : num_seqs + 1] - 1)
    stage.compute_logits(paddle.gather(loop.output, last_rows), num_seqs, logits)
    sample(logits, sampling, num_seqs)
    loop.drafts.array[:num_seqs, step] = sampling.token_ids.array[:num_seqs]
