# SPDX-License-Identifier: Apache-2.0
"""Sampling: one procedure over rows of float32 logits, the same on every backend.

logit_bias -> repetition, presence, frequency penalties -> banned ids, mask -> temperature -> top_k -> top_p -> min_p ->
argmax(logit + noise) over the remaining ids, the allowed set. The Gumbel noise is a function of (seed, position, token
id) alone, so a row's token does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.reference import sampling as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register

MAX_TOP_LOGPROBS = 20
NO_MASK = -1


class FloatColumn(IntEnum):
    """Columns of `SamplingBatch.float_params`."""

    TEMPERATURE = 0  # below 1e-5: argmax
    TOP_P = 1  # 1 and above: off; 0 keeps one id
    MIN_P = 2  # 0: off
    REPETITION = 3  # 1: off
    PRESENCE = 4  # 0: off
    FREQUENCY = 5  # 0: off


class IntColumn(IntEnum):
    """Columns of `SamplingBatch.int_params`."""

    SEED = 0  # unsigned 64-bit seed, stored as int64
    POSITION = 1  # absolute position of the sampled token
    TOP_K = 2  # 0 and below: off
    HISTORY_BEGIN = 3  # history[begin:end] are the token ids that the penalties count
    OUTPUT_BEGIN = 4  # start of the output tokens in history
    HISTORY_END = 5
    BIAS_BEGIN = 6
    BIAS_END = 7
    BANNED_BEGIN = 8
    BANNED_END = 9
    DRAFT_ID = 10  # -1: none
    VOCAB_LIMIT = 11  # ids from this one on are never sampled
    MASK_BEGIN = 12  # start of the row's bit mask in mask_words; -1: all ids are allowed


class RowStatus(IntEnum):
    """Outcome of a row."""

    OK = 0
    NAN = 1  # a logit is NaN or +inf
    EMPTY = 2  # every id was removed
    SKIPPED = 3  # not sampled: an earlier row rejected its draft


class _RaggedList:
    """A growable host buffer; rows refer to ranges of it."""

    def __init__(self, dtype: str, capacity: int = 1024) -> None:
        self._dtype = dtype
        self.buffer = HostBuffer(capacity, dtype)
        self.size = 0
        self.has_moved = False

    def append(self, values: NDArray | Sequence[int] | Sequence[float]) -> int:
        begin, self.size = self.size, self.size + len(values)
        if self.size > len(self.buffer.array):
            old = self.buffer.array
            self.buffer = HostBuffer((max(self.size, 2 * len(old))), self._dtype)
            self.buffer.array[:begin] = old[:begin]
            self.has_moved = True
        self.buffer.array[begin : self.size] = values
        return begin


class SamplingBatch:
    """Sampling parameters and results of up to `max_rows` rows, in memory that the host accesses without copies.

    Attributes:
        float_params: [max_rows, 6] float32, columns FloatColumn.
        int_params: [max_rows, 13] int64, columns IntColumn.
        token_ids: [max_rows] int32, the sampled ids; -1 where the status is not OK.
        status: [max_rows] int32, RowStatus.
        draft_is_allowed: [max_rows] uint8, 1 if the row's draft is in its allowed set.
    """

    def __init__(self, max_rows: int) -> None:
        self.float_params = HostBuffer((max_rows, len(FloatColumn)), "float32")
        self.int_params = HostBuffer((max_rows, len(IntColumn)), "int64")
        self.token_ids = HostBuffer(max_rows, "int32")
        self.status = HostBuffer(max_rows, "int32")
        self.draft_is_allowed = HostBuffer(max_rows, "uint8")
        self._history, self._banned_ids = _RaggedList("int32"), _RaggedList("int32")
        self._bias_ids, self._bias_values = _RaggedList("int32"), _RaggedList("float32")
        self._mask_words = _RaggedList("int32")
        self._lists = (self._history, self._bias_ids, self._bias_values, self._banned_ids, self._mask_words)
        self.float_params.array[:] = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
        self.int_params.array[:, IntColumn.DRAFT_ID] = -1
        self.int_params.array[:, IntColumn.VOCAB_LIMIT] = 2**31 - 1
        self.int_params.array[:, IntColumn.MASK_BEGIN] = NO_MASK

    @property
    def history(self) -> HostBuffer:
        """Token ids of prompts and outputs, int32."""
        return self._history.buffer

    @property
    def bias_ids(self) -> HostBuffer:
        """Ids whose logits are biased, int32."""
        return self._bias_ids.buffer

    @property
    def bias_values(self) -> HostBuffer:
        """Terms added to the logits of `bias_ids`, float32."""
        return self._bias_values.buffer

    @property
    def banned_ids(self) -> HostBuffer:
        """Ids that are never sampled, int32."""
        return self._banned_ids.buffer

    @property
    def mask_words(self) -> HostBuffer:
        """Masks of ceil(V / 32) words each, int32: bit v % 32 of word v // 32 is 1 if id v is allowed."""
        return self._mask_words.buffer

    def clear(self) -> None:
        """Empty the lists; the rows of parameters are unchanged."""
        for ragged in self._lists:
            ragged.size = 0

    def has_moved(self) -> bool:
        """Return whether a list has been reallocated since the last call; captured graphs then hold an old address."""
        moved = [ragged for ragged in self._lists if ragged.has_moved]
        for ragged in moved:
            ragged.has_moved = False
        return bool(moved)

    def upload(self, num_rows: int) -> None:
        """Send the parameters of the first rows, and the lists, to the device."""
        self.float_params.upload(num_rows)
        self.int_params.upload(num_rows)
        for ragged in self._lists:
            ragged.buffer.upload(ragged.size)

    def download(self, num_rows: int) -> None:
        """Fetch the results of the first rows; they are there after `Backend.synchronize`."""
        self.token_ids.download(num_rows)
        self.status.download(num_rows)

    def append_history(self, token_ids: NDArray | Sequence[int]) -> int:
        """Append a context and return its start."""
        return self._history.append(token_ids)

    def append_bias(self, ids: NDArray | Sequence[int], values: NDArray | Sequence[float]) -> int:
        """Append biases and return their start."""
        self._bias_values.append(values)
        return self._bias_ids.append(ids)

    def append_banned(self, ids: NDArray | Sequence[int]) -> int:
        """Append banned ids and return their start."""
        return self._banned_ids.append(ids)

    def append_mask(self, words: NDArray) -> int:
        """Append one or more masks of int32 words and return their start."""
        return self._mask_words.append(words.reshape(-1))


class LogprobBuffers:
    """Inputs and results of `logprobs` for up to `max_rows` rows.

    Attributes:
        rows: [max_rows] int32, rows of the logits; chosen: [max_rows] int32, the ids whose log-probability is computed.
        chosen_logprob: [max_rows] float32; chosen_rank: [max_rows] int32, 1 for the most probable id.
        top_ids, top_logprobs: [max_rows, max_top_n] int32 and float32, most probable first, ties by id; -1 and NaN
            if the vocabulary is smaller or the row holds NaN.
    """

    def __init__(self, max_rows: int, max_top_n: int = MAX_TOP_LOGPROBS) -> None:
        self.rows = HostBuffer(max_rows, "int32")
        self.chosen = HostBuffer(max_rows, "int32")
        self.chosen_logprob = HostBuffer(max_rows, "float32")
        self.chosen_rank = HostBuffer(max_rows, "int32")
        self.top_ids = HostBuffer((max_rows, max(max_top_n, 1)), "int32")
        self.top_logprobs = HostBuffer((max_rows, max(max_top_n, 1)), "float32")

    def upload(self, num_rows: int) -> None:
        """Send the inputs of the first rows to the device."""
        self.rows.upload(num_rows)
        self.chosen.upload(num_rows)

    def download(self, num_rows: int) -> None:
        """Fetch the results of the first rows; they are there after `Backend.synchronize`."""
        for buffer in (self.chosen_logprob, self.chosen_rank, self.top_ids, self.top_logprobs):
            buffer.download(num_rows)


def sample(
    logits: Tensor,
    batch: SamplingBatch,
    num_rows: int,
    keep_processed: bool = False,
    stop_at_rejections: bool = False,
) -> None:
    """Sample a token for each of the first rows; fill batch.token_ids, batch.status and batch.draft_is_allowed.

    Args:
        logits: [>= num_rows, V] float32.
        num_rows: rows to sample.
        keep_processed: write the processed logits back, -inf for ids outside the allowed set. In greedy rows only
            banned and masked ids are removed, and logits are not divided by the temperature.
        stop_at_rejections: a row with a draft is followed by the row that verifies the next token. Rows after one whose
            token differs from its draft are SKIPPED; with `keep_processed` their logits are undefined.

    Raises:
        ValueError: a row's range exceeds its list, or a buffer is too small.
    """
    _sample.run(logits, batch, num_rows, keep_processed, stop_at_rejections)


def logprobs(logits: Tensor, rows: Tensor, chosen: Tensor, num_rows: int, top_n: int, out: LogprobBuffers) -> None:
    """Compute log-probabilities under softmax(logits[rows[i]]) of chosen[i] and of the top_n most probable ids.

    Args:
        logits: [capacity, V] float32; rows, chosen: [>= num_rows] int32.
        top_n: 0 up to the number of columns of out.top_ids.

    Raises:
        ValueError: a row, an id or top_n is out of range.
    """
    _logprobs.run(logits, rows, chosen, num_rows, top_n, out)


def _example_batch(num_rows: int, vocab_size: int) -> tuple[Tensor, SamplingBatch]:
    """Return logits and parameters that use every option of sampling."""
    rng = np.random.default_rng(7)
    logits = HostBuffer((num_rows, vocab_size), "float32")
    logits.array[:] = rng.standard_normal(logits.array.shape) * 3
    batch = SamplingBatch(num_rows)
    floats, ints = batch.float_params.array, batch.int_params.array
    for row in range(num_rows):
        history = rng.integers(0, vocab_size, 40)
        begin = batch.append_history(history)
        bias = batch.append_bias([row, row + 9], [2.5, -1.5])
        banned = batch.append_banned([int(np.argmax(logits.array[row])), row])
        floats[row] = [0.4 * row, 1 - 0.1 * (row % 4), 0.05 * (row % 3), 1 + 0.1 * (row % 2), 0.2, 0.1 * (row % 5)]
        ints[row, : IntColumn.VOCAB_LIMIT] = [
            *(row * 7919, 100 + row, 20 * (row % 3), begin, begin + 30, begin + 40),
            *(bias, bias + 2 * (row % 2), banned, banned + row % 3, row),
        ]
        if row % 4 == 1:
            ints[row, IntColumn.MASK_BEGIN] = batch.append_mask(rng.integers(-(2**31), 2**31, (vocab_size + 31) // 32))
    return logits.tensor, batch


def _example_sample(lookup: Lookup) -> Sequence[Tensor]:
    logits, batch = _example_batch(12, 1000)
    lookup("sample")(logits, batch, 12, True)
    return [batch.token_ids.tensor, batch.status.tensor, batch.draft_is_allowed.tensor, paddle.clip(logits, min=-1e4)]


def _example_logprobs(lookup: Lookup) -> Sequence[Tensor]:
    logits, _ = _example_batch(6, 1000)
    out = LogprobBuffers(4)
    rows, chosen = paddle.to_tensor([5, 0, 3, 3], dtype="int32"), paddle.to_tensor([1, 999, 500, 0], dtype="int32")
    lookup("logprobs")(logits, rows, chosen, 4, 20, out)
    return [buffer.tensor for buffer in (out.chosen_logprob, out.chosen_rank, out.top_ids, out.top_logprobs)]


_FLOAT = {"float32": 2e-6}
_sample = register(OpEntry("sample", reference.sample, _FLOAT, [_example_sample]))
_logprobs = register(OpEntry("logprobs", reference.logprobs, _FLOAT, [_example_logprobs]))
