# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.linear`, and the layout of packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import paddle

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.backends.cpu.memory import allocate_streamed
from fastdeploy.ops.coded_piece import CodedPiece, Codes, are_coded, outputs_of
from fastdeploy.ops.linear import PackedLinear, Pieces, check_weight, form_of_weight, pieces_of, shape_of
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import NO_QUANTIZATION, PANEL, QuantizedForm, form_of

_CODES_AT_ONCE = 1 << 22  # are read and packed, so that they stay in the caches, whose memory the next ones get


def pack_linear(
    weight: paddle.Tensor | Pieces,
    bias: paddle.Tensor | None = None,
    quantization: str = NO_QUANTIZATION,
    is_gated: bool = False,
) -> PackedLinear:
    """Pack panels of 16 outputs, so that a kernel reads the weight in one sequential stream."""
    pieces = pieces_of(weight)
    form = form_of_weight(pieces, quantization)
    n, k, dtype = shape_of(pieces, is_gated)
    size = num_packed_elements(n, k, form, is_gated)
    packed = allocate_streamed([size], dtype if form is None else "uint8")
    pack_into(packed, pieces, form, is_gated)
    linear = PackedLinear(packed, bias, k, n, dtype, is_gated=is_gated)
    return linear if form is None else replace(linear, **asdict(form))


def num_packed_elements(n: int, k: int, form: QuantizedForm | None, is_gated: bool) -> int:
    """Return the size of the packed weight of a layer with n outputs after the gate and k inputs."""
    num_panels = -(-n // PANEL) * (2 if is_gated else 1)
    return num_panels * (PANEL * ((k + 1) // 2 * 2) if form is None else form.panel_bytes(k))


@dataclass(frozen=True)
class PackedMatrices:
    """Several packed weights of one size and form, one after the other; `shape` is (outputs, inputs, dtype)."""

    data: paddle.Tensor
    shape: tuple[int, int, str]
    form: QuantizedForm | None

    @property
    def form_fields(self) -> dict[str, Any]:
        """Return the fields of a packed weight that say its form."""
        return {} if self.form is None else asdict(self.form)


def pack_matrices(
    what: str, weights: Sequence[Pieces], quantization: str, is_gated: bool, form: QuantizedForm | None
) -> PackedMatrices:
    """Pack several weights as `pack_linear` does, one after the other in one allocation.

    Args:
        what: "experts" or "heads", for messages.
        weights, quantization, is_gated, form: as in `pack_experts`.
    """
    packed = None
    for index, pieces in enumerate(weights):  # each is read once
        check_weight(pieces, None, quantization)
        found = form if form is not None and are_coded(pieces) else form_of_weight(pieces, quantization)
        kind = (*shape_of(pieces, is_gated), found)
        if packed is None:
            (n, k, dtype, packed_form), first = kind, kind
            size = num_packed_elements(n, k, packed_form, is_gated)
            packed = allocate_streamed([len(weights) * size], dtype if packed_form is None else "uint8")
        if kind != first:
            raise ValueError(f"pack_{what}: weights: expected {what} of {first}, got {kind}")
        pack_into(packed[index * size : (index + 1) * size], pieces, packed_form, is_gated)
    if packed is None:
        raise ValueError(f"pack_{what}: weights: expected at least one of the {what}")
    return PackedMatrices(packed, (n, k, dtype), packed_form)


def pack_into(packed: paddle.Tensor, pieces: Pieces, form: QuantizedForm | None, is_gated: bool) -> None:
    """Write the packed weight to memory of num_packed_elements."""
    if are_coded(pieces):
        return _pack_codes_into(packed, pieces, form, is_gated)
    begins, ends = [piece.begin for piece in pieces], [piece.end for piece in pieces]
    stored = [piece.matrix.contiguous() for piece in pieces]
    is_transposed = pieces[0].is_transposed
    if form is None:
        run_native("fd_pack_linear", stored, packed, begins, ends, is_transposed, is_gated)
    else:
        run_native("fd_pack_quantized", stored, packed, begins, ends, is_transposed, form.as_list(), is_gated)


def _pack_codes_into(
    packed: paddle.Tensor, pieces: Sequence[Codes], form: QuantizedForm | None, is_gated: bool
) -> None:
    """Pack some panels at a time, those of gate and up together."""
    if form is None:
        raise ValueError("pack_linear: quantization: expected a format for a weight of codes, got none")
    n, k, _ = shape_of(pieces, is_gated)
    halves = (0, n) if is_gated else (0,)
    at_once = max(1, _CODES_AT_ONCE // (len(halves) * k * PANEL)) * PANEL
    for begin in range(0, n, at_once):
        end = min(n, begin + at_once)
        parts = [part for half in halves for part in outputs_of(pieces, half + begin, half + end)]
        first, last = (num_packed_elements(bound, k, form, is_gated) for bound in (begin, end))
        _pack_parts(packed[first:last], parts, form, is_gated)


def _pack_parts(packed: paddle.Tensor, pieces: Sequence[CodedPiece], form: QuantizedForm, is_gated: bool) -> None:
    codes = [piece.codes.contiguous() for piece in pieces]
    factors, scales, minimums = map(list, zip(*(piece.parts() for piece in pieces), strict=True))
    sizes = [piece.group_size for piece in pieces]
    run_native("fd_pack_coded", codes, factors, scales, minimums, packed, sizes, form.as_list(), is_gated)


def first_outputs(w: PackedLinear, count: int) -> PackedLinear:
    """Return the first panels of the packed weight."""
    panel_size = w.data.shape[0] // -(-w.out_features // PANEL)
    return replace(w, data=w.data[: count // PANEL * panel_size], out_features=count)


def linear(
    x: paddle.Tensor,
    w: PackedLinear,
    out: paddle.Tensor,
    num_rows: int,
    residual: paddle.Tensor | None = None,
    norm: NormParams | None = None,
) -> None:
    """Multiply by a packed weight, of bf16 or fp32 values or of codes and scales."""
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    arguments = x, w.data, w.bias, residual, norm_weight, out, w.out_features, w.in_features, w.is_gated, eps
    form = form_of(w)
    if form is None:
        run_native("fd_linear", *arguments, num_rows)
    else:
        run_native("fd_linear_quantized", *arguments, form.as_list(), num_rows)
