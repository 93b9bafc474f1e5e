# SPDX-License-Identifier: Apache-2.0
"""Gathering and scattering of rows in Paddle operators."""

from typing import TYPE_CHECKING

import paddle

if TYPE_CHECKING:
    from fastdeploy.ops.linear import PackedLinear


def gather_rows(x: paddle.Tensor, rows: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """As fastdeploy.ops.gather.gather_rows."""
    _gather("gather_rows: rows", x, rows, out, num_rows)


def scatter_rows(x: paddle.Tensor, rows: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """As fastdeploy.ops.gather.scatter_rows."""
    rows = rows[:num_rows]
    if num_rows == 0:
        return
    if int(rows.min()) < 0 or int(rows.max()) >= out.shape[0]:
        raise ValueError(f"scatter_rows: rows: expected 0..{out.shape[0] - 1}, got {rows.tolist()}")
    out[rows] = x[:num_rows]


def embedding(token_ids: paddle.Tensor, table: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """As fastdeploy.ops.embedding.embedding."""
    _gather("embedding: token_ids", table, token_ids, out, num_rows)


def packed_embedding(token_ids: paddle.Tensor, table: "PackedLinear", out: paddle.Tensor, num_rows: int) -> None:
    """As fastdeploy.ops.embedding.packed_embedding; a weight of reference.linear.pack_linear is [vocab, hidden].

    If it is quantized, it holds what its codes stand for in float32 (fastdeploy.ops.coded_piece.decode).
    """
    embedding(token_ids, table.data, out, num_rows)


def _gather(argument: str, table: paddle.Tensor, ids: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    ids = ids[:num_rows]
    if num_rows == 0:
        return
    if int(ids.min()) < 0 or int(ids.max()) >= table.shape[0]:
        raise ValueError(f"{argument}: expected 0..{table.shape[0] - 1}, got {ids.tolist()}")
    out[:num_rows] = paddle.gather(table, ids).astype(out.dtype)
