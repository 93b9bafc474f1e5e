# SPDX-License-Identifier: Apache-2.0
"""Linear layers with quantized weights as custom_ops/common/quant.h defines them, built from quantized.cc."""

import ctypes
import runpy
from functools import lru_cache
from pathlib import Path

import numpy as np
import paddle
from numpy.typing import NDArray

from fastdeploy.ops.backends.cpu import library
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.quantized_form import form_of

HERE = Path(__file__).resolve().parent


@lru_cache(maxsize=1)
def load_definition() -> ctypes.CDLL:
    """Build the library, unless it is up to date, and load it."""
    build = runpy.run_path(str(HERE.parents[1] / "setup.py"))
    return ctypes.CDLL(str(build["build_for_path"]("quantized", [HERE / "quantized.cc"], library.isa())))


def quantized_sums(x: paddle.Tensor, w: PackedLinear) -> NDArray[np.float32]:
    """Return the sums of a layer times the scales of the rows: [rows, n], or [rows, 2 n] if gated.

    Args:
        x: [rows, k] bfloat16.
        w: from `pack_linear` of the CPU; its bias is not added.
    """
    form = form_of(w)
    assert form is not None
    rows, n, k = x.shape[0], w.out_features, w.in_features
    out = np.empty([rows, 2 * n if w.is_gated else n], np.float32)
    sizes = map(ctypes.c_int64, (*form.as_list(), rows, n, k, w.is_gated))
    addresses = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(w.data.data_ptr())
    load_definition().fd_quantized_sums(*addresses, *sizes, ctypes.c_void_p(out.ctypes.data))
    return out


def defined_outputs(
    x: paddle.Tensor, w: PackedLinear, dtype: str, residual: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Return the outputs [rows, n] of a layer without norm and gate."""
    sums = quantized_sums(x, w)
    if w.bias is not None:
        sums = sums + w.bias.astype("float32").numpy()
    if residual is not None:
        sums = sums + residual.astype("float32").numpy()
    return paddle.to_tensor(sums, place=paddle.CPUPlace()).astype(dtype)


def stored_codes(w: PackedLinear) -> NDArray[np.int32]:
    """Return the codes of a weight packed by the CPU: [n, k], or [2 * n, k] if gated."""
    form = form_of(w)
    assert form is not None
    codes = np.empty([2 * w.out_features if w.is_gated else w.out_features, w.in_features], np.int32)
    sizes = map(ctypes.c_int64, (*form.as_list(), w.out_features, w.in_features, w.is_gated))
    load_definition().fd_quantized_codes(ctypes.c_void_p(w.data.data_ptr()), *sizes, ctypes.c_void_p(codes.ctypes.data))
    return codes
