# SPDX-License-Identifier: Apache-2.0
"""Weights in FP8 (E4M3) with a scale per block of outputs and inputs, which are widened when they are read.

A weight is code * scale of its block. Block form: `X.weight` [out, in] with `X.weight_scale_inv`, a scale per block of
128 x 128; blocks at the ends may be smaller. Experts may be stacked as modules of transformers 5 hold them:
`X.experts.gate_up_proj` [experts, 2 * width, in] and `X.experts.down_proj` [experts, out, width], with `_scale_inv`
behind these names. A scale per output is one per block of one output and all inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.coded.fp8_config import BLOCK, parse_fp8
from fastdeploy.config.model_config import DType
from fastdeploy.models.coded.grouped_piece import bad_tensor
from fastdeploy.models.finite import bits_of
from fastdeploy.models.weight_source import Fidelity, SafetensorsSource
from fastdeploy.ops.coded_piece import Codes
from fastdeploy.ops.fp8_blocks import num_blocks, widen_blocks
from fastdeploy.ops.quantized_form import QuantizedForm

KIND = "F8_E4M3"
_SCALE_KINDS = ("F32", "BF16", "F16")
_SCALE = "_scale_inv"
_STACKED = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Fp8Module:
    """A linear layer, or an embedding, whose weight the files store in FP8.

    Attributes: as those of `CodedModule`.
    """

    kind: str = KIND
    fidelity: Fidelity = "widened"
    form: QuantizedForm | None = None

    def __init__(
        self,
        files: SafetensorsSource,
        weight: str,
        scale: str,
        block: tuple[int, int] | None = BLOCK,
        matrix: int | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Compare the tensors' types and shapes, without reading them.

        Args:
            weight, scale: names of tensors in the files; scales of whole outputs may be a vector.
            block: outputs and inputs that share a scale; None for a scale per output.
            matrix: index of the weight if the tensor is a stack of matrices.
            rows: range of the matrix that is the weight, from the start of a block to the end of one; None for all.

        Raises:
            ConfigError: a tensor is missing, or its type or shape is wrong; names file and tensor.
        """
        self.companions: tuple[str, ...] = (weight, scale)
        stored = files.shapes[weight]
        if len(stored) != (2 if matrix is None else 3):
            _refuse(files, weight, f"is {KIND} {list(stored)}, expected a matrix")
        block = block or (1, max(1, stored[-1]))
        self._block, self._matrix = block, matrix
        _check_scales(files, weight, scale, block)
        begin, end = rows or (0, stored[-2])
        self.shape = (end - begin, stored[-1])
        self._rows, self._scale_rows = slice(begin, end), slice(begin // block[0], -(-end // block[0]))

    def coded(self, files: SafetensorsSource) -> Codes:
        """Raise AssertionError: there is no form that keeps the codes."""
        raise AssertionError(f"{self.companions[0]} has no codes that are kept")

    def widen(self, files: SafetensorsSource, dtype: DType) -> Tensor:
        """Return the weight [out, in], computed in fp32 and rounded once.

        Raises:
            ConfigError: a code is NaN, a scale is not finite or not above 0, or a value is too large for bfloat16;
                names file and tensor.
        """
        weight, scale = self.companions
        codes, scales = files.read(weight), self._read_scales(files)
        if not scales.min() > 0:
            _refuse(files, scale, f"has a scale of {scales.min():g}, expected numbers above 0")
        wide: Tensor = paddle.empty(self.shape, dtype)
        out = bits_of(wide).reshape(self.shape)
        stored = bits_of(codes).reshape(files.shapes[weight])
        rows = (stored if self._matrix is None else stored[self._matrix])[self._rows]
        if not widen_blocks(rows, scales, self._block, out if dtype == "bfloat16" else out.view(np.float32)):
            _refuse(files, weight, "has a value that is too large for bfloat16, with its scale")
        return wide

    def _read_scales(self, files: SafetensorsSource) -> NDArray[np.float32]:
        """Return the scales of the weight's blocks."""
        scales = files.read(self.companions[1])
        scales = scales if self._matrix is None else scales[self._matrix]
        blocks = num_blocks(self.shape, self._block)
        found: NDArray[np.float32] = scales[self._scale_rows].astype("float32").reshape(blocks).contiguous().numpy()
        return found


def find_fp8_modules(quantization: Mapping[str, Any], files: SafetensorsSource) -> Mapping[str, Fp8Module]:
    """Return the weights in FP8 with a scale per block, by their names.

    Raises:
        ConfigError: `quantization_config` is not supported or contradicts the files, or a tensor is missing or has a
            wrong type or shape; names file and tensor.
    """
    config = parse_fp8(quantization, f"{files.directory}/config.json: ")
    codes = {name: f"{name}{_SCALE}" for name in files.shapes if files.kind(name) == KIND}
    for name in files.shapes:
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) not in codes:
            _refuse(
                files, name, f"is a scale of FP8 weights, but {name.removesuffix(_SCALE):.120} is no tensor of {KIND}"
            )
    modules: dict[str, Fp8Module] = {}
    for name, scale in codes.items():
        if name.removesuffix(".weight") in config.plain_modules:
            _refuse(files, name, f"is {KIND}, but modules_to_not_convert in config.json has it")
        modules.update(_modules_of(files, name, scale))
    return modules


def _modules_of(files: SafetensorsSource, name: str, scale: str) -> Iterator[tuple[str, Fp8Module]]:
    """Yield the weights that a tensor of codes holds."""
    stacked, shape = _STACKED.fullmatch(name), files.shapes[name]
    if stacked is None:
        yield name, Fp8Module(files, name, scale)
        return
    parts = _PARTS[stacked[2]]
    height = shape[1] // len(parts) if len(shape) == 3 else 0
    if len(parts) > 1 and (len(shape) != 3 or shape[1] != len(parts) * height or height % BLOCK[0]):
        _refuse(files, name, f"is {list(shape)}, expected [experts, 2 * a multiple of {BLOCK[0]}, inputs]")
    for matrix in range(shape[0]):
        for index, part in enumerate(parts):
            rows = index * height, (index + 1) * height
            yield f"{stacked[1]}{matrix}.{part}.weight", Fp8Module(files, name, scale, matrix=matrix, rows=rows)


def _check_scales(files: SafetensorsSource, weight: str, scale: str, block: tuple[int, int]) -> None:
    *stack, rows, inputs = files.shapes[weight]
    blocks = num_blocks((rows, inputs), block)
    if scale not in files.shapes:
        _refuse(files, weight, f"is {KIND} without its scales {scale}")
    found = files.shapes[scale]
    is_vector = found == (*stack, rows) and blocks == (rows, 1)
    if found != (*stack, *blocks) and not is_vector:
        _refuse(files, scale, f"is {list(found)}, expected {[*stack, *blocks]}, a scale per block of {list(block)}")
    if files.kind(scale) not in _SCALE_KINDS:
        _refuse(files, scale, f"is stored as {files.kind(scale)}, expected one of {', '.join(_SCALE_KINDS)}")


def _refuse(files: SafetensorsSource, name: str, problem: str) -> NoReturn:
    raise bad_tensor(files, name, problem)
