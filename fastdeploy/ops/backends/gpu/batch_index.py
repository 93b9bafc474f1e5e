# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.batch_index`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastdeploy.ops.backends.gpu.library import active, launch
from fastdeploy.ops.batch_index import StepBuffers


def virtual_padding(buffers: StepBuffers, num_seqs: int, block_size: int) -> None:
    """Compute the index arrays of a step in one launch; the counts of each request are not checked."""
    max_rows = buffers.positions.tensor.shape[0]
    max_seqs, table_stride = buffers.block_tables.tensor.shape
    counts = active().seq_count(num_seqs)
    launch("fd_virtual_padding", *buffers.tensors(), max_rows, max_seqs, table_stride, *counts, block_size)


def shift_logits_rows(buffers: StepBuffers, num_sampled: int, num_rows: int) -> None:
    """Move the rows of the next logits batch to the front; it is not captured."""
    rows = buffers.logits_rows.tensor
    launch("fd_shift_logits_rows", rows, rows.shape[0], num_sampled, num_rows)


KERNELS: dict[str, Callable[..., Any]] = {
    "virtual_padding": virtual_padding,
    "shift_logits_rows": shift_logits_rows,
}
