# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads draft from one state of the target, without attention.

Head i makes draft i + 1 from x + SiLU(W x + b), where x is the target's state; it reads no token. (Cai et al. 2024)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.layers.linear import Linear
from fastdeploy.layers.logits import first_logits
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.linear import PackedLinear


class MedusaHeads:
    """The heads and their matrices of logits: one for each head, or one for all.

    Attributes:
        num_drafts: number of heads.
        hidden_size: of the target.
        heads_by_matrix: the heads of each matrix of logits.
        output: [num_drafts * max_seqs, hidden_size], what the logits of all drafts are computed from.
        target_ids: the target's id of each id that the heads draft; None if they are the same.
        head_format: weight format of the matrices of logits.
        num_weight_bytes, num_head_bytes: bytes of the weights that are not the target's, and of these matrices.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[PackedLinear]],
        matrices: Sequence[PackedLinear],
        num_head_bytes: int,
        max_seqs: int,
        target_ids: NDArray[np.int32] | None,
    ) -> None:
        """Allocate the activations.

        Args:
            blocks: by head, its residual blocks as gated layers: the gate is W x + b, and the other half is 1.
            matrices: of logits, as many as heads or one.
            num_head_bytes: bytes of the matrices that are not the target's.
        """
        first, count = blocks[0][0], len(blocks)
        self.num_drafts, self.hidden_size, self.target_ids = count, first.in_features, target_ids
        self.heads_by_matrix = [range(count)] if len(matrices) == 1 else [range(i, i + 1) for i in range(count)]
        self.head_format = matrices[0].quantization
        self.num_weight_bytes = sum(block.num_bytes for head in blocks for block in head)
        self.num_head_bytes = num_head_bytes
        self._blocks, self._matrices = [[Linear(block) for block in head] for head in blocks], matrices
        self._max_seqs, num_elements = max_seqs, max_seqs * self.hidden_size
        self.output: Tensor = paddle.zeros([count * max_seqs, self.hidden_size], first.dtype)
        self._states: Tensor = paddle.zeros([max_seqs, self.hidden_size], first.dtype)
        flat = self.output.reshape([-1])
        self._outputs = [  # indexing would copy on some devices
            flat._slice(i * num_elements, (i + 1) * num_elements).reshape([max_seqs, self.hidden_size])
            for i in range(count)
        ]

    def row_of(self, index: int, sequence: int) -> int:
        """Return the row of `output` from which draft `index` of a sequence is sampled."""
        return index * self._max_seqs + sequence

    def compute(self, index: int, states: Tensor, rows: Tensor, num_rows: int) -> None:
        """Write to `output` what draft `index` of the first sequences is sampled from; draft 0 comes first.

        Args:
            states: [capacity, hidden_size], of the target's last step.
            rows: [max_seqs] int32, the row of `states` that belongs to each sequence.
        """
        if index == 0:
            gather_rows(states, rows, self._states, num_rows)
        source = self._states
        for block in self._blocks[index]:
            block(source, self._outputs[index], num_rows, source)
            source = self._outputs[index]

    def compute_logits(self, matrix: int, rows: Tensor, num_rows: int, out: Tensor) -> None:
        """Write the logits of rows of `output` to out [capacity, vocab] float32, or those of the first ids only."""
        first_logits(self._matrices[matrix], rows, num_rows, out)
