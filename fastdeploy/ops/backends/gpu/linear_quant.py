# SPDX-License-Identifier: Apache-2.0
"""Linear layers with quantized weights: the CPU packs codes and scales, which are reordered here.

`PackedLinear.data` is [num_tiles * tile_bytes] uint8, as custom_ops/gpu_ops/quant_tiles.h describes it.
"""

from __future__ import annotations

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
from fastdeploy.ops.linear import PackedLinear, Pieces, shape_of
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import PANEL, QuantizedForm, form_of
from fastdeploy.ops.registry import selected_backend

_TILE = PANEL  # rows of a tile
_FACTOR_BYTES = 4 * _TILE
_UNIT_WORDS = 8  # 32-bit words of a row in a unit
_STAGE, _PIECE = 128, 32  # inputs; rows of codes are filled up to a multiple of _STAGE
_MAX_INPUTS = 1 << 16

_memory: list[Tensor] = []  # for codes of rows; graphs hold the addresses, so that none is freed


def pack_quantized(pieces: Pieces, bias: Tensor | None, quantization: str, is_gated: bool) -> PackedLinear:
    """Quantize a weight on the host as the CPU does, unless it consists of codes, and place it on the device."""
    _, k, _ = shape_of(pieces, is_gated)
    if k > _MAX_INPUTS:
        raise ValueError(f"pack_linear: weight: expected at most {_MAX_INPUTS} inputs, got {k}")
    load_library()
    with selected_backend().on_host():
        packed = cpu.pack_linear(pieces, None, quantization, is_gated)
        tiles = paddle.to_tensor(_to_tiles(packed).reshape(-1), place=paddle.CPUPlace())
    place = selected_backend().place
    return replace(packed, data=place(tiles), bias=None if bias is None else place(bias))


def first_outputs(w: PackedLinear, count: int) -> PackedLinear:
    """Return the first tiles of the packed weight."""
    num_tiles = -(-w.out_features // _TILE)
    size = w.data.shape[0] // num_tiles * (count // _TILE)
    return replace(w, data=w.data._slice(0, size), out_features=count)


def linear_quantized(
    x: Tensor, w: PackedLinear, out: Tensor, num_rows: int, residual: Tensor | None, norm: NormParams | None
) -> None:
    """Quantize rows and multiply them by a packed weight, in two launches."""
    form, rows = _form_of(w), x.shape[0]
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, float(norm.eps))
    tensors = x, w.data, norm_weight, w.bias, residual, out, *_find_row_memory(form, rows, w.in_features)
    flags = w.is_gated, dtype_of(out) == "float32", *form.as_list()
    sizes = w.out_features, w.in_features, *map(int, flags), _num_multiprocessors(active())
    launch("fd_linear_quantized", *tensors, *active().row_count(num_rows), *sizes, eps)


def _form_of(w: PackedLinear) -> QuantizedForm:
    form = form_of(w)
    assert form is not None
    return form


def _find_row_memory(form: QuantizedForm, rows: int, in_features: int) -> tuple[Address, Address, Address | None]:
    """Return memory for codes of rows, their scales and sums, as custom_ops/gpu_ops/quant_rows.h describes them."""
    stride = -(-in_features // _STAGE) * _STAGE
    code_bytes = rows * stride * form.row_bits // 8
    piece_bytes = 4 * rows * stride // _PIECE
    scale_bytes = 4 * rows if form.row_bits == 16 else piece_bytes
    sums_at = code_bytes + -(-scale_bytes // 16) * 16
    memory = _find_memory(sums_at + (piece_bytes if form.has_minimum else 0))
    return memory, Address(memory + code_bytes), Address(memory + sums_at) if form.has_minimum else None


@lru_cache
def _num_multiprocessors(library: DeviceLibrary) -> int:
    return int(library.properties().num_multiprocessors)


def _find_memory(num_bytes: int) -> Address:
    """Return memory of at least this size. A step at full size comes before any graph is captured."""
    if not _memory or _memory[-1].shape[0] < num_bytes:
        _memory.append(paddle.empty([num_bytes], "uint8"))
    return Address(_memory[-1].data_ptr())


def _to_tiles(w: PackedLinear) -> NDArray[np.uint8]:
    """Return a weight that the CPU has packed (custom_ops/common/quant.h) as tiles, [num_tiles, tile_bytes]."""
    form, num_tiles = _form_of(w), -(-w.out_features // _TILE) * (2 if w.is_gated else 1)
    panels, header = w.data.numpy().reshape(num_tiles, -1), form.header_bytes(w.in_features)
    factors = _tile_rows(_parts(panels[:, :_FACTOR_BYTES], np.uint32), w.is_gated)
    scales = _tile_rows(_parts(panels[:, _FACTOR_BYTES:header], np.uint16), w.is_gated)
    pairs = scales.reshape(num_tiles, -1, 2, _TILE // 2).swapaxes(2, 3)
    units = _tile_rows(_units(_parts(panels[:, header:], np.uint32), form), w.is_gated)
    return np.concatenate([_bytes(part) for part in (factors, pairs, units)], axis=1)


def _parts(panels: NDArray[np.uint8], dtype: type[np.generic]) -> NDArray:
    """Return values of sixteen outputs each, [panels, parts, rows]."""
    return np.ascontiguousarray(panels).view(dtype).reshape(len(panels), -1, _TILE)


def _bytes(values: NDArray) -> NDArray[np.uint8]:
    """Return the values of each tile as bytes, [tiles, bytes]."""
    return np.ascontiguousarray(values.reshape(len(values), -1)).view(np.uint8)


def _units(words: NDArray[np.uint32], form: QuantizedForm) -> NDArray[np.uint32]:
    """Return the words of the CPU's panels, [panels, words, rows], as units, [panels, units, rows, words].

    Unless there is a minimum, the stored codes plus 8 or 128 become signed codes.
    """
    if not form.has_minimum:
        words = words ^ np.uint32(0x88888888 if form.weight_bits == 4 else 0x80808080)
    num_panels, num_words, _ = words.shape
    num_units = -(-num_words // _UNIT_WORDS)
    padded = np.zeros((num_panels, num_units * _UNIT_WORDS, _TILE), np.uint32)
    padded[:, :num_words] = words
    if form.weight_bits == 4:
        padded = _join_nibbles(padded)
    return padded.reshape(num_panels, num_units, _UNIT_WORDS, _TILE).swapaxes(2, 3)


def _join_nibbles(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Reorder nibbles of 64 inputs: from 8 i + j and 8 i + j + 4 in byte 4 i + j to j and 32 + j in byte j."""
    mask = np.uint32(0x0F0F0F0F)
    quads = np.stack([words & mask, words >> np.uint32(4) & mask], axis=2)  # of four inputs each
    halves = quads.reshape(len(words), -1, 2, _UNIT_WORDS, _TILE)
    joined: NDArray[np.uint32] = halves[:, :, 0] | halves[:, :, 1] << np.uint32(4)
    return joined.reshape(words.shape)


def _tile_rows(values: NDArray, is_gated: bool) -> NDArray:
    """Return values of the rows of panels, [panels, parts, rows, ...], as those of tiles.

    If the layer is gated, panels alternate between 16 gates and 16 ups; a tile has 8 gates, then their 8 ups.
    """
    if not is_gated:
        return values
    num_panels, num_parts, _, *rest = values.shape
    halves = values.reshape(num_panels // 2, 2, num_parts, 2, _TILE // 2, *rest)  # output, gate or up, part, tile, row
    return halves.swapaxes(1, 3).reshape(values.shape)
