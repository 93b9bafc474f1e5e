# SPDX-License-Identifier: Apache-2.0
"""Linear layers over weights that are packed once, at load, into the order in which the kernel streams them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import paddle

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.memory import allocate_streamed
from fastdeploy.ops.reference import linear as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register, run_native

_PANEL = 16  # outputs of one packed panel: kPanel of custom_ops/cpu_ops/kernels.h


@dataclass(frozen=True)
class PackedLinear:
    """A weight and bias ready for `linear`.

    Attributes:
        data: the weight in the order of the backend that packed it; opaque.
        bias: [out_features] or None.
        in_features: K.
        out_features: N.
        dtype: "bfloat16" or "float32", of weight, bias and input.
    """

    data: paddle.Tensor
    bias: paddle.Tensor | None
    in_features: int
    out_features: int
    dtype: str


def pack_linear(weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> PackedLinear:
    """Pack a weight for the selected backend.

    Args:
        weight: [out_features, in_features] bfloat16 or float32; sizes are arbitrary, the layout is padded inside.
        bias: [out_features], dtype of weight.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    packed: PackedLinear = _PACK_LINEAR.run(weight, bias)
    return packed


def linear(
    x: paddle.Tensor, w: PackedLinear, out: paddle.Tensor, num_rows: int, residual: paddle.Tensor | None = None
) -> None:
    """Write out = x @ weight.T + bias + residual for the first `num_rows` rows.

    Every output is one fp32 accumulation over in_features in order; bias and residual are added in fp32, in this order,
    and the sum is rounded once. A row's result does not depend on num_rows.

    Args:
        x: [cap, in_features], dtype of w.
        w: from pack_linear.
        out: [cap, out_features], dtype of w, or float32 (logits).
        num_rows: rows to read and write.
        residual: [cap, out_features], dtype of out; may be out.

    Raises:
        ValueError: a shape or dtype that does not fit, named with operator and argument.
    """
    _LINEAR.run(x, w, out, num_rows, residual)


def _pack_cpu(weight: paddle.Tensor, bias: paddle.Tensor | None = None) -> PackedLinear:
    if weight.ndim != 2:
        raise ValueError(f"pack_linear: weight: expected [out_features, in_features], got {list(weight.shape)}")
    n, k = weight.shape
    if bias is not None and (list(bias.shape) != [n] or bias.dtype != weight.dtype):
        raise ValueError(f"pack_linear: bias: expected {weight.dtype} of [{n}], got {bias.dtype} of {list(bias.shape)}")
    if dtype_name(weight) not in ("bfloat16", "float32"):
        raise ValueError(f"pack_linear: weight: expected dtype bfloat16 or float32, got {dtype_name(weight)}")
    size = (n + _PANEL - 1) // _PANEL * _PANEL * ((k + 1) // 2 * 2)
    packed = allocate_streamed([size], dtype_name(weight))
    run_native("fd_pack_linear", weight.contiguous(), packed)
    return PackedLinear(packed, bias, k, n, dtype_name(weight))


def dtype_name(tensor: paddle.Tensor) -> str:
    """Return "bfloat16", "float32", ... of a tensor."""
    return str(tensor.dtype).removeprefix("paddle.")


def _cpu(
    x: paddle.Tensor, w: PackedLinear, out: paddle.Tensor, num_rows: int, residual: paddle.Tensor | None = None
) -> None:
    run_native("fd_linear", x, w.data, w.bias, residual, out, w.out_features, w.in_features, num_rows)


def _example(
    dtypes: tuple[str, str], sizes: tuple[int, int, int], extras: bool, lookup: Lookup
) -> Sequence[paddle.Tensor]:
    (dtype, out_dtype), (rows, n, k) = dtypes, sizes
    weight = random_rows(n, k, dtype, 6, scale=k**-0.5)
    bias = random_rows(1, n, dtype, 7).reshape([n]) if extras else None
    x, out = random_rows(rows + 1, k, dtype, 8), paddle.full([rows + 1, n], 7.0, out_dtype)
    residual = random_rows(rows + 1, n, out_dtype, 9) if extras else None
    lookup("linear")(x, lookup("pack_linear")(weight, bias), out, rows, residual)
    return [out]


_PACK_LINEAR = register(OpEntry("pack_linear", reference.pack_linear, {"cpu": _pack_cpu}))
_LINEAR = register(
    OpEntry(
        "linear",
        reference.linear,
        {"cpu": _cpu},
        {"float32": 1e-5, "bfloat16": 8e-3},
        [
            partial(_example, dtypes, sizes, extras)
            for dtypes in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
            for sizes, extras in (((1, 64, 64), False), ((7, 80, 33), True), ((19, 150, 256), True), ((2, 3, 5), False))
        ],
    )
)
