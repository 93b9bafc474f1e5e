# SPDX-License-Identifier: Apache-2.0
"""Language-model head."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.ops.linear import PackedLinear, linear


class LogitsHead:
    """Logits of every token id, accumulated and stored in float32."""

    __slots__ = ("weight",)

    def __init__(self, weight: PackedLinear) -> None:
        self.weight = weight

    def __call__(self, hidden: Tensor, out: Tensor, num_rows: int) -> None:
        """Write the logits of hidden [capacity, hidden_size] to out [capacity, vocab_size] float32."""
        linear(hidden, self.weight, out, num_rows)
