# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.gather`."""

from __future__ import annotations

import paddle

from fastdeploy.ops.backends.cpu.library import run_native


def gather_rows(x: paddle.Tensor, rows: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Copy rows from their indices."""
    run_native("fd_gather_rows", x, rows, out, num_rows)


def scatter_rows(x: paddle.Tensor, rows: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Copy rows to their indices."""
    run_native("fd_scatter_rows", x, rows, out, num_rows)
