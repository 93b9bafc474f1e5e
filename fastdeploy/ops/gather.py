# SPDX-License-Identifier: Apache-2.0
"""Copies of rows by index: gather for the rows whose logits are computed, scatter for states kept by slot."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import paddle

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.reference import gather as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register


def gather_rows(x: paddle.Tensor, rows: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Copy x[rows[r]] to out[r] for the first `num_rows` entries of `rows`.

    Args:
        x: [capacity, hidden] of any dtype.
        rows: [capacity_out] int32, row indices into x.
        out: [capacity_out, hidden], dtype of x; must not overlap x.
        num_rows: rows to write.

    Raises:
        ValueError: an index outside x, or an invalid shape or dtype.
    """
    _GATHER_ROWS.run(x, rows, out, num_rows)


def scatter_rows(x: paddle.Tensor, rows: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """Copy x[r] to out[rows[r]] for the first `num_rows` entries of `rows`.

    Args:
        x: [capacity, hidden] of any dtype.
        rows: [capacity] int32, distinct row indices into out.
        out: [num_out, hidden], dtype of x; must not overlap x.
        num_rows: rows to read.

    Raises:
        ValueError: an index outside out, or an invalid shape or dtype.
    """
    _SCATTER_ROWS.run(x, rows, out, num_rows)


def _scatter_example(dtype: str, lookup: Lookup) -> Sequence[paddle.Tensor]:
    rows = paddle.to_tensor(np.array([8, 0, 3, 2, 99], np.int32))
    out = paddle.full([9, 24], 7.0, dtype)
    lookup("scatter_rows")(random_rows(5, 24, dtype, 5), rows, out, 4)
    return [out]


def _example(dtype: str, lookup: Lookup) -> Sequence[paddle.Tensor]:
    x = random_rows(9, 24, dtype, 5)
    rows = paddle.to_tensor(np.array([8, 0, 3, 3, 99], np.int32))
    out = paddle.full([5, 24], 7.0, dtype)
    lookup("gather_rows")(x, rows, out, 4)
    return [out]


_GATHER_ROWS = register(
    OpEntry(
        "gather_rows",
        reference.gather_rows,
        {"float32": 0.0, "bfloat16": 0.0},
        [partial(_example, dtype) for dtype in ("float32", "bfloat16")],
    )
)

_SCATTER_ROWS = register(
    OpEntry(
        "scatter_rows",
        reference.scatter_rows,
        {"float32": 0.0, "bfloat16": 0.0},
        [partial(_scatter_example, dtype) for dtype in ("float32", "bfloat16")],
    )
)
