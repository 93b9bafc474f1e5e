# SPDX-License-Identifier: Apache-2.0
"""Linear layers. Weights are packed once, when the model is loaded, into the order in which the kernel reads them.

The formats `wint8`, `wint4`, `w8a8` and `w4a8` store integer codes and scales instead of bf16 values:

- Weights of 8 bits: codes -127..127; absmax / 127 is the scale of each output in `wint8`, and in `w8a8` of each group
  of 32 inputs of an output.
- Weights of 4 bits: codes -8..7 and a scale for each group of 32 inputs of an output; `wint4_min` and `w4a8_min` have
  codes 0..15, and a minimum beside each scale. Both are the candidates with the smallest squared error among seven.

The inputs of each row are converted to integers as well:

- `w8a8` and `w4a8`: codes -127..127 with the scale absmax / 127 of each 32 inputs.
- `wint8` and `wint4`: 16-bit codes whose scale is a power of two. They keep every bit of bf16 inputs down to 1/128 of
  the row's absmax.

custom_ops/common/quant.h has the exact definition.

A layer can apply RMSNorm to its inputs. A gated layer computes two halves, gate and up, and writes silu(gate) * up; the
activation is computed from the fp32 sums before any rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import paddle

from fastdeploy.ops.coded_piece import Codes, are_coded, check_coded_pieces, form_of_pieces
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION, QUANTIZATIONS, QuantizedForm
from fastdeploy.ops.reference import linear as reference
from fastdeploy.ops.registry import Lookup, OpEntry, cpu_only, register


@dataclass(frozen=True)
class WeightPiece:
    """A range of outputs of a linear layer as a checkpoint stores it.

    Attributes:
        matrix: [out, in], or [in, out] if `is_transposed`.
        begin, end: the range of outputs, [begin, end).
        is_transposed: whether the matrix is stored as [in, out].
    """

    matrix: paddle.Tensor
    begin: int
    end: int
    is_transposed: bool = False

    def rows(self) -> paddle.Tensor:
        """Return [end - begin, in]."""
        return self.matrix[:, self.begin : self.end].t() if self.is_transposed else self.matrix[self.begin : self.end]


Pieces = Sequence[WeightPiece] | Sequence[Codes]


@dataclass(frozen=True)
class PackedLinear:
    """A weight and bias ready for `linear`.

    Attributes:
        data: the packed weight; only the backend that packed it knows its layout.
        bias: [out_features], or [2 * out_features] if gated, or None.
        in_features: K.
        out_features: N, the number of columns that `linear` writes.
        dtype: "bfloat16" or "float32": dtype of the bias and the inputs, and of the weight unless it is quantized.
        quantization: "none" or one of QUANTIZATIONS.
        is_gated: `linear` writes silu(gate) * up, where gate and up have out_features columns each.
        group_size, has_minimum: as in `QuantizedForm`, if it is quantized.
    """

    data: paddle.Tensor
    bias: paddle.Tensor | None
    in_features: int
    out_features: int
    dtype: str
    quantization: str = NO_QUANTIZATION
    is_gated: bool = False
    group_size: int = 0
    has_minimum: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that one step reads: weight and bias."""
        tensors = [self.data] if self.bias is None else [self.data, self.bias]
        return sum(int(tensor.size) * int(tensor.element_size()) for tensor in tensors)


def pack_linear(
    weight: paddle.Tensor | Sequence[WeightPiece] | Sequence[Codes],
    bias: paddle.Tensor | None = None,
    quantization: str = NO_QUANTIZATION,
    is_gated: bool = False,
) -> PackedLinear:
    """Pack a weight for the selected backend.

    Args:
        weight: [out_features, in_features] bfloat16 or float32 of any size; the packed layout is padded. If gated,
            [2 * out_features, in_features]: the rows of gate, then those of up. Alternatively the pieces of this matrix
            in order, of one dtype, either all transposed or none; or pieces of a weight that is quantized already.
        bias: [out_features], or [2 * out_features] if gated; dtype of weight.
        quantization: "none", or one of FORMS for a finite bfloat16 weight. For coded pieces one of QUANTIZATIONS,
            whose bits are at least those of their codes; the dtype of the layer is then bfloat16.
        is_gated: the layer holds gate and up of a feed-forward block.

    Raises:
        ValueError: invalid shape, dtype or quantization; NaN or infinity in a weight that is to be quantized.
    """
    pieces = pieces_of(weight)
    check_weight(pieces, bias, quantization)
    packed: PackedLinear = _PACK_LINEAR.run(pieces, bias, quantization, is_gated)
    return packed


def first_outputs(w: PackedLinear, count: int) -> PackedLinear:
    """Return the layer that computes only the first outputs of another one and shares its memory.

    Args:
        w: from pack_linear, neither gated nor with a bias.
        count: number of outputs, a multiple of 64.
    """
    first: PackedLinear = _FIRST_OUTPUTS.run(w, count)
    return first


def linear(
    x: paddle.Tensor,
    w: PackedLinear,
    out: paddle.Tensor,
    num_rows: int,
    residual: paddle.Tensor | None = None,
    norm: NormParams | None = None,
) -> None:
    """Write out = norm(x) @ weight.T + bias + residual for the first `num_rows` rows.

    Each output is accumulated in fp32 over in_features in order. With a quantized weight, the terms are exact integer
    sums over some inputs, times the scales. Then the bias is added, the gate applied and the residual added in fp32,
    and the result is rounded once. The result of a row does not depend on num_rows.

    Args:
        x: [capacity, in_features], dtype of w. With a norm it may be wider where the backend takes that: the first
            in_features columns of a row are normalised, and the others are not read.
        w: from pack_linear.
        out: [capacity, out_features], dtype of w, or float32 (logits).
        num_rows: rows to read and write.
        residual: [capacity, out_features], dtype of out; may be out.
        norm: RMSNorm applied to the rows of x first, rounded as rms_norm does; its weight is [in_features].

    Raises:
        ValueError: invalid shape or dtype.
    """
    _LINEAR.run(x, w, out, num_rows, residual, norm)


def pieces_of(weight: paddle.Tensor | Pieces) -> Pieces:
    """Return a weight as `pack_linear` takes it as pieces."""
    return (WeightPiece(weight, 0, weight.shape[0]),) if isinstance(weight, paddle.Tensor) else weight


def form_of_weight(pieces: Pieces, quantization: str) -> QuantizedForm | None:
    """Return the form in which a weight is packed, or None for one that is not quantized."""
    return form_of_pieces(pieces, quantization) if are_coded(pieces) else FORMS.get(quantization)


def shape_of(pieces: Pieces, is_gated: bool) -> tuple[int, int, str]:
    """Return the outputs after the gate, the inputs and the dtype of a weight that consists of these pieces."""
    if are_coded(pieces):
        outputs = sum(piece.num_outputs for piece in pieces)
        return outputs // (2 if is_gated else 1), pieces[0].num_inputs, "bfloat16"
    first = pieces[0]
    n = sum(piece.end - piece.begin for piece in pieces) // (2 if is_gated else 1)
    return n, first.matrix.shape[0 if first.is_transposed else 1], dtype_name(first.matrix)


def check_weight(pieces: Pieces, bias: paddle.Tensor | None, quantization: str) -> None:
    """Raise ValueError, as `pack_linear` says, if a weight cannot be packed."""
    if are_coded(pieces):
        check_coded_pieces(pieces)
        n, dtype = sum(piece.num_outputs for piece in pieces), paddle.bfloat16
        _check_bias(bias, n, dtype)
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"pack_linear: quantization: expected one of {QUANTIZATIONS}, got {quantization!r}")
    else:
        _check_pieces(pieces, bias, quantization)


def _check_bias(bias: paddle.Tensor | None, n: int, dtype: paddle.dtype) -> None:
    if bias is not None and (list(bias.shape) != [n] or bias.dtype != dtype):
        raise ValueError(f"pack_linear: bias: expected {dtype} of [{n}], got {bias.dtype} of {list(bias.shape)}")


def _check_pieces(pieces: Sequence[WeightPiece], bias: paddle.Tensor | None, quantization: str) -> None:
    weight = pieces[0].matrix
    if weight.ndim != 2:
        raise ValueError(f"pack_linear: weight: expected [out_features, in_features], got {list(weight.shape)}")
    if len({piece.is_transposed for piece in pieces}) > 1:
        raise ValueError("pack_linear: weight: expected all pieces transposed or none, got both")
    _check_bias(bias, sum(piece.end - piece.begin for piece in pieces), weight.dtype)
    if dtype_name(weight) not in ("bfloat16", "float32"):
        raise ValueError(f"pack_linear: weight: expected dtype bfloat16 or float32, got {dtype_name(weight)}")
    if quantization == NO_QUANTIZATION:
        return
    if quantization not in FORMS:
        expected = ", ".join((NO_QUANTIZATION, *FORMS))
        raise ValueError(f"pack_linear: quantization: expected one of {expected}, got {quantization!r}")
    if dtype_name(weight) != "bfloat16":
        raise ValueError(f"pack_linear: weight: expected dtype bfloat16 for {quantization}, got {dtype_name(weight)}")


def dtype_name(tensor: paddle.Tensor) -> str:
    """Return "bfloat16", "float32", ... of a tensor."""
    return str(tensor.dtype).removeprefix("paddle.")


def _example(
    dtypes: tuple[str, str],
    sizes: tuple[int, int, int],
    extras: bool,
    lookup: Lookup,
    quantization: str = NO_QUANTIZATION,
    is_gated: bool = False,
    unread: int = 0,
) -> Sequence[paddle.Tensor]:
    """Run a layer on random rows; `unread` columns of x follow those that it reads."""
    (dtype, out_dtype), (rows, n, k) = dtypes, sizes
    weight_rows = 2 * n if is_gated else n
    weight = random_rows(weight_rows, k, dtype, 6, scale=k**-0.5)
    bias = random_rows(1, weight_rows, dtype, 7).reshape([-1]) if extras else None
    x, out = random_rows(rows + 1, k + unread, dtype, 8), paddle.full([rows + 1, n], 7.0, out_dtype)
    residual = random_rows(rows + 1, n, out_dtype, 9) if extras else None
    # The norm's rounding may differ by one ulp, which a result of the same dtype hides and an fp32 result would not.
    has_norm = dtype == out_dtype and (extras or is_gated)
    norm = NormParams(random_rows(1, k, dtype, 10).reshape([k]), 1e-6) if has_norm else None
    lookup("linear")(x, lookup("pack_linear")(weight, bias, quantization, is_gated), out, rows, residual, norm)
    return [out]


def _gpu_takes(dtype: str, in_features: int) -> bool:
    return dtype == "bfloat16" and in_features % 8 == 0


_PACK_LINEAR = register(OpEntry("pack_linear", reference.pack_linear))
_FIRST_OUTPUTS = register(OpEntry("first_outputs", reference.first_outputs))
_LINEAR = register(
    OpEntry(
        "linear",
        reference.linear,
        {"float32": 1e-5, "bfloat16": 8e-3},
        [
            example if _gpu_takes(dtypes[0], sizes[2]) else cpu_only(example)
            for is_gated in (False, True)
            for dtypes in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
            for sizes, extras in (
                ((1, 64, 64), False),
                ((7, 80, 33), True),
                ((19, 150, 256), True),
                ((2, 3, 5), False),
                ((10, 13, 1096), True),
            )
            for example in [partial(_example, dtypes, sizes, extras, is_gated=is_gated)]
        ]
        + [
            example if _gpu_takes("bfloat16", sizes[2]) else cpu_only(example)
            for is_gated in (False, True)
            for quantization in FORMS
            for out_dtype, sizes, extras in (
                ("float32", (1, 64, 64), False),
                ("bfloat16", (7, 80, 133), True),
                ("float32", (40, 150, 300), True),
                ("float32", (2, 3, 5), False),
                ("bfloat16", (7, 80, 136), True),
                ("float32", (40, 150, 1032), True),
            )
            for example in [
                partial(_example, ("bfloat16", out_dtype), sizes, extras, quantization=quantization, is_gated=is_gated)
            ]
        ]
        + [
            cpu_only(partial(_example, (dtype, dtype), (9, 80, 136), True, quantization=quantization, unread=24))
            for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), *(("bfloat16", f) for f in FORMS))
        ],
    )
)
