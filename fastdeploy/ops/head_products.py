# SPDX-License-Identifier: Apache-2.0
"""Products of all heads of a row, each with a matrix of its own: out[h] = in[h] @ W[h].T.

Latent attention multiplies the queries of each head by W_UK, so that they can be compared with latent rows, and the sum
over latent rows by W_UV.

What custom_ops/common/quant.h calls a row is one head of one row here: its codes have scales of their own. The result
of a row does not depend on the other rows, and a head has the bits of `linear` with its packed weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import paddle

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import Pieces, WeightPiece
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION, QuantizedForm
from fastdeploy.ops.reference import head_products as reference
from fastdeploy.ops.registry import Lookup, OpEntry, cpu_only, register


@dataclass(frozen=True)
class PackedHeads:
    """The matrices of all heads, in one allocation with a fixed stride.

    Attributes:
        data: the packed weights, head after head; only the backend that packed them knows their layout.
        num_heads, in_features, out_features: H, K and N of each head.
        dtype, quantization, group_size, has_minimum: as in PackedLinear.
    """

    data: paddle.Tensor
    num_heads: int
    in_features: int
    out_features: int
    dtype: str
    quantization: str = NO_QUANTIZATION
    group_size: int = 0
    has_minimum: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all heads."""
        return int(self.data.size) * int(self.data.element_size())


def pack_heads(
    weights: Sequence[Pieces], quantization: str = NO_QUANTIZATION, form: QuantizedForm | None = None
) -> PackedHeads:
    """Pack the matrices of all heads.

    A head's W_UK [latent, nope] is a transposed piece of the rows of kv_b_proj that make its keys, and its W_UV
    [value, latent] is the rows that make its values.

    Args:
        weights: for each head the pieces of its weight [out_features, in_features], as `pack_linear` takes them. They
            are read once and in this order, and need not be kept.
        quantization: as `pack_linear` takes it.
        form: of heads that consist of coded pieces; None for that of the first head.

    Raises:
        ValueError: as `pack_linear`, or heads of different sizes or forms.
    """
    packed: PackedHeads = _PACK_HEADS.run(weights, quantization, form)
    return packed


def project_heads(
    x: paddle.Tensor, w: PackedHeads, out: paddle.Tensor, num_rows: int, head_stride: int | None = None
) -> None:
    """Multiply each head of the first `num_rows` rows by its matrix.

    Columns [h * out_features, (h + 1) * out_features) of out receive the product of columns [h * head_stride,
    h * head_stride + in_features) of x and the matrix of head h, accumulated as in `linear` and rounded once.

    Args:
        x: [capacity, >= (num_heads - 1) * head_stride + in_features], dtype of w; the other columns are not read.
        w: from pack_heads.
        out: [capacity, num_heads * out_features], dtype of w; must not overlap x.
        num_rows: rows to read and write.
        head_stride: columns from one head of x to the next, at least in_features, which None stands for.

    Raises:
        ValueError: invalid shape or dtype, or out overlaps x.
    """
    _PROJECT_HEADS.run(x, w, out, num_rows, head_stride)


def _example(
    dtype: str, quantization: str, sizes: tuple[int, int, int, int], gap: int, lookup: Lookup
) -> Sequence[paddle.Tensor]:
    """Project random rows, whose heads are `gap` columns apart, with as many unused columns at the end."""
    rows, heads, n, k = sizes
    weights = [[WeightPiece(random_rows(n, k, dtype, head, k**-0.5), 0, n)] for head in range(heads)]
    packed = lookup("pack_heads")(weights, quantization)
    x = random_rows(rows + 1, heads * (k + gap), dtype, 100)
    out = paddle.full([rows + 1, heads * n], 7.0, dtype)
    lookup("project_heads")(x, packed, out, rows, k + gap if gap else None)
    return [out]


_PACK_HEADS = register(OpEntry("pack_heads", reference.pack_heads, has_fallback=False))
_PROJECT_HEADS = register(
    OpEntry(
        "project_heads",
        reference.project_heads,
        {"float32": 1e-5, "bfloat16": 8e-3},
        [
            cpu_only(partial(_example, dtype, quantization, sizes, gap))
            for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), *(("bfloat16", f) for f in FORMS))
            for sizes, gap in (((1, 4, 40, 24), 8), ((7, 3, 20, 40), 0), ((33, 2, 136, 264), 64))
        ],
        has_fallback=False,
    )
)
