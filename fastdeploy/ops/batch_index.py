# SPDX-License-Identifier: Apache-2.0
"""Virtual padding: the rows of a step are packed, and these index arrays say which request each row belongs to.

request      0        1              2
rows         0 1 2 3  4              5 6 7
positions    8 9 ...  31             17 18 19      absolute, from num_computed on
logits_rows        3  4              5 6 7         the last num_logits rows of each request
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.reference import batch_index as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register

Ints = NDArray[np.int32] | Sequence[int]


class StepBuffers:
    """Memory of a `BatchIndex`: first the inputs of virtual padding, then its outputs. All are int32."""

    def __init__(self, max_rows: int, max_seqs: int, max_blocks_per_seq: int) -> None:
        self.num_scheduled = HostBuffer(max_seqs, "int32")
        self.num_computed = HostBuffer(max_seqs, "int32")
        self.num_logits = HostBuffer(max_seqs, "int32")
        self.num_blocks = HostBuffer(max_seqs, "int32")
        self.block_tables = HostBuffer((max_seqs, max_blocks_per_seq), "int32")
        self.totals = HostBuffer(2, "int32")
        self.cu_seqlens_q = HostBuffer(max_seqs + 1, "int32")
        self.cu_logits_rows = HostBuffer(max_seqs + 1, "int32")
        self.kv_lens = HostBuffer(max_seqs, "int32")
        self.batch_id_per_row = HostBuffer(max_rows, "int32")
        self.positions = HostBuffer(max_rows, "int32")
        self.slot_mapping = HostBuffer(max_rows, "int32")
        self.logits_rows = HostBuffer(max_rows, "int32")

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors in the order in which native operators take them."""
        return (
            self.num_scheduled.tensor,
            self.num_computed.tensor,
            self.num_logits.tensor,
            self.num_blocks.tensor,
            self.block_tables.tensor,
            self.totals.tensor,
            self.cu_seqlens_q.tensor,
            self.cu_logits_rows.tensor,
            self.kv_lens.tensor,
            self.batch_id_per_row.tensor,
            self.positions.tensor,
            self.slot_mapping.tensor,
            self.logits_rows.tensor,
        )


class BatchIndex:
    """Index arrays of one step; the tensors keep their memory from step to step.

    Attributes:
        cu_seqlens_q: [max_seqs + 1] int32, the first row of each request, then the number of rows.
        cu_logits_rows: [max_seqs + 1] int32, the same for the rows whose logits are computed.
        kv_lens: [max_seqs] int32, tokens in the cache after this step.
        block_tables: [max_seqs, max_blocks_per_seq] int32.
        batch_id_per_row, positions, slot_mapping: [max_rows] int32, for each row its request, its position and its slot
            in the cache (block id * block_size + offset).
        logits_rows: [max_rows] int32, the rows whose logits are computed.
        buffers: the same memory as NumPy arrays (`batch.buffers.logits_rows.array`), and the inputs.
    """

    def __init__(self, max_rows: int, max_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self._written_tables: list[Ints | None] = [None] * max_seqs  # the list behind each row of block_tables
        self._num_written = [0] * max_seqs  # and how many of its entries are there
        self._changed_tables = (max_seqs, 0)  # the first and the end of the tables that changed since the last upload
        self.buffers = buffers = StepBuffers(max_rows, max_seqs, max_blocks_per_seq)
        self.cu_seqlens_q: Tensor = buffers.cu_seqlens_q.tensor
        self.cu_logits_rows: Tensor = buffers.cu_logits_rows.tensor
        self.kv_lens: Tensor = buffers.kv_lens.tensor
        self.block_tables: Tensor = buffers.block_tables.tensor
        self.batch_id_per_row: Tensor = buffers.batch_id_per_row.tensor
        self.positions: Tensor = buffers.positions.tensor
        self.slot_mapping: Tensor = buffers.slot_mapping.tensor
        self.logits_rows: Tensor = buffers.logits_rows.tensor

    def fill(
        self, num_scheduled: Ints, num_computed: Ints, num_logits: Ints, block_tables: Sequence[Ints]
    ) -> AttentionMetadata:
        """Write the inputs as `write_inputs` does and compute the index arrays.

        Raises:
            ValueError: too many requests, rows or blocks, too few blocks, or a negative count.
        """
        self.write_inputs(num_scheduled, num_computed, num_logits, block_tables)
        return self.compute(len(block_tables))

    def write_inputs(
        self, num_scheduled: Ints, num_computed: Ints, num_logits: Ints, block_tables: Sequence[Ints]
    ) -> None:
        """Write the inputs of virtual padding.

        Args:
            num_scheduled: [num_seqs], rows of each request.
            num_computed: [num_seqs], tokens of each request that are already in the cache.
            num_logits: [num_seqs], how many of each request's last rows need logits.
            block_tables: block ids of each request, enough for num_computed + num_scheduled tokens. A list that was
                given for the same request in the previous step may have grown since but must not have changed
                otherwise.

        Raises:
            ValueError: too many requests or blocks.
        """
        max_seqs = len(self._written_tables)
        if len(block_tables) > max_seqs:
            raise ValueError(f"block_tables: expected at most {max_seqs} requests, got {len(block_tables)}")
        buffers = self.buffers
        scheduled, computed = buffers.num_scheduled.memory, buffers.num_computed.memory
        logits = buffers.num_logits.memory
        for b, table in enumerate(block_tables):
            scheduled[b], computed[b], logits[b] = num_scheduled[b], num_computed[b], num_logits[b]
            if self._written_tables[b] is not table or self._num_written[b] != len(table):
                self._sync_block_table(b, table)

    def _sync_block_table(self, b: int, table: Ints) -> None:
        """Write the entries of a request's block table that are not there yet."""
        start, count = self._num_written[b] if self._written_tables[b] is table else 0, len(table)
        self.buffers.block_tables.array[b, start:count] = table[start:]
        self.buffers.num_blocks.array[b] = count
        self._written_tables[b], self._num_written[b] = table, count
        self.note_changed_table(b)

    def note_changed_table(self, b: int) -> None:
        """Have the block table at an index of the batch uploaded the next time."""
        first, end = self._changed_tables
        self._changed_tables = (min(first, b), max(end, b + 1))

    def changed_tables(self, num_seqs: int) -> tuple[int, int]:
        """Return the first and the end of the block tables of the first requests that the next upload sends."""
        first, end = self._changed_tables
        return first, min(end, num_seqs)

    def upload(self, num_seqs: int) -> None:
        """Send the inputs of the first requests to the device, with those of their block tables that have changed."""
        buffers = self.buffers
        for buffer in (buffers.num_scheduled, buffers.num_computed, buffers.num_logits, buffers.num_blocks):
            buffer.upload(num_seqs)
        first, end = self.changed_tables(num_seqs)
        buffers.block_tables.upload(end, first)
        self._changed_tables = (max(first, num_seqs), self._changed_tables[1])

    def compute(self, num_seqs: int) -> AttentionMetadata:
        """Compute the index arrays of the first requests from the inputs in `buffers`.

        Raises:
            ValueError: as `fill` does.
        """
        virtual_padding(self.buffers, num_seqs, self.block_size)
        return self.attention_metadata(sum(self.buffers.num_scheduled.memory[:num_seqs].tolist()), num_seqs)

    def attention_metadata(self, num_rows: int, num_seqs: int) -> AttentionMetadata:
        """Return the index arrays as attention takes them, for the first rows and sequences."""
        return AttentionMetadata(
            num_rows=num_rows,
            num_seqs=num_seqs,
            cu_seqlens_q=self.cu_seqlens_q,
            kv_lens=self.kv_lens,
            block_tables=self.block_tables,
            slot_mapping=self.slot_mapping,
            positions=self.positions,
        )


def virtual_padding(buffers: StepBuffers, num_seqs: int, block_size: int) -> None:
    """Compute the outputs of `buffers` from its inputs for the first num_seqs requests.

    Raises:
        ValueError: the inputs are inconsistent.
    """
    _VIRTUAL_PADDING.run(buffers, num_seqs, block_size)


def shift_logits_rows(buffers: StepBuffers, num_sampled: int, num_rows: int) -> None:
    """Move logits_rows[num_sampled : num_sampled + num_rows] to the front, over those that have been sampled.

    Raises:
        ValueError: logits_rows has fewer entries.
    """
    _SHIFT_LOGITS_ROWS.run(buffers, num_sampled, num_rows)


def _example(lookup: Lookup) -> Sequence[paddle.Tensor]:
    buffers = StepBuffers(16, 4, 8)
    buffers.num_scheduled.array[:] = [5, 1, 3, 2]
    buffers.num_computed.array[:] = [0, 31, 17, 15]
    buffers.num_logits.array[:] = [0, 1, 3, 1]
    buffers.num_blocks.array[:] = [1, 2, 2, 2]
    buffers.block_tables.array[:] = np.random.default_rng(1).permutation(32).reshape(4, 8)
    lookup("virtual_padding")(buffers, 4, 16)
    names = ("totals", "cu_seqlens_q", "cu_logits_rows", "kv_lens")
    per_row = ("batch_id_per_row", "positions", "slot_mapping")
    return [
        *(getattr(buffers, name).tensor for name in names),
        *(getattr(buffers, name).tensor[:11] for name in per_row),
        buffers.logits_rows.tensor[:5],
    ]


def _shift_example(num_sampled: int, num_rows: int, lookup: Lookup) -> Sequence[paddle.Tensor]:
    buffers = StepBuffers(40, 4, 8)
    buffers.logits_rows.array[:] = np.random.default_rng(2).permutation(40)
    lookup("shift_logits_rows")(buffers, num_sampled, num_rows)
    return [buffers.logits_rows.tensor]


_VIRTUAL_PADDING = register(OpEntry("virtual_padding", reference.virtual_padding, examples=[_example]))
_SHIFT_LOGITS_ROWS = register(
    OpEntry(
        "shift_logits_rows",
        reference.shift_logits_rows,
        examples=[partial(_shift_example, *counts) for counts in ((3, 20), (20, 20), (40, 0))],
    )
)
