# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.logits`."""

from __future__ import annotations

import paddle

from fastdeploy.ops.backends.cpu.library import run_native


def scatter_logits(x: paddle.Tensor, ids: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Write logits to their places."""
    run_native("fd_scatter_logits", x, ids, out, num_rows)
