# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.embedding`."""

from __future__ import annotations

import paddle

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.linear import PackedLinear


def embedding(token_ids: paddle.Tensor, table: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Copy rows of a plain table."""
    run_native("fd_embedding", token_ids, table, out, num_rows)


def packed_embedding(token_ids: paddle.Tensor, table: PackedLinear, out: paddle.Tensor, num_rows: int) -> None:
    """Copy rows out of the panels of a packed weight."""
    run_native("fd_packed_embedding", token_ids, table.data, out, table.out_features, num_rows)
