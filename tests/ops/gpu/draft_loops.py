# SPDX-License-Identifier: Apache-2.0
"""Loops of small models whose products and sums are exact, so that every backend computes the same logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.drafting import DraftLoop, DraftStage
from fastdeploy.ops.embedding import embedding
from fastdeploy.ops.input_checks import InputLimits
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.sampling import FloatColumn, IntColumn

VOCAB_SIZES, SIZE, ROWS, SEQS, DRAFTS, BLOCK, BLOCKS_PER_SEQ = (128, 200), 64, 400, 6, 5, 16, 24
NUM_ROWS = (3, 1, 2, 4, 1, 330)  # of each sequence in the first pass
STARTS = (0, 16, 30, 7, 3, 0)
NUM_DRAFTS = (5, 4, 4, 2, 1, 1)


def integers(count: int, width: int, seed: int, scale: int = 1, dtype: str = "bfloat16") -> Tensor:
    values = scale * np.random.default_rng(seed).integers(-2, 3, (count, width))
    return paddle.to_tensor(values.astype("float32")).astype(dtype)


def packed(weight: Tensor) -> Any:
    with selected_backend().on_host():
        return pack_linear(weight.cpu())


class Loop:
    """A loop of stages that multiply the embedding of a token and add the state of the position before it."""

    def __init__(
        self, num_stages: int, has_states: bool, max_logits_rows: int = SEQS, dtype: str = "bfloat16", size: int = SIZE
    ) -> None:
        self.batch = BatchIndex(ROWS, SEQS, BLOCKS_PER_SEQ, BLOCK)
        self.tokens = HostBuffer(ROWS, "int32")
        self.output: Tensor = paddle.zeros([ROWS, size], dtype)
        input_states = paddle.zeros([ROWS, size], dtype) if has_states else None
        self.loop = DraftLoop(
            [self._stage(number, input_states, dtype) for number in range(num_stages)],
            self.batch,
            self.tokens,
            self.output,
            vocab_sizes=VOCAB_SIZES,
            max_drafts=DRAFTS,
            max_logits_rows=max_logits_rows,
            limits=InputLimits(VOCAB_SIZES[-1], SEQS * BLOCKS_PER_SEQ, BLOCKS_PER_SEQ * BLOCK),
            states=integers(SEQS * BLOCKS_PER_SEQ * BLOCK + 1, size, 2, 8, dtype) if has_states else None,
            input_states=input_states,
        )

    def _stage(self, number: int, input_states: Tensor | None, dtype: str) -> DraftStage:
        size, output, table = self.output.shape[1], self.output, integers(VOCAB_SIZES[-1], self.output.shape[1], 1)
        table, embedded = table.astype(dtype), paddle.zeros([ROWS, size], dtype)
        weight = packed(integers(size, size, 10 + number, 1, dtype))
        head = integers(VOCAB_SIZES[-1], size, 20 + number, 1, dtype)
        heads = {count: packed(head[:count]) for count in VOCAB_SIZES}

        def compute(metadata: AttentionMetadata) -> None:
            embedding(self.tokens.tensor, table, embedded, metadata.num_rows)
            linear(embedded, weight, output, metadata.num_rows, input_states)

        return DraftStage(compute, lambda rows, num_rows, out: linear(rows, heads[out.shape[1]], out, num_rows))

    def write(self, sequences: Sequence[int], num_drafts: Sequence[int]) -> None:
        """Write the rows of the first pass of some sequences, in this order."""
        buffers, at = self.batch.buffers, 0
        for index, seq in enumerate(sequences):
            count = NUM_ROWS[seq]
            self.tokens.array[at : at + count] = np.random.default_rng(seq).integers(0, VOCAB_SIZES[-1], count)
            at += count
            buffers.num_scheduled.array[index], buffers.num_computed.array[index] = count, STARTS[seq]
            buffers.block_tables.array[index] = np.random.default_rng(9).permutation(SEQS * BLOCKS_PER_SEQ)[
                seq * BLOCKS_PER_SEQ : (seq + 1) * BLOCKS_PER_SEQ
            ]
            buffers.num_blocks.array[index] = BLOCKS_PER_SEQ
            self.batch.note_changed_table(index)
            self.loop.sampling.int_params.array[index, IntColumn.SEED] = seq
            self.loop.sampling.float_params.array[index, FloatColumn.TEMPERATURE] = 20.0 * (seq % 2)  # 0: greedy
        self.loop.num_drafts.array[: len(sequences)] = num_drafts

    def draft(
        self,
        sequences: Sequence[int],
        num_drafts: Sequence[int],
        run: Callable[[DraftLoop, int], None] = DraftLoop.draft,
    ) -> list[list[int]]:
        """Return the drafts of some sequences."""
        self.write(sequences, num_drafts)
        run(self.loop, len(sequences))
        return [self.loop.drafts.array[index, :count].tolist() for index, count in enumerate(num_drafts)]
