# SPDX-License-Identifier: Apache-2.0
"""Virtual padding: rows of a step are packed, and these index arrays say whose row is which.

request      0        1              2
rows         0 1 2 3  4              5 6 7
positions    8 9 ...  31             17 18 19      absolute, num_computed onwards
logits_rows        3  4              5 6 7         the last num_logits rows of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.reference import batch_index as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register


class StepBuffers:
    """Memory behind a `BatchIndex`: inputs of virtual padding, then its outputs. All int32."""

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
        """Return all of them, in the order in which native operators take them."""
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
    """Index arrays of one step over B requests and R rows; the tensors keep their memory from step to step.

    Attributes:
        num_rows, num_seqs, num_logits_rows: R, B and the number of rows whose logits are wanted (L).
        cu_seqlens_q: [max_seqs + 1] int32, first row of each request; entry B is R.
        cu_logits_rows: [max_seqs + 1] int32, the same for the L rows.
        kv_lens: [max_seqs] int32, tokens in the cache after this step.
        block_tables: [max_seqs, max_blocks_per_seq] int32.
        batch_id_per_row, positions, slot_mapping: [max_rows] int32, of each row its request, its position and its slot
            in the cache (block id * block_size + offset).
        logits_rows: [max_rows] int32, the L rows whose logits are wanted.
        buffers: the same memory as NumPy arrays (`batch.buffers.logits_rows.array`).
    """

    def __init__(self, max_rows: int, max_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self._tables: list[NDArray[np.int32] | Sequence[int] | None] = [None] * max_seqs  # that the rows show
        self._num_shown = [0] * max_seqs
        self.num_rows = self.num_seqs = self.num_logits_rows = 0
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
        self,
        num_scheduled: NDArray[np.int32],
        num_computed: NDArray[np.int32],
        num_logits: NDArray[np.int32],
        block_tables: Sequence[NDArray[np.int32] | Sequence[int]],
    ) -> None:
        """Describe the next step and index its rows; arguments as `describe` has them.

        Raises:
            ValueError: too many requests, rows or blocks, too few blocks, or a negative count.
        """
        self.describe(num_scheduled, num_computed, num_logits, block_tables)
        self.index(len(block_tables))

    def describe(
        self,
        num_scheduled: NDArray[np.int32] | Sequence[int],
        num_computed: NDArray[np.int32] | Sequence[int],
        num_logits: NDArray[np.int32] | Sequence[int],
        block_tables: Sequence[NDArray[np.int32] | Sequence[int]],
    ) -> None:
        """Write what virtual padding reads.

        Args:
            num_scheduled, num_computed, num_logits: [B], rows of each request, its tokens already in the cache, and how
                many of its last rows want logits.
            block_tables: block ids of each request, enough for num_computed + num_scheduled tokens. A list that was
                given for the same b in the step before may have grown since, and has not changed otherwise.

        Raises:
            ValueError: too many requests or blocks.
        """
        if len(block_tables) > len(self._tables):
            raise ValueError(f"block_tables: expected at most {len(self._tables)} requests, got {len(block_tables)}")
        buffers = self.buffers
        scheduled, computed = buffers.num_scheduled.memory, buffers.num_computed.memory
        logits = buffers.num_logits.memory
        for b, table in enumerate(block_tables):
            scheduled[b], computed[b], logits[b] = num_scheduled[b], num_computed[b], num_logits[b]
            if self._tables[b] is not table or self._num_shown[b] != len(table):
                self._show(b, table)

    def _show(self, b: int, table: NDArray[np.int32] | Sequence[int]) -> None:
        """Write what a request's row of the block tables does not show yet."""
        shown, count = self._num_shown[b] if self._tables[b] is table else 0, len(table)
        self.buffers.block_tables.array[b, shown:count] = table[shown:]
        self.buffers.num_blocks.array[b] = count
        self._tables[b], self._num_shown[b] = table, count

    def index(self, num_seqs: int) -> None:
        """Describe the step of the first requests whose numbers and block tables stand in `buffers`.

        Raises:
            ValueError: as `fill` does.
        """
        virtual_padding(self.buffers, num_seqs, self.block_size)
        self.num_seqs = num_seqs
        self.num_rows, self.num_logits_rows = self.buffers.totals.array.tolist()


@dataclass
class StepView:
    """The index arrays of a batch with the rows and sequences of one step, or with all that they have room for."""

    num_rows: int
    num_seqs: int
    positions: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor


def full_step(batch: BatchIndex, num_rows: int) -> StepView:
    """Return the step of `num_rows` rows, and of as many sequences as the batch has room for, to be recorded."""
    return step_view(batch, num_rows, batch.kv_lens.shape[0])


def step_view(batch: BatchIndex, num_rows: int, num_seqs: int) -> StepView:
    """Return the step of so many rows and sequences."""
    return StepView(
        num_rows=num_rows,
        num_seqs=num_seqs,
        positions=batch.positions,
        cu_seqlens_q=batch.cu_seqlens_q,
        kv_lens=batch.kv_lens,
        block_tables=batch.block_tables,
        slot_mapping=batch.slot_mapping,
    )


def virtual_padding(buffers: StepBuffers, num_seqs: int, block_size: int) -> None:
    """Fill the outputs of `buffers` from its inputs, for the first num_seqs requests.

    Raises:
        ValueError: the inputs do not fit together.
    """
    _entry.run(buffers, num_seqs, block_size)


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


_entry = register(OpEntry("virtual_padding", reference.virtual_padding, examples=[_example]))
