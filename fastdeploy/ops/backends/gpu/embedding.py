# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.embedding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from fastdeploy.ops.backends.gpu.checks import dtype_of, require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch


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


KERNELS: dict[str, Callable[..., Any]] = {"embedding": embedding}
