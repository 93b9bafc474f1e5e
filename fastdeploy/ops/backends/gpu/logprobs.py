# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operator `logprobs` in `fastdeploy.ops.sampling`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor

from fastdeploy.ops.backends.gpu.checks import require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch
from fastdeploy.ops.sampling import LogprobBuffers

MAX_SCRATCH_BYTES = 64 << 20  # if more than one row is computed at once

_scratch: dict[str, Tensor] = {}  # by the device that was Paddle's default


def logprobs(logits: Tensor, rows: Tensor, chosen: Tensor, num_rows: int, top_n: int, out: LogprobBuffers) -> None:
    """Compute log-probabilities in three launches; the rows and the chosen ids are not checked."""
    operator, stride = "logprobs", out.top_ids.tensor.shape[1]
    require_dtype(operator, "float32", logits=logits)
    require_dtype(operator, "int32", rows=rows, chosen=chosen)
    require_rows(operator, 0, logits.shape[-1], logits=logits)
    require_length(operator, num_rows, rows=rows, chosen=chosen, chosen_rank=out.chosen_rank.tensor)
    require_rows(operator, num_rows, stride, top_ids=out.top_ids.tensor, top_logprobs=out.top_logprobs.tensor)
    if not 0 <= top_n <= stride:
        raise ValueError(f"{operator}: top_n: expected 0 to {stride}, the columns of top_ids, got {top_n}")
    capacity, vocab_size = logits.shape
    scratch = _scratch_for(num_rows, vocab_size, top_n)
    launch(
        "fd_logprobs",
        logits,
        capacity,
        vocab_size,
        rows,
        chosen,
        out.chosen_logprob.tensor,
        out.chosen_rank.tensor,
        out.top_ids.tensor,
        out.top_logprobs.tensor,
        stride,
        top_n,
        scratch,
        scratch.shape[0],
        *active().row_count(num_rows),
    )


def _scratch_for(num_rows: int, vocab_size: int, top_n: int) -> Tensor:
    """Return memory for as many rows as fit in MAX_SCRATCH_BYTES, at least one; it is kept for the next calls."""
    library, row_bytes = active(), ctypes.c_int64()
    library.call("fd_logprobs_row_bytes", vocab_size, top_n, row_bytes)
    rows_at_once = max(1, min(num_rows, MAX_SCRATCH_BYTES // max(row_bytes.value, 1)))
    num_bytes, device = rows_at_once * row_bytes.value, paddle.get_device()
    scratch = _scratch.get(device)
    if scratch is None or scratch.shape[0] < num_bytes:
        if library.stream is not None:
            library.call("fd_device_stream_sync", library.stream)  # what was launched may use the old memory
        scratch = _scratch[device] = paddle.empty([num_bytes], "uint8")
    return scratch


KERNELS: dict[str, Callable[..., Any]] = {"logprobs": logprobs}
