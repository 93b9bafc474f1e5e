# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.linear`, and the layout of packed bf16 weights.

`PackedLinear.data` of an unquantized layer is [rows, stride] bfloat16, row-major, where stride is in_features filled up
with zeros to a multiple of 64. Row n is output n, and the rows are filled up to a multiple of 16. In a gated layer rows
16 t .. 16 t + 7 are the gates of outputs 8 t .. 8 t + 7, and the eight rows after them their ups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.backends.gpu import linear_quant
from fastdeploy.ops.backends.gpu.checks import dtype_of, require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch
from fastdeploy.ops.backends.gpu.norm import rms_norm
from fastdeploy.ops.coded_piece import CodedPiece, Codes, are_coded
from fastdeploy.ops.linear import PackedLinear, Pieces, WeightPiece, pieces_of, shape_of
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import NO_QUANTIZATION
from fastdeploy.ops.registry import selected_backend

_STAGE = 64  # inputs that the kernel fetches at once, kStageK of custom_ops/gpu_ops/linear.cu
_TILE = 16  # rows of a tile
_MAX_FUSED_ROWS = 32  # with more rows, the norm is a launch of its own

_normed: dict[int, list[Tensor]] = {}  # by size: rows after the norm; the last one is in use, graphs may use others


def pack_linear(
    weight: Tensor | Pieces,
    bias: Tensor | None = None,
    quantization: str = NO_QUANTIZATION,
    is_gated: bool = False,
) -> PackedLinear:
    """Pack a weight of bf16 or of codes on the host and place it on the device; in_features must be a multiple of 8.

    The layout of a quantized weight is that of linear_quant.py.
    """
    pieces = pieces_of(weight)
    n, k, dtype = shape_of(pieces, is_gated)
    if dtype != "bfloat16":
        raise ValueError(f"pack_linear: weight: expected bfloat16, got {dtype}")
    if k % 8:
        raise ValueError(f"pack_linear: weight: expected a multiple of 8 inputs, got {k}")
    if are_coded(pieces):
        coded = [_coded_on_host(piece) for piece in pieces]
        return linear_quant.pack_quantized(coded, bias, quantization, is_gated)
    matrices = [replace(piece, matrix=_on_host(piece.matrix)) for piece in pieces]
    if quantization != NO_QUANTIZATION:
        return linear_quant.pack_quantized(matrices, bias, quantization, is_gated)
    data = selected_backend().place(_to_bfloat16(_pack(matrices, n, k, is_gated)))
    placed_bias = None if bias is None else selected_backend().place(bias)
    return PackedLinear(data, placed_bias, k, n, "bfloat16", is_gated=is_gated)


def _on_host(matrix: Tensor) -> Tensor:
    """Return a matrix itself if it is on the host, as the tensors of checkpoints are, else a copy."""
    return matrix if matrix.place.is_cpu_place() else matrix.cpu()


def _coded_on_host(piece: Codes) -> Codes:
    if not isinstance(piece, CodedPiece):
        return piece  # is read on the host
    minimums = None if piece.minimums is None else _on_host(piece.minimums)
    return replace(piece, codes=_on_host(piece.codes), scales=_on_host(piece.scales), minimums=minimums)


def first_outputs(w: PackedLinear, count: int) -> PackedLinear:
    """Return the first rows of the packed weight."""
    if w.quantization != NO_QUANTIZATION:
        return linear_quant.first_outputs(w, count)
    return replace(w, data=w.data._slice(0, count), out_features=count)


def linear(
    x: Tensor,
    w: PackedLinear,
    out: Tensor,
    num_rows: int,
    residual: Tensor | None = None,
    norm: NormParams | None = None,
) -> None:
    """Multiply by a packed weight, in one launch; with a norm of many rows or a quantized weight in two."""
    _check(x, w, out, num_rows, residual, norm)
    if w.quantization != NO_QUANTIZATION:
        return linear_quant.linear_quantized(x, w, out, num_rows, residual, norm)
    if norm is not None and num_rows > _MAX_FUSED_ROWS:
        normed = _find_normed(x)
        rms_norm(x, norm.weight, normed, num_rows, norm.eps)
        x, norm = normed, None
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, float(norm.eps))
    count = active().row_count(num_rows)
    sizes = w.out_features, w.in_features, w.is_gated, dtype_of(out) == "float32"
    launch("fd_linear", x, w.data, norm_weight, w.bias, residual, out, *count, *map(int, sizes), eps)


def _check(
    x: Tensor, w: PackedLinear, out: Tensor, num_rows: int, residual: Tensor | None, norm: NormParams | None
) -> None:
    require_dtype("linear", "bfloat16", x=x)
    require_rows("linear", num_rows, w.in_features, x=x)
    require_rows("linear", num_rows, w.out_features, out=out)
    if dtype_of(out) not in ("bfloat16", "float32"):
        raise ValueError(f"linear: out: expected bfloat16 or float32, got {dtype_of(out)}")
    if residual is not None:
        require_dtype("linear", dtype_of(out), residual=residual)
        require_rows("linear", num_rows, w.out_features, residual=residual)
    if norm is not None:
        require_dtype("linear", "bfloat16", norm=norm.weight)
        require_length("linear", w.in_features, norm=norm.weight)


def _find_normed(x: Tensor) -> Tensor:
    """Return memory for as many rows as x has room for. A step at full size comes before any graph is captured."""
    capacity, size = x.shape
    normed = _normed.setdefault(size, [])
    if not normed or normed[-1].shape[0] < capacity:
        normed.append(paddle.empty([capacity, size], "bfloat16"))
    return normed[-1]


def _pack(pieces: Sequence[WeightPiece], n: int, k: int, is_gated: bool) -> NDArray[np.uint16]:
    """Return the packed weight as the bits of its values."""
    per_tile = _TILE // 2 if is_gated else _TILE
    num_tiles = -(-n // per_tile)
    packed = np.zeros((num_tiles * _TILE, -(-k // _STAGE) * _STAGE), np.uint16)
    halves = packed.reshape(num_tiles, _TILE // per_tile, per_tile, -1)  # tile, gate or up, output, input
    begin = 0
    for piece in pieces:
        rows = piece.matrix.numpy()
        rows = rows[:, piece.begin : piece.end].T if piece.is_transposed else rows[piece.begin : piece.end]
        outputs = np.arange(begin, begin + len(rows))
        half, output = np.divmod(outputs, n)
        halves[output // per_tile, half, output % per_tile, :k] = rows
        begin += len(rows)
    return packed


def _to_bfloat16(bits: NDArray[np.uint16]) -> Tensor:
    """Return a tensor on the host; Paddle reads uint16 as the bits of bfloat16."""
    return paddle.to_tensor(bits, place=paddle.CPUPlace())


KERNELS: dict[str, Callable[..., Any]] = {
    "pack_linear": pack_linear,
    "first_outputs": first_outputs,
    "linear": linear,
}
