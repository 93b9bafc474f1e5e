# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.embedding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from fastdeploy.ops.backends.gpu.checks import dtype_of, require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import form_of


def embedding(token_ids: Tensor, table: Tensor, out: Tensor, num_rows: int) -> None:
    """Copy rows of a plain table; the bytes of a row must be a multiple of 16."""
    require_length("embedding", num_rows, token_ids=token_ids)
    require_dtype("embedding", "int32", token_ids=token_ids)
    require_dtype("embedding", dtype_of(table), out=out)
    size = table.shape[-1]
    require_rows("embedding", 0, size, table=table)
    require_rows("embedding", num_rows, size, out=out)
    count = active().row_count(num_rows)
    launch("fd_embedding", token_ids, table, table.shape[0], out, *count, size * table.element_size())


def packed_embedding(token_ids: Tensor, table: PackedLinear, out: Tensor, num_rows: int) -> None:
    """Copy rows of a packed bf16 weight, whose row n is output n (linear.py), or widen those of a quantized one."""
    operator, form = "packed_embedding", form_of(table)
    require_length(operator, num_rows, token_ids=token_ids)
    require_dtype(operator, "int32", token_ids=token_ids)
    require_dtype(operator, "bfloat16" if form is None else "uint8", table=table.data)
    require_dtype(operator, "bfloat16", out=out)
    require_rows(operator, num_rows, table.in_features, out=out)
    if table.is_gated:
        raise ValueError(f"{operator}: table: expected one row for each output, got a gated layer")
    count = active().row_count(num_rows)
    if form is not None:
        sizes = table.out_features, table.in_features, *form.as_list()
        return launch("fd_quantized_embedding", token_ids, table.data, out, *count, *sizes)
    item, (rows, stride) = out.element_size(), table.data.shape
    launch("fd_packed_embedding", token_ids, table.data, rows, stride * item, out, *count, table.in_features * item)


KERNELS: dict[str, Callable[..., Any]] = {"embedding": embedding, "packed_embedding": packed_embedding}
