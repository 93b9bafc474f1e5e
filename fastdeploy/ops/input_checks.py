# SPDX-License-Identifier: Apache-2.0
"""Checks of what the host has written, before it is sent to a device whose kernels do not check it.

The errors are those of the CPU's operators. A check reads each number once, and of block tables only what has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fastdeploy.ops.batch_index import BatchIndex
    from fastdeploy.ops.buffer import HostBuffer
    from fastdeploy.ops.sampling import LogprobBuffers
    from fastdeploy.ops.verify import VerifyBatch


@dataclass(frozen=True)
class InputLimits:
    """What the rows of a step may refer to.

    Attributes:
        vocab_size: rows of the embedding table.
        num_blocks: blocks of the KV caches.
        num_positions: positions for which the model has rotary angles.
    """

    vocab_size: int
    num_blocks: int
    num_positions: int

    def check_rows(
        self,
        batch: BatchIndex,
        token_ids: HostBuffer,
        num_seqs: int,
        operator: str = "virtual_padding",
        num_later: NDArray[np.int32] | int = 0,
    ) -> int:
        """Check the rows of the first requests, and the block tables that the next upload sends.

        Args:
            operator: named in errors about counts.
            num_later: how many tokens later passes add to each request.

        Returns:
            The number of rows.

        Raises:
            ValueError: a count does not fit the buffers, or an id or position is out of range.
        """
        buffers, last = batch.buffers, self.num_positions - 1
        num_rows, num_tokens = check_counts(batch, num_seqs, operator, num_later)
        if num_seqs and num_tokens.max() > self.num_positions:
            index = int((num_tokens > self.num_positions).argmax())
            position = max(int(buffers.num_computed.array[index]), self.num_positions)
            raise ValueError(f"append_attention: positions: expected 0..{last}, got {position}")
        first, end = batch.changed_tables(num_seqs)
        if first < end:
            self._check_tables(buffers.block_tables.array[first:end], buffers.num_blocks.array[first:end])
        if (row := _first_outside(token_ids.array[:num_rows], self.vocab_size)) is not None:
            expected, token = f"0..{self.vocab_size - 1}", token_ids.array[row]
            raise ValueError(f"embedding: token_ids: expected {expected}, got {token} at row {row}")
        return num_rows

    def _check_tables(self, tables: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Check the first `counts` entries of each block table."""
        used = tables[:, : counts.max()]
        if _first_outside(used, self.num_blocks) is None:
            return
        is_unused = np.arange(used.shape[1]) >= counts[:, None]  # left by a longer table
        blocks = np.where(is_unused, 0, used).reshape(-1)
        if (index := _first_outside(blocks, self.num_blocks)) is not None:
            raise ValueError(f"append_attention: block_tables: expected a block of the cache, got {blocks[index]}")


def check_counts(
    batch: BatchIndex, num_seqs: int, operator: str, num_later: NDArray[np.int32] | int = 0
) -> tuple[int, NDArray[np.int64]]:
    """Check the inputs of virtual padding for the first requests.

    Args:
        num_later: how many tokens later passes add to each request.

    Returns:
        The number of rows, and the number of tokens of each request after all passes.

    Raises:
        ValueError: a count is negative or does not fit the buffers.
    """
    buffers, size, max_rows = batch.buffers, batch.block_size, len(batch.buffers.positions.array)
    max_seqs, max_blocks = buffers.block_tables.array.shape
    if not 0 <= num_seqs <= max_seqs:
        raise ValueError(f"{operator}: num_seqs: expected at most the sequences of the buffers, got {num_seqs}")
    inputs = (buffers.num_scheduled, buffers.num_computed, buffers.num_logits, buffers.num_blocks)
    scheduled, computed, num_logits, num_blocks = (buffer.array[:num_seqs] for buffer in inputs)
    num_tokens = np.add(computed, scheduled, dtype=np.int64) + num_later
    _require(scheduled >= 0, f"{operator}: num_scheduled", "at least 0", scheduled)
    _require(computed >= 0, f"{operator}: num_computed", "at least 0", computed)
    is_valid = (num_logits >= 0) & (num_logits <= scheduled)
    _require(is_valid, f"{operator}: num_logits", "0..{}", num_logits, scheduled)
    is_valid = np.minimum(num_blocks, max_blocks) * size >= num_tokens
    _require(is_valid, f"{operator}: block_tables", "blocks for {} tokens", num_blocks, num_tokens)
    if (num_rows := int(scheduled.sum())) > max_rows:
        total = scheduled.cumsum()
        _require(total <= max_rows, f"{operator}: num_scheduled", f"at most {max_rows} rows", total)
    return num_rows, num_tokens


def check_row_ranges(batch: VerifyBatch) -> None:
    """Check the verification rows of each request.

    Raises:
        ValueError: a range is not within the rows.
    """
    first, count = (buffer.array[: batch.num_seqs] for buffer in (batch.first_row, batch.row_count))
    end, operator = np.add(first, count, dtype=np.int64), "verify_draft_tokens"
    for name, values in (("first_row", first), ("row_count", count)):
        if values.min(initial=0) < 0:
            raise ValueError(f"{operator}: {name}: expected at least 0, got {values[int((values < 0).argmax())]}")
    if end.max(initial=0) > (num_rows := len(batch.emitted.array)):
        expected, got = "ranges within the rows of target, draft_is_allowed and emitted", end[end > num_rows][0]
        raise ValueError(f"{operator}: row_count: expected {expected}, got {got}")


def check_logprob_rows(buffers: LogprobBuffers, count: int, num_rows: int, vocab_size: int) -> None:
    """Check the first rows and chosen ids of log-probabilities of logits [num_rows, vocab_size].

    Raises:
        ValueError: a row or id is out of range.
    """
    for name, buffer, limit in (("rows", buffers.rows, num_rows), ("chosen", buffers.chosen, vocab_size)):
        if (index := _first_outside(buffer.array[:count], limit)) is not None:
            raise ValueError(f"logprobs: {name}: expected 0..{limit - 1}, got {buffer.array[index]}")


def _first_outside(values: NDArray[np.int32], limit: int) -> int | None:
    """Return the index of the first value, in the order of memory, that is not in 0 .. limit - 1."""
    unsigned = values.view(np.uint32)  # in which negative values are larger than any limit
    return int((unsigned >= limit).argmax()) if unsigned.max(initial=0) >= limit else None


def _require(
    is_valid: NDArray[np.bool_], argument: str, expected: str, got: NDArray, bounds: NDArray | None = None
) -> None:
    """Raise an error about the first request that is not valid; `{}` in `expected` is its bound."""
    if is_valid.all():
        return
    index = int(is_valid.argmin())
    expected = expected if bounds is None else expected.format(bounds[index])
    raise ValueError(f"{argument}: expected {expected}, got {got[index]} for request {index}")
