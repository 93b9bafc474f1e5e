# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.gather`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from fastdeploy.ops.backends.gpu.checks import dtype_of, require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch


def gather_rows(x: Tensor, rows: Tensor, out: Tensor, num_rows: int) -> None:
    """Copy rows from their indices; the bytes of a row must be a multiple of 16."""
    size = _check("gather_rows", x, rows, out, num_rows)
    require_rows("gather_rows", num_rows, size, out=out)
    count = active().row_count(num_rows)
    launch("fd_gather_rows", x, x.shape[0], rows, out, *count, size * x.element_size())


def scatter_rows(x: Tensor, rows: Tensor, out: Tensor, num_rows: int) -> None:
    """Copy rows to their indices; the bytes of a row must be a multiple of 16."""
    size = _check("scatter_rows", x, rows, out, num_rows)
    require_rows("scatter_rows", num_rows, size, x=x)
    count = active().row_count(num_rows)
    launch("fd_scatter_rows", x, rows, out, out.shape[0], *count, size * x.element_size())


def _check(operator: str, x: Tensor, rows: Tensor, out: Tensor, num_rows: int) -> int:
    """Check what both have in common and return the elements of a row."""
    require_length(operator, num_rows, rows=rows)
    require_dtype(operator, "int32", rows=rows)
    require_dtype(operator, dtype_of(x), out=out)
    size: int = x.shape[-1]
    require_rows(operator, 0, size, x=x, out=out)
    return size


KERNELS: dict[str, Callable[..., Any]] = {"gather_rows": gather_rows, "scatter_rows": scatter_rows}
