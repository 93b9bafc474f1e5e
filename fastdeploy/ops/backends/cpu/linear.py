# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.linear`, and the layout of packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import paddle

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.backends.cpu.memory import allocate_streamed
from fastdeploy.ops.linear import (
    GROUP,
    NO_QUANTIZATION,
    QUANTIZATIONS,
    PackedLinear,
    WeightPiece,
    dtype_name,
    pieces_of,
)
from fastdeploy.ops.norm import NormParams

_PANEL = 16  # outputs of one packed panel, kPanel of custom_ops/cpu_ops/kernels.h


def pack_linear(
    weight: paddle.Tensor | Sequence[WeightPiece],
    bias: paddle.Tensor | None = None,
    quantization: str = NO_QUANTIZATION,
    is_gated: bool = False,
) -> PackedLinear:
    """Pack panels of 16 outputs, so that a kernel reads the weight in one sequential stream."""
    pieces = pieces_of(weight)
    begins, ends = [piece.begin for piece in pieces], [piece.end for piece in pieces]
    is_transposed, dtype = pieces[0].is_transposed, dtype_name(pieces[0].matrix)
    halves = 2 if is_gated else 1
    n, k = (sum(ends) - sum(begins)) // halves, pieces[0].matrix.shape[0 if is_transposed else 1]
    num_panels = -(-n // _PANEL) * halves
    stored = [piece.matrix.contiguous() for piece in pieces]
    if quantization == NO_QUANTIZATION:
        packed = allocate_streamed([num_panels * _PANEL * ((k + 1) // 2 * 2)], dtype)
        run_native("fd_pack_linear", stored, packed, begins, ends, is_transposed, is_gated)
    else:
        packed = allocate_streamed([num_panels * _quantized_panel_bytes(k, quantization)], "uint8")
        kind = QUANTIZATIONS.index(quantization)
        run_native("fd_pack_quantized", stored, packed, begins, ends, is_transposed, kind, is_gated)
    return PackedLinear(packed, bias, k, n, dtype, quantization, is_gated)


def first_outputs(w: PackedLinear, count: int) -> PackedLinear:
    """Return the first panels of the packed weight."""
    panel_size = w.data.shape[0] // -(-w.out_features // _PANEL)
    return replace(w, data=w.data[: count // _PANEL * panel_size], out_features=count)


def linear(
    x: paddle.Tensor,
    w: PackedLinear,
    out: paddle.Tensor,
    num_rows: int,
    residual: paddle.Tensor | None = None,
    norm: NormParams | None = None,
) -> None:
    """Multiply by a packed weight, of bf16 or fp32 values or of codes and scales."""
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    arguments = x, w.data, w.bias, residual, norm_weight, out, w.out_features, w.in_features, w.is_gated, eps
    if w.quantization == NO_QUANTIZATION:
        run_native("fd_linear", *arguments, num_rows)
    else:
        run_native("fd_linear_quantized", *arguments, QUANTIZATIONS.index(w.quantization), num_rows)


def _quantized_panel_bytes(k: int, quantization: str) -> int:
    """Return the bytes of a panel: scales, then 64-byte blocks of codes (quantized_panel_bytes of kernels.h)."""
    if quantization in ("wint4", "w4a8"):
        return -(-(-(-k // GROUP) * 2 * _PANEL) // 64) * 64 + -(-k // 8) * 64
    return 4 * _PANEL + -(-k // 4) * 64
