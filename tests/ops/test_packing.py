# SPDX-License-Identifier: Apache-2.0
"""Packed weights do not depend on how the weight is stored."""

from hashlib import blake2b

import numpy as np
import paddle
import pytest

from fastdeploy.ops.backends.cpu.backend import BACKEND
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.experts import PackedExperts, pack_experts, pack_gate
from fastdeploy.ops.linear import PackedLinear, WeightPiece, pack_linear
from fastdeploy.ops.quantized_form import FORMS

FORMATS = [("float32", "none"), ("bfloat16", "none"), *(("bfloat16", kind) for kind in FORMS)]
SIZES = [(1, 1), (16, 64), (37, 33), (96, 70), (530, 35)]


def bits(packed: PackedLinear | PackedExperts) -> np.ndarray:
    """Return the packed elements; a view of another dtype would read the wrong part of a sliced Paddle tensor."""
    return (packed.data if packed.quantization != "none" else packed.data.astype("float32")).numpy()


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_transposed_weights_pack_like_weights_stored_as_rows(dtype: str, quantization: str, n: int, k: int) -> None:
    weight = random_rows(n, k, dtype, 1)
    columns = WeightPiece(weight.t().contiguous(), 0, n, is_transposed=True)
    expected = pack_linear(weight, None, quantization)
    assert np.array_equal(bits(pack_linear([columns], None, quantization)), bits(expected))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_pieces_of_several_matrices_pack_like_their_concatenation(
    dtype: str, quantization: str, is_transposed: bool
) -> None:
    first, second = random_rows(40, 35, dtype, 1), random_rows(23, 35, dtype, 2)
    ranges = [(first, 3, 20), (second, 0, 7), (first, 20, 40), (second, 22, 23), (first, 0, 0), (second, 7, 22)]
    pieces = [
        WeightPiece(matrix.t().contiguous() if is_transposed else matrix, begin, end, is_transposed)
        for matrix, begin, end in ranges
    ]
    whole = paddle.concat([matrix[begin:end] for matrix, begin, end in ranges if end > begin])
    expected = pack_linear(whole, None, quantization)
    packed = pack_linear(pieces, None, quantization)
    assert packed.out_features == 60 and packed.in_features == 35
    assert np.array_equal(bits(packed), bits(expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_unquantized_panels_interleave_units_of_four_bytes(dtype: str, n: int, k: int) -> None:
    weight = random_rows(n, k, dtype, 1)
    padded = np.zeros((-(-n // 16) * 16, -(-k // 2) * 2), np.float32)
    padded[:n, :k] = weight.astype("float32").numpy()
    unit = 2 if dtype == "bfloat16" else 1
    expected = padded.reshape(-1, 16, padded.shape[1] // unit, unit).transpose(0, 2, 1, 3)
    packed = pack_linear(weight).data.astype("float32").numpy()
    assert np.array_equal(packed, expected.reshape(-1))


def test_packed_files_fit_the_layout_that_the_backend_names() -> None:
    """Whoever changes how weights are packed changes CpuBackend.weight_layout and the digests."""
    digest = blake2b(digest_size=8)
    for dtype, quantization in FORMATS:
        digest.update(pack_gate(random_rows(9, 300, dtype, 5)).astype("float32").numpy().tobytes())
        for is_gated in (False, True):
            digest.update(bits(pack_linear(random_rows(600, 300, dtype, 6), None, quantization, is_gated)).tobytes())
            experts = [[WeightPiece(random_rows(60, 300, dtype, seed), 0, 60)] for seed in range(3)]
            digest.update(bits(pack_experts(experts, quantization, is_gated)).tobytes())
    assert (BACKEND.weight_layout, digest.hexdigest()) == ("panels16-2", "727b1372e370cc0a")
