# SPDX-License-Identifier: Apache-2.0
"""Language-model head."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.ops.linear import PackedLinear, first_outputs, linear


class LogitsHead:
    """Logits of every token id, accumulated and stored in float32."""

    __slots__ = ("weight",)

    def __init__(self, weight: PackedLinear) -> None:
        self.weight = weight

    def __call__(self, hidden: Tensor, out: Tensor, num_rows: int) -> None:
        """Write the logits of hidden [capacity, hidden_size] to out [capacity, vocab_size] float32."""
        linear(hidden, self.weight, out, num_rows)


def first_logits(weight: PackedLinear, rows: Tensor, num_rows: int, out: Tensor) -> None:
    """Write logits to out [capacity, vocab] float32; with fewer columns, a multiple of 64, those of the first ids."""
    num_ids = out.shape[1]
    linear(rows, weight if num_ids == weight.out_features else first_outputs(weight, num_ids), out, num_rows)
