# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.embedding`."""

from __future__ import annotations

import paddle

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import form_of


def embedding(token_ids: paddle.Tensor, table: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Copy rows of a plain table."""
    run_native("fd_embedding", token_ids, table, out, num_rows)


def packed_embedding(token_ids: paddle.Tensor, table: PackedLinear, out: paddle.Tensor, num_rows: int) -> None:
    """Copy rows out of the panels of a packed weight, or widen them if it is quantized."""
    form, sizes = form_of(table), (table.out_features, table.in_features)
    if form is None:
        run_native("fd_packed_embedding", token_ids, table.data, out, *sizes, num_rows)
    else:
        run_native("fd_quantized_embedding", token_ids, table.data, out, *sizes, form.as_list(), num_rows)
