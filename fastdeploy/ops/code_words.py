# SPDX-License-Identifier: Apache-2.0
"""Unpacks codes that are stored in words of 32 bits with the inputs first, in native code and on all threads.

AWQ and GPTQ store a weight so: [in, out], eight codes of four bits or four of eight bits in a word. The result is
[out, in].
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastdeploy.ops.host import load_threaded_library

WORD_BITS = 32


class Order(IntEnum):
    """Where the codes of a word belong, as custom_ops/host/code_words.h has it; the first one is in the lowest bits."""

    ALONG_INPUTS = 0
    ALONG_OUTPUTS = 1
    AWQ = 2  # along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7


@dataclass(frozen=True)
class CodeWords:
    """Codes as a file stores them.

    Attributes:
        words: int32 with any distance between rows, [in / codes of a word, out] if the order is ALONG_INPUTS, else
            [in, out / codes of a word].
        num_bits: of a code: 4 or 8.
    """

    words: NDArray[np.int32]
    num_bits: Literal[4, 8]
    order: Order

    def __post_init__(self) -> None:
        """Check what native code relies on.

        Raises:
            ValueError: the words or their bits are not those above.
        """
        if self.num_bits not in (4, 8) or (self.order == Order.AWQ and self.num_bits != 4):
            raise ValueError(f"code_words: num_bits: expected 4 or 8, and 4 for AWQ, got {self.num_bits}")
        words = self.words
        if words.dtype != np.int32 or words.ndim != 2 or (words.shape[1] > 1 and words.strides[1] != words.itemsize):
            found = f"{words.dtype} {list(words.shape)} with strides {list(words.strides)}"
            raise ValueError(f"code_words: words: expected int32 [rows, columns] with contiguous rows, got {found}")

    @property
    def shape(self) -> tuple[int, int]:
        """Return [out, in]."""
        rows, columns = self.words.shape
        per_word = WORD_BITS // self.num_bits
        return (columns, rows * per_word) if self.order == Order.ALONG_INPUTS else (columns * per_word, rows)


class _CodeWords(ctypes.Structure):
    """Words in memory, custom_ops/host/code_words.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs", "row_words", "num_bits", "order")),
    ]


def unpack_words(
    words: CodeWords, is_signed: bool = False, begin: int = 0, end: int | None = None
) -> NDArray[np.int8] | NDArray[np.uint8]:
    """Return the codes [outputs, in] of outputs [begin, end), up to the last one if `end` is None.

    Args:
        is_signed: whether half of their number is subtracted from the codes: they become int8 then, else uint8.
    """
    per_word = 1 if words.order == Order.ALONG_INPUTS else WORD_BITS // words.num_bits
    end = words.shape[0] if end is None else end
    first, last = begin // per_word, -(-end // per_word)
    whole = replace(words, words=words.words[:, first:last])
    row_words = whole.words.strides[0] // whole.words.itemsize
    stored = _CodeWords(whole.words.ctypes.data, *whole.shape, row_words, words.num_bits, int(words.order))
    codes = np.empty(whole.shape, np.uint8)
    added = 256 - (1 << words.num_bits - 1) if is_signed else 0
    load_threaded_library().fd_words_unpack(ctypes.byref(stored), added, codes.ctypes.data)
    wanted = codes[begin - first * per_word : end - first * per_word]
    return wanted.view(np.int8) if is_signed else wanted
