# SPDX-License-Identifier: Apache-2.0
"""Linear layers as AWQ and GPTQ store them: codes and zeros in words of 32 bits, with the inputs first.

Where every zero is half of the number of codes, half is subtracted from the codes, and there are no minimums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.model_config import DType
from fastdeploy.core.errors import ConfigError
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
from fastdeploy.ops.code_words import WORD_BITS, CodeWords, Order, unpack_words
from fastdeploy.ops.coded_piece import CodedPiece, StoredCodes
from fastdeploy.ops.grouped_codes import CONVERTED_GROUP, GroupedCodes, run_size, widen_codes
from fastdeploy.ops.quantized_form import QuantizedForm
from fastdeploy.ops.registry import selected_backend

CODES, ZEROS, SCALES, GROUP_OF_INPUT = "qweight", "qzeros", "scales", "g_idx"
PARTS = (CODES, ZEROS, SCALES, GROUP_OF_INPUT)  # last parts of the names of a module's tensors
_KINDS = {CODES: ("I32",), ZEROS: ("I32",), SCALES: SCALE_KINDS, GROUP_OF_INPUT: ("I32",)}
_ONES = {4: 0x11111111, 8: 0x01010101}  # a word of codes that are 1
_ROW_BITS = 16  # only weights are quantized


@dataclass(frozen=True)
class WordLayout:
    """How the tensors of a module are laid out.

    Attributes:
        method: as reports name it.
        order, zero_order: where the codes and the zeros of a word belong.
        zeros_minus_one: whether zeros are stored less 1.
        group_size: inputs that share a scale; -1: all inputs of an output.
        is_symmetric: whether config.json says that every zero is half of the number of codes; None if it does not say.
        is_reordered: whether the group of each input has to be stored.
        has_short_group: whether the last group may have fewer inputs.
    """

    method: str
    num_bits: Literal[4, 8]
    order: Order
    zero_order: Order
    zeros_minus_one: bool
    group_size: int
    is_symmetric: bool | None
    is_reordered: bool
    has_short_group: bool


class WordModule:
    """A linear layer whose weight is stored in words."""

    def __init__(self, name: str, layout: WordLayout, files: SafetensorsSource) -> None:
        """Check which tensors there are, their types and their shapes.

        Args:
            name: of the module.

        Raises:
            ConfigError: a tensor is missing or unexpected, or has a wrong type or shape.
        """
        self._name, self._layout, self._files = name, layout, files
        self.companions = tuple(self._of(part) for part in PARTS if self._of(part) in files.shapes)
        self._check_names()
        self.shape = self._find_shape()
        size, num_inputs = layout.group_size, self.shape[1]
        self._group_size = num_inputs if size < 0 else min(size, num_inputs)
        self._check_shapes()

    @property
    def kind(self) -> str:
        """Return the method and the bits, and why the codes have no form."""
        found = f"{self._layout.method} int{self._layout.num_bits}"
        if self._run is not None:
            return found
        is_ordered = np.array_equal(self._groups(), self._groups_in_order())
        return f"{found} in groups of {self._group_size}" if is_ordered else f"{found} in the order of g_idx"

    @property
    def form(self) -> QuantizedForm:
        """Return the form that keeps the codes; that of new codes of eight bits if no operator has groups like theirs.

        Raises:
            ConfigError: a scale, a zero or a group is not valid.
        """
        if self._run is None:
            return QuantizedForm(BY_BITS[8, _ROW_BITS], CONVERTED_GROUP)
        return QuantizedForm(BY_BITS[self._layout.num_bits, _ROW_BITS], self._run, not self._is_symmetric)

    @property
    def fidelity(self) -> Fidelity:
        """Return what becomes of the weight's values."""
        if self._run is None:
            return "converted"
        if self._run == 0:
            return "kept"
        if not self._is_symmetric:
            return "rounded"
        is_kept = self._has_small_halves or have_exact_halves(self._scales(), self._files.kind(self._of(SCALES)))
        return "kept" if is_kept else "rounded"

    def coded(self, files: SafetensorsSource) -> StoredCodes:
        """Return the codes, [out, in], which are read some outputs at a time.

        Raises:
            ConfigError: a value is not valid.
        """
        form = self.form
        return StoredCodes(*self.shape, form.group_size, form.has_minimum, self._read)

    def _read(self, begin: int, end: int) -> CodedPiece:
        """Return the codes of outputs [begin, end)."""
        grouped = self._grouped(begin, end)
        if self._run is None:
            return converted_piece(grouped, self._files, self._of(SCALES))
        return kept_piece(grouped, self._run, self._has_small_halves)

    def widen(self, files: SafetensorsSource, dtype: DType) -> Tensor:
        """Return the weight [out, in], computed in fp32 and rounded once.

        Raises:
            ConfigError: a value is not valid.
        """
        return selected_backend().host_tensor(widen_codes(self._grouped(0, self.shape[0]), dtype))

    @cached_property
    def _run(self) -> int | None:
        """Return the size of groups that an operator has: 0 for whole rows, None if none fits."""
        return 0 if self._num_groups == 1 else run_size(self._groups()) or None

    @cached_property
    def _has_small_halves(self) -> bool:
        return are_small_halves(self._files, self._of(SCALES))

    @cached_property
    def _is_symmetric(self) -> bool:
        """Return whether every zero is half of the number of codes.

        Files whose zeros are not stored less 1, although config.json names the first format, exist; with `sym`, zeros
        of half plus 1 can only be that.
        """
        check_scales(self._scales(), self._files, self._of(SCALES))
        layout, zeros = self._layout, self._zeros(0, self.shape[0])
        half = 1 << layout.num_bits - 1
        if bool((zeros == half).all()):
            return True
        if not layout.is_symmetric:
            return False
        if layout.zeros_minus_one and bool((zeros == half + 1).all()):
            return True
        output, group = np.argwhere(zeros != half)[0]
        found = f"has the zero {zeros[output, group]} for output {output} and group {group}"
        raise self._error(ZEROS, f"{found}, but config.json says that all are {half}")

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self._group_size)

    def _of(self, part: str) -> str:
        return f"{self._name}.{part}"

    def _error(self, part: str, problem: str) -> ConfigError:
        return bad_tensor(self._files, self._of(part), problem)

    def _check_names(self) -> None:
        """Raise ConfigError if tensors are missing, or there are some that do not belong together."""
        found = {name.rpartition(".")[2] for name in self.companions}
        required = {CODES, ZEROS, SCALES} | ({GROUP_OF_INPUT} if self._layout.is_reordered else set())
        if missing := sorted(required - found):
            first = next(part for part in PARTS if part in found)
            raise self._error(first, f"belongs to codes without {self._of(missing[0])}")
        if GROUP_OF_INPUT in found and self._layout.order != Order.ALONG_INPUTS:
            raise self._error(GROUP_OF_INPUT, f"has no meaning with {self._layout.method}")
        if self._of("weight") in self._files.shapes:
            raise self._error("weight", f"is there beside {self._of(CODES)}")
        for part in PARTS:
            if part in found and self._files.kind(self._of(part)) not in _KINDS[part]:
                expected = ", ".join(_KINDS[part])
                raise self._error(part, f"is stored as {self._files.kind(self._of(part))}, expected {expected}")

    def _find_shape(self) -> tuple[int, int]:
        stored, per_word = self._files.shapes[self._of(CODES)], WORD_BITS // self._layout.num_bits
        if len(stored) != 2 or 0 in stored:
            raise self._error(CODES, f"has the shape {list(stored)}, expected a matrix")
        rows, columns = stored
        return (columns, rows * per_word) if self._layout.order == Order.ALONG_INPUTS else (columns * per_word, rows)

    def _check_shapes(self) -> None:
        num_outputs, num_inputs = self.shape
        if not self._layout.has_short_group and num_inputs % self._group_size:
            raise self._error(CODES, f"has {num_inputs} inputs, expected whole groups of {self._group_size}")
        num_words = -(-num_outputs * self._layout.num_bits // WORD_BITS)
        for part, shape in (
            (ZEROS, (self._num_groups, num_words)),
            (SCALES, (self._num_groups, num_outputs)),
            (GROUP_OF_INPUT, (num_inputs,)),
        ):
            found = self._files.shapes.get(self._of(part), shape)
            if found != shape:
                groups = f"{self._num_groups} groups of {self._group_size} inputs"
                raise self._error(part, f"has the shape {list(found)}, expected {list(shape)} for {groups}")

    def _words(self, part: str) -> NDArray[np.int32]:
        return stored_array(self._files, self._of(part))

    def _zeros(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the zeros of outputs [begin, end), [outputs, groups].

        Writers of the first format subtract 1 from all zeros of a word at once, so that a zero of 0 borrows from the
        next one; adding 1 to all of them at once is the inverse.
        """
        words, layout = self._words(ZEROS), self._layout
        if layout.zeros_minus_one:
            words = (words.view(np.uint32) + np.uint32(_ONES[layout.num_bits])).view(np.int32)
        found = CodeWords(words, layout.num_bits, layout.zero_order)
        return unpack_words(found, begin=begin, end=end).view(np.uint8)

    def _scales(self, begin: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """Return the scales of outputs [begin, end), [outputs, groups]."""
        name = self._of(SCALES)
        values = stored_array(self._files, name)[:, begin:end]
        return np.ascontiguousarray(wide_floats(values, self._files.kind(name)).T)

    def _groups_in_order(self) -> NDArray[np.int32]:
        return np.arange(self.shape[1], dtype=np.int32) // np.int32(self._group_size)

    def _groups(self) -> NDArray[np.int32]:
        """Return the group of each input.

        Zeros for all inputs of several groups mean that nobody has filled the tensor, as long as config.json does not
        say that inputs were reordered.

        Raises:
            ConfigError: a group is out of range, or has more or fewer inputs than others.
        """
        in_order = self._groups_in_order()
        if self._of(GROUP_OF_INPUT) not in self.companions:
            return in_order
        groups = self._words(GROUP_OF_INPUT)
        if not self._layout.is_reordered and not groups.any():
            return in_order
        if groups.min() < 0 or groups.max() >= self._num_groups:
            raise self._error(GROUP_OF_INPUT, f"has groups out of range, expected 0..{self._num_groups - 1}")
        if not np.array_equal(np.sort(groups), in_order):
            raise self._error(
                GROUP_OF_INPUT, f"has groups of unequal sizes, expected {self._group_size} inputs in each"
            )
        return groups

    def _grouped(self, begin: int, end: int) -> GroupedCodes:
        """Return codes and numbers of outputs [begin, end); without zeros, codes are signed."""
        words = CodeWords(self._words(CODES), self._layout.num_bits, self._layout.order)
        codes = unpack_words(words, self._is_symmetric, begin, end)
        zeros = None if self._is_symmetric else self._zeros(begin, end).astype(np.float32)
        return GroupedCodes(codes, self._scales(begin, end), zeros, self._groups())


def modules_with_codes(files: SafetensorsSource) -> list[str]:
    """Return the names of the modules that have any of PARTS, in the order of the files."""
    places = (name.rpartition(".") for name in files.shapes)
    return list(dict.fromkeys(module for module, _, part in places if part in PARTS))


def check_is_quantized(module: str, plain_by: str | None, files: SafetensorsSource) -> None:
    """Raise ConfigError if config.json says that a module with codes is not quantized.

    Args:
        plain_by: the key that says so.
    """
    if plain_by is not None:
        name = next(f"{module}.{part}" for part in PARTS if f"{module}.{part}" in files.shapes)
        problem = f"has codes, but {plain_by} of config.json says that {module:.120} is not quantized"
        raise bad_tensor(files, name, problem)
