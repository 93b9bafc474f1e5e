# SPDX-License-Identifier: Apache-2.0
"""Linear layers in Paddle operators."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import paddle

from fastdeploy.ops.coded_piece import are_coded, decode
from fastdeploy.ops.quantized_form import QuantizedForm, form_of
from fastdeploy.ops.reference.norm import normalise
from fastdeploy.ops.reference.quantization import dequantize_rows, dequantize_weight
from fastdeploy.ops.registry import selected_backend

if TYPE_CHECKING:
    from fastdeploy.ops.linear import PackedLinear, Pieces
    from fastdeploy.ops.norm import NormParams


def pack_linear(
    weight: "paddle.Tensor | Pieces",
    bias: paddle.Tensor | None = None,
    quantization: str = "none",
    is_gated: bool = False,
) -> "PackedLinear":
    """As fastdeploy.ops.linear.pack_linear; the data is the weight, or the values of its codes and scales."""
    from fastdeploy.ops.linear import PackedLinear, form_of_weight, pieces_of, shape_of

    pieces = pieces_of(weight)
    form, (n, k, dtype) = form_of_weight(pieces, quantization), shape_of(pieces, is_gated)
    data, place = _values(pieces, form), selected_backend().place
    data, bias = place(data), None if bias is None else place(bias)
    packed = PackedLinear(data, bias, k, n, dtype, is_gated=is_gated)
    return packed if form is None else replace(packed, **asdict(form))


def pack_each(
    weights: "Sequence[Pieces]", quantization: str, is_gated: bool, form: QuantizedForm | None
) -> "list[PackedLinear]":
    """Pack several weights, each as pack_linear does; `form` is that of coded ones."""
    from fastdeploy.ops.linear import check_weight

    packed = []
    for pieces in weights:  # each is read once
        check_weight(pieces, None, quantization)
        one = pack_linear(pieces, None, quantization, is_gated)
        packed.append(replace(one, **asdict(form)) if form is not None and are_coded(pieces) else one)
    return packed


def _values(pieces: "Pieces", form: QuantizedForm | None) -> paddle.Tensor:
    """Return the weight, or what its codes and scales stand for."""
    if are_coded(pieces):
        return paddle.concat([decode(piece) for piece in pieces])
    weight = paddle.concat([piece.rows() for piece in pieces])
    return weight if form is None else dequantize_weight(weight.astype("float32"), form)


def first_outputs(w: "PackedLinear", count: int) -> "PackedLinear":
    """As fastdeploy.ops.linear.first_outputs."""
    return replace(w, data=w.data[:count], out_features=count)


def linear(
    x: paddle.Tensor,
    w: "PackedLinear",
    out: paddle.Tensor,
    num_rows: int,
    residual: paddle.Tensor | None = None,
    norm: "NormParams | None" = None,
) -> None:
    """As fastdeploy.ops.linear.linear, but the rounding of a row may depend on num_rows."""
    rows = x[:num_rows]
    if norm is not None:
        rows = normalise(rows[:, : w.in_features], norm.weight, norm.eps).astype(x.dtype)
    rows = rows.astype("float32")
    if (form := form_of(w)) is not None:
        rows = dequantize_rows(rows, form.row_bits)
    total = paddle.matmul(rows, w.data.astype("float32"), transpose_y=True)
    if w.bias is not None:
        total = total + w.bias.astype("float32")
    if w.is_gated:
        gate, up = paddle.chunk(total, 2, axis=-1)
        total = paddle.nn.functional.silu(gate) * up
    if residual is not None:
        total = total + residual[:num_rows].astype("float32")
    out[:num_rows] = total.astype(out.dtype)
