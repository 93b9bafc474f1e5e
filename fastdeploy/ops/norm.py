# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import paddle

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.reference import norm as reference
from fastdeploy.ops.registry import Lookup, OpEntry, cpu_only, register


@dataclass(frozen=True)
class NormParams:
    """RMSNorm that another operator applies to its inputs: weight [size] and eps as rms_norm takes them."""

    weight: paddle.Tensor
    eps: float


def rms_norm(x: paddle.Tensor, weight: paddle.Tensor, out: paddle.Tensor, num_rows: int, eps: float) -> None:
    """Normalise the first `num_rows` rows: out = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once.

    Args:
        x: [capacity, size] bfloat16 or float32.
        weight: [size], dtype of x.
        out: [capacity, size], dtype of x; may be x.
        num_rows: rows to read and write.
        eps: term added to the mean square.

    Raises:
        ValueError: invalid shape or dtype.
    """
    _RMS_NORM.run(x, weight, out, num_rows, eps)


def norm_gelu(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor, out: paddle.Tensor, num_rows: int, eps: float
) -> None:
    """Write GELU(x / sqrt(mean(x^2) + eps) * weight + bias) for the first `num_rows` rows, in fp32, rounded once.

    GELU is the exact form with the error function.

    Args:
        x: [capacity, size] bfloat16 or float32.
        weight, bias: [size], dtype of x.
        out: [capacity, size], dtype of x; may be x.
        num_rows: rows to read and write.
        eps: term added to the mean square.

    Raises:
        ValueError: invalid shape or dtype.
    """
    _NORM_GELU.run(x, weight, bias, out, num_rows, eps)


def _gelu_example(dtype: str, rows: int, size: int, lookup: Lookup) -> Sequence[paddle.Tensor]:
    x, (weight, bias) = random_rows(rows + 1, size, dtype, 1), random_rows(2, size, dtype, 2).unbind()
    out = paddle.full([rows + 1, size], 7.0, dtype)
    lookup("norm_gelu")(x, weight, bias, out, rows, 1e-6)
    return [out]


def _example(dtype: str, rows: int, size: int, lookup: Lookup) -> Sequence[paddle.Tensor]:
    x, weight = random_rows(rows + 1, size, dtype, 1), random_rows(1, size, dtype, 2).reshape([size])
    out = paddle.full([rows + 1, size], 7.0, dtype)
    lookup("rms_norm")(x, weight, out, rows, 1e-6)
    return [out]


_RMS_NORM = register(
    OpEntry(
        "rms_norm",
        reference.rms_norm,
        {"float32": 2e-6, "bfloat16": 8e-3},
        [
            *(partial(_example, "bfloat16", rows, size) for rows, size in ((1, 64), (5, 104), (16, 1024))),
            *(cpu_only(partial(_example, "bfloat16", rows, size)) for rows, size in ((5, 100), (3, 7))),
            *(
                cpu_only(partial(_example, "float32", rows, size))
                for rows, size in ((1, 64), (5, 100), (3, 7), (16, 1024))
            ),
        ],
    )
)

_NORM_GELU = register(
    OpEntry(
        "norm_gelu",
        reference.norm_gelu,
        {"float32": 4e-6, "bfloat16": 8e-3},
        [
            *(partial(_gelu_example, "bfloat16", rows, size) for rows, size in ((1, 64), (5, 104), (16, 1024))),
            *(cpu_only(partial(_gelu_example, "bfloat16", rows, size)) for rows, size in ((5, 100), (3, 7))),
            *(cpu_only(partial(_gelu_example, "float32", rows, size)) for rows, size in ((1, 64), (5, 100), (3, 7))),
        ],
    )
)
