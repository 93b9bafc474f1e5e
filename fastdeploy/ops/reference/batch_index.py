# SPDX-License-Identifier: Apache-2.0
"""Index arrays of a step in NumPy, on the host buffers themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fastdeploy.ops.batch_index import StepBuffers


def virtual_padding(buffers: StepBuffers, num_seqs: int, block_size: int) -> None:
    """As `fastdeploy.ops.batch_index.virtual_padding`."""
    counts, computed, num_logits = (
        buffer.array[:num_seqs] for buffer in (buffers.num_scheduled, buffers.num_computed, buffers.num_logits)
    )
    kv_lens = computed + counts
    if (buffers.num_blocks.array[:num_seqs] * block_size < kv_lens).any():
        raise ValueError("virtual_padding: block_tables: expected blocks for every token, got too few")
    starts = np.cumsum([0, *counts])
    owner = np.repeat(np.arange(num_seqs), counts)
    positions = computed[owner] + np.arange(starts[-1]) - starts[owner]
    slots = buffers.block_tables.array[owner, positions // block_size] * block_size + positions % block_size
    is_wanted = np.arange(starts[-1]) >= starts[owner + 1] - num_logits[owner]
    rows = len(positions)
    buffers.totals.array[:] = [rows, num_logits.sum()]
    buffers.cu_seqlens_q.array[: num_seqs + 1] = starts
    buffers.cu_logits_rows.array[: num_seqs + 1] = np.cumsum([0, *num_logits])
    buffers.kv_lens.array[:num_seqs] = kv_lens
    buffers.batch_id_per_row.array[:rows] = owner
    buffers.positions.array[:rows] = positions
    buffers.slot_mapping.array[:rows] = slots
    buffers.logits_rows.array[: is_wanted.sum()] = np.flatnonzero(is_wanted)


def shift_logits_rows(buffers: StepBuffers, num_sampled: int, num_rows: int) -> None:
    """As `fastdeploy.ops.batch_index.shift_logits_rows`."""
    rows = buffers.logits_rows.array
    if num_sampled + num_rows > len(rows):
        raise ValueError(f"shift_logits_rows: num_rows: expected at most {len(rows) - num_sampled}, got {num_rows}")
    rows[:num_rows] = rows[num_sampled : num_sampled + num_rows]
