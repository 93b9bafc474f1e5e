# SPDX-License-Identifier: Apache-2.0
"""Weights that are quantized already: codes, scales and minimums as files of quantized models store them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import paddle
from paddle import Tensor

from fastdeploy.ops.quantized_form import FORMS, GROUP_SIZES, QuantizedForm

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from fastdeploy.ops.linear import WeightPiece


@dataclass(frozen=True)
class CodedPiece:
    """Some outputs of a linear layer as codes: a weight is code * scale, or code * scale + minimum.

    `pack_linear` keeps every code. Scales and minimums in float16 are kept too; those in float32 are divided by the
    power of two of the output's largest scale and rounded to float16, unless an output has a single scale and no
    minimum.

    Attributes:
        codes: [outputs, inputs] int8, or uint8 from 0 on if there are minimums.
        scales: [outputs, groups] float16 or float32.
        minimums: as scales, or None.
        group_size: inputs that share a scale: 32, 64 or 128; the last group may be shorter. 0: one scale per output.
        factors: [outputs] float32, by which the outputs are multiplied, or None.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    group_size: int = 0
    factors: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs."""
        return int(self.codes.shape[0])

    @property
    def num_inputs(self) -> int:
        """Return the number of inputs."""
        return int(self.codes.shape[-1])

    @property
    def has_minimum(self) -> bool:
        """Return whether there are minimums."""
        return self.minimums is not None

    def outputs(self, begin: int, end: int) -> CodedPiece:
        """Return the codes of a range of outputs."""
        rows = slice(begin, end)
        minimums = None if self.minimums is None else self.minimums[rows]
        factors = None if self.factors is None else self.factors[rows]
        return CodedPiece(self.codes[rows], self.scales[rows], minimums, self.group_size, factors)

    def inputs(self, begin: int, end: int) -> CodedPiece:
        """Return the codes of a range of inputs, which must begin and end between groups."""
        if not self.group_size:
            return replace(self, codes=self.codes[:, begin:end])
        groups = slice(begin // self.group_size, -(-end // self.group_size))
        minimums = None if self.minimums is None else self.minimums[:, groups]
        return replace(self, codes=self.codes[:, begin:end], scales=self.scales[:, groups], minimums=minimums)

    def scaled(self, factors: Tensor) -> CodedPiece:
        """Return the codes with each output multiplied by its own factor, a power of two."""
        return replace(self, factors=factors if self.factors is None else self.factors * factors)

    @property
    def has_factors_only(self) -> bool:
        """Return whether an output has a single scale and no minimum."""
        return self.group_size == 0 and self.minimums is None

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return factors [outputs] float32, and scales and minimums in float16, with no elements where there are none.

        A weight is (code * scale + minimum) * factor.
        """
        factors, scales, minimums = self._parts()
        if self.factors is not None:
            factors = factors * self.factors if factors.size else self.factors
        return factors, scales, minimums

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        outputs, none = self.num_outputs, _no_values(paddle.get_device())
        if self.has_factors_only:
            return self.scales.reshape([outputs]).astype("float32"), none, none
        if self.scales.dtype == paddle.float16:
            return none, self.scales, none if self.minimums is None else self.minimums
        factors, scales, minimums = half_numbers(self.scales, self.minimums)
        return factors.reshape([outputs]), scales, none if minimums is None else minimums


def half_numbers(scales: Tensor, minimums: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a power of two for each output, [outputs, 1], and float32 numbers divided by it, in float16."""
    largest = scales.abs().max(axis=1, keepdim=True)
    if minimums is not None:  # which then are below 2^13
        largest = paddle.maximum(largest, minimums.abs().max(axis=1, keepdim=True) * 2.0**-12)
    factors = 2.0 ** paddle.where(largest > 0, largest, paddle.ones_like(largest)).log2().floor()
    halves = None if minimums is None else (minimums / factors).astype("float16")
    return factors, (scales / factors).astype("float16"), halves


@dataclass(frozen=True)
class StoredCodes:
    """Some outputs of a linear layer whose codes are read from a file while they are packed, some outputs at a time.

    Attributes:
        num_outputs, num_inputs, group_size, has_minimum: what the codes have, as those of a `CodedPiece`.
        read: returns the codes of outputs [begin, end).
        factors: as those of a `CodedPiece`, by which outputs are multiplied after they are read.
    """

    num_outputs: int
    num_inputs: int
    group_size: int
    has_minimum: bool
    read: Callable[[int, int], CodedPiece]
    factors: Tensor | None = None

    def outputs(self, begin: int, end: int) -> CodedPiece:
        """Read the codes of a range of outputs."""
        piece = self.read(begin, end)
        return piece if self.factors is None else piece.scaled(self.factors[begin:end])

    def scaled(self, factors: Tensor) -> StoredCodes:
        """Return the codes with each output multiplied by its own factor, a power of two."""
        return replace(self, factors=factors if self.factors is None else self.factors * factors)

    def inputs(self, begin: int, end: int) -> StoredCodes:
        """Return the codes of a range of inputs, which must begin and end between groups."""
        return replace(self, num_inputs=end - begin, read=lambda first, last: self.read(first, last).inputs(begin, end))


Codes = CodedPiece | StoredCodes


def are_coded(pieces: Sequence[WeightPiece] | Sequence[Codes]) -> TypeIs[Sequence[Codes]]:
    """Return whether a weight consists of codes."""
    return all(isinstance(piece, Codes) for piece in pieces)


def outputs_of(pieces: Sequence[Codes], begin: int, end: int) -> list[CodedPiece]:
    """Return the codes of outputs [begin, end) of a weight that consists of these pieces in order."""
    found, first = [], 0
    for piece in pieces:
        last = first + piece.num_outputs
        if begin < last and first < end:
            found.append(piece.outputs(max(begin, first) - first, min(end, last) - first))
        first = last
    return found


def form_of_pieces(pieces: Sequence[Codes], quantization: str) -> QuantizedForm:
    """Return the form in which a weight of these pieces is packed: with the smallest of their groups.

    Args:
        quantization: one of QUANTIZATIONS: the bits of codes and rows.
    """
    form = replace(FORMS[quantization], has_minimum=any(piece.has_minimum for piece in pieces))
    sizes = [piece.group_size for piece in pieces if piece.group_size]
    return replace(form, group_size=min(sizes, default=0))


def check_coded_pieces(pieces: Sequence[Codes]) -> None:
    """Raise ValueError if the tensors of a weight do not fit together."""
    num_inputs = pieces[0].num_inputs
    for piece in pieces:
        if piece.group_size not in GROUP_SIZES:
            raise ValueError(f"pack_linear: group_size: expected one of {GROUP_SIZES}, got {piece.group_size}")
        if piece.num_inputs != num_inputs:
            found = f"{piece.num_outputs}, {piece.num_inputs}"
            raise ValueError(f"pack_linear: codes: expected [outputs, {num_inputs}], got [{found}]")
        if isinstance(piece, CodedPiece):
            _check_tensors(piece)


def _check_tensors(piece: CodedPiece) -> None:
    dtype = paddle.int8 if piece.minimums is None else paddle.uint8
    if piece.codes.ndim != 2 or piece.codes.dtype != dtype:
        found = f"{piece.codes.dtype} of {list(piece.codes.shape)}"
        raise ValueError(f"pack_linear: codes: expected {dtype} of [outputs, inputs], got {found}")
    shape = [piece.num_outputs, -(-piece.num_inputs // piece.group_size) if piece.group_size else 1]
    for name, values in (("scales", piece.scales), ("minimums", piece.minimums)):
        if values is None:
            continue
        if list(values.shape) != shape or values.dtype not in (paddle.float16, paddle.float32):
            found = f"{values.dtype} of {list(values.shape)}"
            raise ValueError(f"pack_linear: {name}: expected float16 or float32 of {shape}, got {found}")
    outputs, factors = piece.num_outputs, piece.factors
    if factors is not None and (list(factors.shape) != [outputs] or factors.dtype != paddle.float32):
        found = f"{factors.dtype} of {list(factors.shape)}"
        raise ValueError(f"pack_linear: factors: expected float32 of [{outputs}], got {found}")
    if piece.minimums is not None and piece.minimums.dtype != piece.scales.dtype:
        raise ValueError(f"pack_linear: minimums: expected {piece.scales.dtype}, got {piece.minimums.dtype}")


def decode(stored: Codes) -> Tensor:
    """Return the weights [outputs, inputs] float32 for which a packed piece stands."""
    piece = stored.outputs(0, stored.num_outputs)
    factors, scales, minimums = piece.parts()
    values = piece.codes.astype("float32")
    if scales.size:
        values = values * _per_input(scales, piece)
    if minimums.size:
        values = values + _per_input(minimums, piece)
    return values * factors.unsqueeze(1) if factors.size else values


@lru_cache
def _no_values(device: str) -> Tensor:
    """Return a tensor without elements on Paddle's device; making one takes as long as packing a small piece."""
    return paddle.zeros([0], "float16")


def _per_input(values: Tensor, piece: CodedPiece) -> Tensor:
    """Repeat a value of each group for the inputs of the group."""
    num_inputs = piece.codes.shape[1]
    repeated = paddle.repeat_interleave(values.astype("float32"), piece.group_size or num_inputs, axis=1)
    return repeated[:, :num_inputs]
