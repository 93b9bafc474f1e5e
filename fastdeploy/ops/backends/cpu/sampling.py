# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.sampling`."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.sampling import LogprobBuffers, SamplingBatch


def sample(
    logits: Tensor, batch: SamplingBatch, num_rows: int, keep_processed: bool, stop_at_rejections: bool = False
) -> None:
    """Sample all rows, in parallel over rows and blocks of the vocabulary."""
    run_native(
        "fd_sample",
        logits,
        batch.float_params.tensor,
        batch.int_params.tensor,
        batch.history.tensor,
        batch.bias_ids.tensor,
        batch.bias_values.tensor,
        batch.banned_ids.tensor,
        batch.mask_words.tensor,
        batch.token_ids.tensor,
        batch.status.tensor,
        batch.draft_is_allowed.tensor,
        num_rows,
        keep_processed,
        stop_at_rejections,
    )


def logprobs(logits: Tensor, rows: Tensor, chosen: Tensor, num_rows: int, top_n: int, out: LogprobBuffers) -> None:
    """Compute log-probabilities and the most probable ids."""
    run_native(
        "fd_logprobs",
        logits,
        rows,
        chosen,
        out.chosen_logprob.tensor,
        out.chosen_rank.tensor,
        out.top_ids.tensor,
        out.top_logprobs.tensor,
        num_rows,
        top_n,
    )
