# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.head_products`, and the layout of packed heads."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.backends.cpu.linear import pack_matrices
from fastdeploy.ops.head_products import PackedHeads
from fastdeploy.ops.linear import Pieces
from fastdeploy.ops.quantized_form import NO_QUANTIZATION, QuantizedForm, form_of


def pack_heads(
    weights: Sequence[Pieces], quantization: str = NO_QUANTIZATION, form: QuantizedForm | None = None
) -> PackedHeads:
    """Pack each head as `pack_linear` does, one after the other in one allocation."""
    packed = pack_matrices("heads", weights, quantization, False, form)
    n, k, dtype = packed.shape
    return PackedHeads(packed.data, len(weights), k, n, dtype, **packed.form_fields)


def project_heads(
    x: paddle.Tensor, w: PackedHeads, out: paddle.Tensor, num_rows: int, head_stride: int | None = None
) -> None:
    """Multiply each head by its matrix."""
    form = form_of(w)
    run_native(
        "fd_project_heads",
        x,
        w.data,
        out,
        w.num_heads,
        w.out_features,
        w.in_features,
        [] if form is None else form.as_list(),
        w.in_features if head_stride is None else head_stride,
        num_rows,
    )
