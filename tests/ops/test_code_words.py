# SPDX-License-Identifier: Apache-2.0
"""Words of codes are unpacked and transposed as the formats define it."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.ops.code_words import CodeWords, Order, unpack_words
from tests.models.awq_gptq_files import AWQ_ORDER, IN_ORDER, packed
from tests.ops.isa_paths import run

LAYOUTS = [(order, bits) for order in Order for bits in (4, 8) if (order, bits) != (Order.AWQ, 8)]
SIZES = [(8, 8), (16, 32), (24, 520), (136, 576), (1032, 64)]  # [outputs, inputs]
DIGEST_OF_PROCESS = """
import hashlib
import numpy as np
from fastdeploy.ops.code_words import CodeWords, Order, unpack_words
digest = hashlib.sha256()
for order, bits in ((Order.ALONG_INPUTS, 4), (Order.ALONG_OUTPUTS, 8), (Order.AWQ, 4)):
    words = np.random.default_rng(bits).integers(-2**31, 2**31, (200, 130)).astype(np.int32)
    digest.update(unpack_words(CodeWords(words, bits, order)).tobytes())
print(digest.hexdigest())
"""


def words_of(codes: np.ndarray, bits: int, order: Order) -> CodeWords:
    """Pack codes [out, in]."""
    if order == Order.ALONG_INPUTS:
        words = packed(codes, bits).T
    else:
        words = packed(codes.T, bits, AWQ_ORDER if order == Order.AWQ else IN_ORDER)
    return CodeWords(np.ascontiguousarray(words), 4 if bits == 4 else 8, order)


@pytest.mark.parametrize(("order", "bits"), LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_codes_are_where_the_definition_has_them(size: tuple[int, int], order: Order, bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, size).astype(np.uint8)
    words = words_of(codes, bits, order)
    assert words.shape == size
    np.testing.assert_array_equal(unpack_words(words), codes)
    signed = unpack_words(words, is_signed=True)
    assert signed.dtype == np.int8
    np.testing.assert_array_equal(signed, codes.astype(int) - 2 ** (bits - 1))


@pytest.mark.parametrize(("order", "bits"), LAYOUTS)
def test_ranges_of_outputs_are_those_of_the_whole(order: Order, bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (144, 96)).astype(np.uint8)
    words = words_of(codes, bits, order)
    for begin, end in ((0, 16), (8, 144), (3, 13), (64, 64), (143, 144)):
        np.testing.assert_array_equal(unpack_words(words, begin=begin, end=end), codes[begin:end])
        np.testing.assert_array_equal(unpack_words(words, True, begin, end), codes[begin:end] - 2.0 ** (bits - 1))


@pytest.mark.parametrize(
    ("words", "bits", "order", "message"),
    [
        (np.zeros((8, 2), np.int32), 3, Order.ALONG_INPUTS, "num_bits: expected 4 or 8"),
        (np.zeros((8, 2), np.int32), 8, Order.AWQ, "num_bits: expected 4 or 8, and 4 for AWQ"),
        (np.zeros((8, 2), np.int64), 4, Order.AWQ, "words: expected int32"),
        (np.zeros((8, 4), np.int32)[:, ::2], 4, Order.AWQ, "words: expected int32"),
        (np.zeros(8, np.int32), 4, Order.AWQ, "words: expected int32"),
    ],
)
def test_words_that_native_code_cannot_read_are_refused(
    words: np.ndarray, bits: int, order: Order, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CodeWords(words, bits, order)  # type: ignore[arg-type]


def test_the_number_of_threads_changes_nothing() -> None:
    found = {run(["-c", DIGEST_OF_PROCESS], FD_NUM_THREADS=count).stdout for count in ("1", "3")}
    assert len(found) == 1 and len(found.pop()) == 65
