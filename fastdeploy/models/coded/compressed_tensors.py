# SPDX-License-Identifier: Apache-2.0
"""Weights that compressed-tensors stores as integers, `pack-quantized` and `int-quantized`, and finds those in FP8.

A weight is (code - zero point) * scale. Codes and zero points are integers from -8 or -128 on. Packed ones are stored
plus 8 or 128 in words of 32 bits, the first in the lowest bits: codes along the inputs, zero points along the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.coded.compressed_tensors_config import (
    FLOATS,
    INTEGERS,
    PACKED,
    WeightScheme,
    parse_compressed_tensors,
)
from fastdeploy.config.model_config import DType
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.coded.fp8 import Fp8Module
from fastdeploy.models.coded.grouped_piece import (
    SCALE_KINDS,
    are_small_halves,
    bad_tensor,
    check_scales,
    converted_piece,
    have_exact_halves,
    kept_piece,
    stored_array,
    wide_floats,
)
from fastdeploy.models.own_codes import BY_BITS
from fastdeploy.models.weight_source import Fidelity, SafetensorsSource
from fastdeploy.ops.coded_piece import CodedPiece, StoredCodes
from fastdeploy.ops.grouped_codes import CONVERTED_GROUP, GroupedCodes, run_size, unpack_codes, widen_codes
from fastdeploy.ops.quantized_form import QuantizedForm
from fastdeploy.ops.registry import selected_backend

_FLOAT_KINDS = ("F8_E4M3",)
_WORD_BYTES = 4


def find_compressed_tensors(
    quantization: Mapping[str, Any], files: SafetensorsSource
) -> dict[str, IntegerModule | Fp8Module]:
    """Return the modules with codes by the names of their weights.

    Raises:
        ConfigError: config.json and the files contradict each other, or tensors are missing or of wrong shapes.
    """
    config = parse_compressed_tensors(quantization, f"{files.directory}/config.json: ")
    modules = dict[str, IntegerModule | Fp8Module]()
    for name, parts in _coded_parts(files).items():
        scheme, first = config.scheme_of(name), f"{name}.{parts[0]}"
        if scheme is None or config.ignores(name):
            raise bad_tensor(files, first, "has codes, but config.json says that it is not quantized")
        if scheme.format not in ("", _format_of(name, files)):
            raise bad_tensor(files, first, f"is not {scheme.format}, as config.json says")
        modules[f"{name}.weight"] = (_float_module if scheme.is_float else IntegerModule)(name, parts, scheme, files)
    return modules


def _float_module(name: str, parts: list[str], scheme: WeightScheme, files: SafetensorsSource) -> Fp8Module:
    """Return a linear layer whose weight is stored in FP8 with a scale per output or per block.

    Raises:
        ConfigError: a tensor is missing, unexpected, or of a wrong type or shape.
    """
    weight, scale = f"{name}.weight", f"{name}.weight_scale"
    for part in parts:
        if part not in ("weight", "weight_scale"):
            raise bad_tensor(files, f"{name}.{part}", "is unexpected beside a weight in FP8")
    if files.shapes.get(weight) is None or files.kind(weight) not in _FLOAT_KINDS:
        raise bad_tensor(files, f"{name}.{parts[0]}", f"is of a weight in FP8, but {weight} is no tensor of F8_E4M3")
    return Fp8Module(files, weight, scale, scheme.block if scheme.strategy == "block" else None)


def _coded_parts(files: SafetensorsSource) -> dict[str, list[str]]:
    """Return the last parts of the names of each module's tensors, for the modules whose weights are codes."""
    parts: dict[str, list[str]] = {}
    for name in files.shapes:
        module, _, part = name.rpartition(".")
        if part.startswith("weight_") or (part == "weight" and files.kind(name) in ("I8", *_FLOAT_KINDS)):
            parts.setdefault(module, []).append(part)
    for module, found in parts.items():
        if "weight" not in found and f"{module}.weight" in files.shapes:
            found.append("weight")
    return parts


def _format_of(name: str, files: SafetensorsSource) -> str:
    if f"{name}.weight_packed" in files.shapes:
        return PACKED
    is_float = f"{name}.weight" in files.shapes and files.kind(f"{name}.weight") in _FLOAT_KINDS
    return FLOATS if is_float else INTEGERS


class IntegerModule:
    """A linear layer whose weight is stored as integers.

    Attributes:
        companions: names of the tensors that make up its weight.
        shape: of the weight, [out, in].
        kind: int4 or int8.
    """

    def __init__(self, name: str, parts: list[str], scheme: WeightScheme, files: SafetensorsSource) -> None:
        """Check the shapes of the tensors, and which inputs belong to which group.

        Args:
            name: of the module.
            parts: last parts of the names of its tensors.
            scheme: as config.json has it.

        Raises:
            ConfigError: a tensor is missing, unexpected, or of a wrong type or shape.
        """
        self._name, self._scheme, self._files = name, scheme, files
        self._has_words = "weight_packed" in parts
        self._codes = f"{name}.weight_packed" if self._has_words else f"{name}.weight"
        self._check_parts(parts)
        self.companions = tuple(f"{name}.{part}" for part in parts)
        self.shape = self._find_shape()
        self.kind = f"int{scheme.num_bits}"
        self._groups = self._find_groups("weight_g_idx" in parts)
        self._group_size = run_size(self._groups) if scheme.group_size else 0
        self._is_converted = scheme.group_size > 0 and self._group_size == 0
        self._check_numbers()

    @property
    def form(self) -> QuantizedForm:
        """Return the form that keeps the codes; that of new codes if operators have no groups like theirs."""
        if self._is_converted:
            return QuantizedForm(BY_BITS[8, self._scheme.row_bits], CONVERTED_GROUP)
        quantization = BY_BITS[self._scheme.num_bits, self._scheme.row_bits]
        return QuantizedForm(quantization, self._group_size, not self._scheme.is_symmetric)

    @cached_property
    def fidelity(self) -> Fidelity:
        """Return what becomes of the weight's values, which may depend on its scales."""
        if self._is_converted:
            return "converted"
        if self._group_size == 0:
            return "kept"
        return "kept" if self._scheme.is_symmetric and self._has_exact_halves() else "rounded"

    def coded(self, files: SafetensorsSource) -> StoredCodes:
        """Return the codes, scales and minimums, which are read some outputs at a time.

        Raises:
            ConfigError: when they are read: a value is not valid.
        """
        form = self.form
        return StoredCodes(*self.shape, form.group_size, form.has_minimum, partial(self._read_piece, files))

    def widen(self, files: SafetensorsSource, dtype: DType) -> Tensor:
        """Return the weight, computed in fp32 and rounded once.

        Raises:
            ConfigError: a value is not valid.
        """
        return selected_backend().host_tensor(widen_codes(self._read(files, 0, self.shape[0]), dtype))

    def _read_piece(self, files: SafetensorsSource, begin: int, end: int) -> CodedPiece:
        """Return the codes of outputs [begin, end)."""
        grouped = self._read(files, begin, end)
        if self._is_converted:
            return converted_piece(grouped, files, f"{self._name}.weight_scale")
        return kept_piece(grouped, self._group_size, self._has_small_halves)

    def _bad(self, files: SafetensorsSource, part: str, problem: str) -> ConfigError:
        return bad_tensor(files, f"{self._name}.{part}", problem)

    def _check_parts(self, parts: list[str]) -> None:
        """Raise ConfigError if a tensor is missing or unexpected."""
        expected = {"weight_packed", "weight_shape"} if self._has_words else {"weight"}
        expected |= {"weight_scale"} if self._scheme.is_symmetric else {"weight_scale", "weight_zero_point"}
        allowed = expected | ({"weight_g_idx"} if self._scheme.group_size else set())
        for part in sorted(expected.difference(parts)):
            raise self._bad(self._files, parts[0], f"needs a tensor {part} beside it, which is missing")
        for part in sorted(set(parts) - allowed):
            raise self._bad(self._files, part, f"does not belong to a weight that is {self._described}")

    @property
    def _described(self) -> str:
        what = "symmetric" if self._scheme.is_symmetric else "asymmetric"
        return f"{PACKED if self._has_words else INTEGERS}, {what}, with a scale per {self._scheme.strategy}"

    def _find_shape(self) -> tuple[int, int]:
        """Return the shape of the weight.

        Raises:
            ConfigError: it is no matrix, or `weight_shape` contradicts the packed codes.
        """
        shape = self._files.shapes[self._codes]
        self._check(
            self._codes, ("I32",) if self._has_words else ("I8",), len(shape) == 2 and 0 not in shape, "a matrix"
        )
        if not self._has_words:
            return shape[0], shape[1]
        name, per_word = f"{self._name}.weight_shape", 8 * _WORD_BYTES // self._scheme.num_bits
        self._check(name, ("I64", "I32"), self._files.shapes[name] == (2,), "[2]")
        outputs, inputs = map(int, stored_array(self._files, name))
        if outputs != shape[0] or inputs < 1 or -(-inputs // per_word) != shape[1]:
            raise bad_tensor(self._files, name, f"is {[outputs, inputs]}, but {self._codes} is {list(shape)}")
        return outputs, inputs

    def _find_groups(self, has_order: bool) -> NDArray[np.int32]:
        """Return to which group each input belongs.

        Raises:
            ConfigError: groups do not divide the inputs, or are out of range.
        """
        inputs, size = self.shape[1], self._scheme.group_size
        if size and inputs % size:
            raise bad_tensor(self._files, self._codes, f"has {inputs} inputs, which groups of {size} do not divide")
        groups = np.arange(inputs, dtype=np.int32) // (size or inputs)
        if not has_order:
            return groups
        name = f"{self._name}.weight_g_idx"
        self._check(name, ("I32", "I64"), self._files.shapes[name] == (inputs,), f"{[inputs]}")
        order = stored_array(self._files, name)
        if (order == -1).all():  # as the library writes it before it sorts inputs
            return groups
        if not 0 <= order.min() <= order.max() < inputs // size:
            raise bad_tensor(self._files, name, f"has a group that is not one of 0..{inputs // size - 1}")
        return np.ascontiguousarray(order, np.int32)

    @property
    def _num_groups(self) -> int:
        return self.shape[1] // (self._scheme.group_size or self.shape[1])

    def _check_numbers(self) -> None:
        """Raise ConfigError if scales or zero points are of a wrong type or shape."""
        shape = self._number_shape
        name, found = f"{self._name}.weight_scale", self._files.shapes[f"{self._name}.weight_scale"]
        fits = found == shape or (shape == (1, 1) and found in ((), (1,)))
        self._check(name, SCALE_KINDS, fits, f"{list(shape)}")
        if self._scheme.is_symmetric:
            return
        name = f"{self._name}.weight_zero_point"
        found, kind = self._files.shapes[name], "I32" if self._has_packed_zeros else "I8"
        if self._has_packed_zeros:
            shape = -(-shape[0] * self._scheme.num_bits // (8 * _WORD_BYTES)), shape[1]
        self._check(name, (kind,), found == shape or (shape == (1, 1) and found in ((), (1,))), f"{list(shape)}")

    @property
    def _number_shape(self) -> tuple[int, int]:
        """Return the shape of scales: those of a whole tensor have a single one."""
        return (1, 1) if self._scheme.strategy == "tensor" else (self.shape[0], self._num_groups)

    @property
    def _has_packed_zeros(self) -> bool:
        return self._has_words and self._scheme.strategy != "tensor"

    def _check(self, name: str, kinds: tuple[str, ...], has_shape: bool, expected: str) -> None:
        kind, shape = self._files.kind(name), self._files.shapes[name]
        if kind not in kinds or not has_shape:
            raise bad_tensor(self._files, name, f"is {kind} {list(shape)}, expected {' or '.join(kinds)} of {expected}")

    def _read(self, files: SafetensorsSource, begin: int, end: int) -> GroupedCodes:
        """Return outputs [begin, end): codes from 0 on and zero points if there are any, else signed codes."""
        scales, zeros = self._read_scales(files, begin, end), self._read_zeros(files, begin, end)
        return GroupedCodes(self._read_codes(files, begin, end), scales, zeros, self._groups)

    def _read_codes(self, files: SafetensorsSource, begin: int, end: int) -> NDArray[np.int8] | NDArray[np.uint8]:
        bits, is_signed = self._scheme.num_bits, self._scheme.is_symmetric
        stored = stored_array(files, self._codes)[begin:end]
        if self._has_words:
            return unpack_codes(stored.view(np.uint8), self.shape[1], 4 if bits == 4 else 8, is_signed)
        half = 1 << bits - 1
        if not -half <= stored.min() <= stored.max() < half:
            raise bad_tensor(files, self._codes, f"has a code that is not one of {-half}..{half - 1}")
        return stored if is_signed else stored.view(np.uint8) + np.uint8(half)

    def _read_scales(self, files: SafetensorsSource, begin: int, end: int) -> NDArray[np.float32]:
        name = f"{self._name}.weight_scale"
        scales = wide_floats(self._stored_rows(files, name, begin, end), files.kind(name))
        check_scales(scales, files, name)
        return self._of_outputs(scales, end - begin)

    def _read_zeros(self, files: SafetensorsSource, begin: int, end: int) -> NDArray[np.float32] | None:
        """Return the zero points of codes from 0 on, or None."""
        if self._scheme.is_symmetric:
            return None
        bits, name = self._scheme.num_bits, f"{self._name}.weight_zero_point"
        half = 1 << bits - 1
        if self._has_packed_zeros:
            per_word = 8 * _WORD_BYTES // bits
            first, shifts = begin // per_word, np.arange(0, 8 * _WORD_BYTES, bits, dtype=np.uint32)[:, None]
            words = stored_array(files, name).view(np.uint32)[first : -(-end // per_word), None]
            zeros = (words >> shifts & np.uint32(2 * half - 1)).reshape(-1, self._num_groups).astype(np.float32)
            return zeros[begin - first * per_word : end - first * per_word]
        stored = self._stored_rows(files, name, begin, end)
        if not -half <= stored.min() <= stored.max() < half:
            raise bad_tensor(files, name, f"has a zero point that is not one of {-half}..{half - 1}")
        return self._of_outputs(stored.astype(np.float32) + half, end - begin)

    def _stored_rows(self, files: SafetensorsSource, name: str, begin: int, end: int) -> NDArray[Any]:
        """Return the numbers of outputs [begin, end), or those that all outputs share."""
        stored = stored_array(files, name).reshape(self._number_shape)
        return stored if self._scheme.strategy == "tensor" else stored[begin:end]

    def _of_outputs(self, numbers: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        """Return numbers for each output, also where all outputs share them."""
        return np.ascontiguousarray(np.broadcast_to(numbers, (count, self._num_groups)))

    @cached_property
    def _has_small_halves(self) -> bool:
        return are_small_halves(self._files, f"{self._name}.weight_scale")

    def _has_exact_halves(self) -> bool:
        name = f"{self._name}.weight_scale"
        kind = self._files.kind(name)
        return self._has_small_halves or have_exact_halves(wide_floats(stored_array(self._files, name), kind), kind)
