# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.sampling`."""

from __future__ import annotations

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.buffer import HostBuffer
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
        batch.draft_survives.tensor,
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


def philox4x32(counters: NDArray[np.uint32], key: int) -> NDArray[np.uint32]:
    """Return the random words [n, 4] of counters [n, 4]."""
    words = HostBuffer(counters.shape, "int64")
    run_native("fd_philox4x32", paddle.to_tensor(counters.astype(np.int64)), words.tensor, _signed(key))
    return words.array.astype(np.uint32)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> NDArray[np.float32]:
    """Return the noise of every id at one position."""
    noise = HostBuffer(vocab_size, "float32")
    run_native("fd_gumbel_noise", noise.tensor, _signed(seed), position)
    return noise.array.copy()


def gumbel_of_words(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return the Gumbel transform of random words."""
    noise = HostBuffer(len(words), "float32")
    run_native("fd_gumbel_of_words", paddle.to_tensor(words.astype(np.int64)), noise.tensor)
    return noise.array.copy()


def _signed(word: int) -> int:
    """Return the 64 bits of an unsigned integer as a signed one."""
    return (word & (2**64 - 1)) - ((word & 2**63) << 1)
