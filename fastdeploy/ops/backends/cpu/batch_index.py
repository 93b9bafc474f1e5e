# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.batch_index`."""

from __future__ import annotations

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.batch_index import StepBuffers
from fastdeploy.ops.reference import batch_index as reference


def virtual_padding(buffers: StepBuffers, num_seqs: int, block_size: int) -> None:
    """Compute the index arrays of a step."""
    run_native("fd_virtual_padding", *buffers.tensors(), num_seqs, block_size)


def shift_logits_rows(buffers: StepBuffers, num_sampled: int, num_rows: int) -> None:
    """Move rows to the front in place, as the reference does: kernel and host have the same memory."""
    reference.shift_logits_rows(buffers, num_sampled, num_rows)
