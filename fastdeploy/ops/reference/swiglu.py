# SPDX-License-Identifier: Apache-2.0
"""The gated activation in Paddle operators (Shazeer, 2020)."""

import paddle


def swiglu(gate_up: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """As fastdeploy.ops.swiglu.swiglu."""
    gate, up = paddle.chunk(gate_up[:num_rows].astype("float32"), 2, axis=-1)
    out[:num_rows] = (paddle.nn.functional.silu(gate) * up).astype(out.dtype)
