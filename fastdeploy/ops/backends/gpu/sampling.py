# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.sampling`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor

from fastdeploy.ops.backends.gpu.checks import require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch
from fastdeploy.ops.sampling import FloatColumn, IntColumn, SamplingBatch

MAX_VOCAB_SIZE = 1 << 18  # kMaxVocabSize of custom_ops/gpu_ops/sample_filters.h
_SAMPLE = "sample"
_workspaces: dict[str, list[Tensor]] = {}  # by Paddle's device; the last one is in use, graphs may use the others


def _workspace(max_rows: int, vocab_size: int) -> Tensor:
    """Return memory for what the launches of `sample` exchange; it is kept for the next calls."""
    num_bytes = ctypes.c_int64()
    active().call("fd_sample_workspace", max_rows, vocab_size, num_bytes)
    workspaces = _workspaces.setdefault(paddle.get_device(), [])
    if not workspaces or workspaces[-1].shape[0] < num_bytes.value:
        workspaces.append(paddle.empty([num_bytes.value], "uint8"))
    return workspaces[-1]


def sample(
    logits: Tensor, batch: SamplingBatch, num_rows: int, keep_processed: bool, stop_at_rejections: bool = False
) -> None:
    """Sample all rows in five launches; ranges of rows that exceed their list are cut, not refused."""
    require_dtype(_SAMPLE, "float32", logits=logits)
    if len(logits.shape) != 2:
        raise ValueError(f"{_SAMPLE}: logits: expected [{num_rows} or more, V], got {list(logits.shape)}")
    vocab_size = logits.shape[1]
    require_rows(_SAMPLE, num_rows, vocab_size, logits=logits)
    require_rows(_SAMPLE, num_rows, len(FloatColumn), float_params=batch.float_params.tensor)
    require_rows(_SAMPLE, num_rows, len(IntColumn), int_params=batch.int_params.tensor)
    require_length(_SAMPLE, num_rows, token_ids=batch.token_ids.tensor, status=batch.status.tensor)
    require_length(_SAMPLE, num_rows, draft_is_allowed=batch.draft_is_allowed.tensor)
    history, bias_ids = batch.history.tensor, batch.bias_ids.tensor
    banned_ids, mask_words = batch.banned_ids.tensor, batch.mask_words.tensor
    workspace = _workspace(logits.shape[0], vocab_size)  # so that no number of rows needs more
    launch(
        "fd_sample",
        logits,
        batch.float_params.tensor,
        batch.int_params.tensor,
        history,
        history.shape[0],
        bias_ids,
        batch.bias_values.tensor,
        bias_ids.shape[0],
        banned_ids,
        banned_ids.shape[0],
        mask_words,
        mask_words.shape[0],
        batch.token_ids.tensor,
        batch.status.tensor,
        batch.draft_is_allowed.tensor,
        workspace,
        workspace.shape[0],
        *active().row_count(num_rows),
        vocab_size,
        keep_processed,
        stop_at_rejections,
    )


KERNELS: dict[str, Callable[..., Any]] = {_SAMPLE: sample}
