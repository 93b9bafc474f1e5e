# SPDX-License-Identifier: Apache-2.0
"""Linear layers in wint8, wint4, w8a8 and w4a8: codes and scales come from the CPU's packer and are reordered here.

`PackedLinear.data` is [num_tiles * tile_bytes] uint8, as custom_ops/gpu_ops/quant_tiles.h describes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.backends.cpu import linear as cpu
from fastdeploy.ops.backends.cpu.library import load_library
from fastdeploy.ops.backends.gpu.checks import dtype_of
from fastdeploy.ops.backends.gpu.library import Address, DeviceLibrary, active, launch
from fastdeploy.ops.linear import PackedLinear, WeightPiece
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import FORMS
from fastdeploy.ops.registry import selected_backend

_TILE = 16  # rows of a tile, and of the CPU's panels
_UNIT_WORDS = 8  # 32-bit words of a row in a unit
_STAGE = 128  # inputs; rows of codes are filled up to a multiple of it
_MAX_INPUTS = 1 << 16
_FOUR_BITS = ("wint4", "w4a8")
_TWO_LIMBS = ("wint8", "wint4")

_memory: list[Tensor] = []  # for codes of rows; graphs hold the addresses, so that none is freed


def pack_quantized(
    pieces: Sequence[WeightPiece], bias: Tensor | None, quantization: str, is_gated: bool
) -> PackedLinear:
    """Quantize a bf16 weight on the host as the CPU does, and place it on the device."""
    k = pieces[0].matrix.shape[0 if pieces[0].is_transposed else 1]
    if k > _MAX_INPUTS:
        raise ValueError(f"pack_linear: weight: expected at most {_MAX_INPUTS} inputs, got {k}")
    load_library()
    with selected_backend().on_host():
        packed = cpu.pack_linear(pieces, None, quantization, is_gated)
        tiles = _reorder(packed.data.numpy(), packed)
        data = paddle.to_tensor(tiles.reshape(-1), place=paddle.CPUPlace())
    place = selected_backend().place
    return replace(packed, data=place(data), bias=None if bias is None else place(bias))


def first_outputs(w: PackedLinear, count: int) -> PackedLinear:
    """Return the first tiles of the packed weight."""
    num_tiles = -(-w.out_features // _TILE)
    size = w.data.shape[0] // num_tiles * (count // _TILE)
    return replace(w, data=w.data._slice(0, size), out_features=count)


def linear_quantized(
    x: Tensor, w: PackedLinear, out: Tensor, num_rows: int, residual: Tensor | None, norm: NormParams | None
) -> None:
    """Quantize rows and multiply them by a packed weight, in two launches."""
    stride = -(-w.in_features // _STAGE) * _STAGE
    code_bytes = x.shape[0] * stride * (2 if w.quantization in _TWO_LIMBS else 1)
    codes = _find_memory(code_bytes + 4 * x.shape[0])
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, float(norm.eps))
    tensors = x, w.data, norm_weight, w.bias, residual, out, codes, Address(codes + code_bytes)
    flags = w.is_gated, dtype_of(out) == "float32", FORMS.index(w.quantization)
    sizes = w.out_features, w.in_features, *map(int, flags), _num_multiprocessors(active())
    launch("fd_linear_quantized", *tensors, *active().row_count(num_rows), *sizes, eps)


@lru_cache
def _num_multiprocessors(library: DeviceLibrary) -> int:
    return int(library.properties().num_multiprocessors)


def _find_memory(num_bytes: int) -> Address:
    """Return memory of at least this size. A step at full size comes before any graph is captured."""
    if not _memory or _memory[-1].shape[0] < num_bytes:
        _memory.append(paddle.empty([num_bytes], "uint8"))
    return Address(_memory[-1].data_ptr())


def _reorder(packed: NDArray[np.uint8], w: PackedLinear) -> NDArray[np.uint8]:
    """Return the panels of the CPU (custom_ops/cpu_ops/kernels.h) as tiles, [num_tiles, tile_bytes]."""
    num_tiles = -(-w.out_features // _TILE) * (2 if w.is_gated else 1)
    panels = packed.reshape(num_tiles, -1)
    has_four_bits = w.quantization in _FOUR_BITS
    num_words = -(-w.in_features // (8 if has_four_bits else 4))
    scale_bytes = panels.shape[1] - num_words * 4 * _TILE
    num_units = -(-num_words // _UNIT_WORDS)
    tiles = np.zeros((num_tiles, scale_bytes + num_units * _TILE * 4 * _UNIT_WORDS), np.uint8)
    scales = panels[:, :scale_bytes].view(np.uint16 if has_four_bits else np.uint32)
    _copy_rows(scales.reshape(num_tiles, -1, _TILE, 1), tiles[:, :scale_bytes].view(scales.dtype), w.is_gated)
    words = panels[:, scale_bytes:].view(np.uint32).reshape(num_tiles, num_words, _TILE)
    words = words ^ np.uint32(0x88888888 if has_four_bits else 0x80808080)  # codes + 8 or 128 become signed codes
    padded = np.zeros((num_tiles, num_units * _UNIT_WORDS, _TILE), np.uint32)
    padded[:, :num_words] = words
    units = padded.reshape(num_tiles, num_units, _UNIT_WORDS, _TILE).swapaxes(2, 3)
    _copy_rows(units, tiles[:, scale_bytes:].view(np.uint32), w.is_gated)
    return tiles


def _copy_rows(source: NDArray, target: NDArray, is_gated: bool) -> None:
    """Copy [panels, parts, rows, elements] to tiles [tiles, parts * rows * elements].

    If the layer is gated, panels alternate between 16 gates and 16 ups; a tile has 8 gates, then their 8 ups.
    """
    num_tiles, num_parts, _, size = source.shape
    if is_gated:
        halves = source.reshape(num_tiles // 2, 2, num_parts, 2, _TILE // 2, size)
        source = halves.transpose(0, 3, 2, 1, 4, 5)
    target[...] = source.reshape(num_tiles, -1)
