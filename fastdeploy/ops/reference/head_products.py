# SPDX-License-Identifier: Apache-2.0
"""Products of heads in Paddle operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle

from fastdeploy.ops.reference.linear import linear, pack_each

if TYPE_CHECKING:
    from fastdeploy.ops.head_products import PackedHeads
    from fastdeploy.ops.linear import Pieces
    from fastdeploy.ops.quantized_form import QuantizedForm

_SHARED_FIELDS = ("in_features", "out_features", "dtype", "quantization", "group_size", "has_minimum")
"""Fields of both PackedHeads and PackedLinear."""


def pack_heads(weights: Sequence[Pieces], quantization: str = "none", form: QuantizedForm | None = None) -> PackedHeads:
    """As fastdeploy.ops.head_products.pack_heads; the data is [num_heads, out, in]."""
    from fastdeploy.ops.head_products import PackedHeads

    packed = pack_each(weights, quantization, False, form)
    data = paddle.stack([one.data for one in packed])
    return PackedHeads(data, len(packed), **{name: getattr(packed[0], name) for name in _SHARED_FIELDS})


def project_heads(
    x: paddle.Tensor, w: PackedHeads, out: paddle.Tensor, num_rows: int, head_stride: int | None = None
) -> None:
    """As fastdeploy.ops.head_products.project_heads, but the rounding of a row may depend on num_rows."""
    from fastdeploy.ops.linear import PackedLinear

    stride = w.in_features if head_stride is None else head_stride
    fields = {name: getattr(w, name) for name in _SHARED_FIELDS}
    for head in range(w.num_heads):
        rows = x[:, head * stride : head * stride + w.in_features]
        product = paddle.zeros([num_rows, w.out_features], out.dtype)
        linear(rows, PackedLinear(w.data[head], None, **fields), product, num_rows)
        out[:num_rows, head * w.out_features : (head + 1) * w.out_features] = product
