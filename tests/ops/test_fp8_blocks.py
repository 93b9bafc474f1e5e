# SPDX-License-Identifier: Apache-2.0
"""FP8 codes times the scales of their blocks are torch's values, bit for bit; tests/golden/fp8 has their digests."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastdeploy.ops.fp8_blocks import num_blocks, widen_blocks
from tests.models.model_driver import GOLDEN

BLOCK = (128, 128)
WIDE = {"float32": np.float32, "bfloat16": np.uint16}


def expected() -> dict[str, NDArray[Any]]:
    with np.load(GOLDEN / "fp8" / "codes.npz") as values:
        return dict(values)


def digest(values: NDArray[Any]) -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()


def widen(codes: NDArray[np.uint8], scales: NDArray[np.float32], block: tuple[int, int], dtype: str) -> NDArray[Any]:
    out = np.empty(codes.shape, WIDE[dtype])
    assert widen_blocks(codes, scales, block, out)
    return out


def random_matrix() -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Return what make_golden_fp8.py draws: codes, scales of blocks, and scales of outputs."""
    random = np.random.default_rng(3)
    matrix, scales = random.choice(expected()["codes"], (200, 300)), random.random((2, 3), np.float32)
    return matrix, scales, random.random((200, 1), np.float32)


@pytest.mark.parametrize("dtype", WIDE)
def test_every_code_with_subnormal_and_huge_scales_is_torchs_product(dtype: str) -> None:
    values = expected()
    codes = np.tile(values["codes"], (len(values["scales"]), 1))
    found = widen(codes, values["scales"][:, None], (1, codes.shape[1]), dtype)
    assert codes.shape[1] == 254 and digest(found) == values[dtype]


def test_blocks_at_the_ends_may_be_smaller_and_outputs_may_have_scales_of_their_own() -> None:
    matrix, scales, channel = random_matrix()
    assert digest(widen(matrix, scales, BLOCK, "bfloat16")) == expected()["ragged"]
    assert digest(widen(matrix, channel, (1, 300), "bfloat16")) == expected()["channel"]


def test_large_matrices_which_several_threads_widen_have_the_values_of_their_parts() -> None:
    random = np.random.default_rng(4)
    codes, scales = random.integers(0, 0x7F, (700, 400), np.uint8), random.random((6, 4), np.float32)
    whole = widen(codes, scales, BLOCK, "float32")
    for row in (0, 127, 128, 384, 699):
        part = widen(codes[row : row + 1], scales[row // 128 : row // 128 + 1], BLOCK, "float32")
        np.testing.assert_array_equal(whole[row : row + 1], part)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize(
    ("scale", "is_finite"), [(7.56e35, True), (7.58e35, True), (7.581e35, False), (7.59e35, False), (7.6e35, False)]
)
def test_products_that_bfloat16_does_not_hold_are_told(dtype: str, scale: float, is_finite: bool) -> None:
    codes = np.full((130, 130), 0x38, np.uint8)  # 1.0
    codes[129, 129] = 0xFE  # -448; the largest number of bfloat16 is 3.39e38
    scales = np.ones((2, 2), np.float32)
    scales[1, 1] = scale
    assert widen_blocks(codes, scales, BLOCK, np.empty(codes.shape, WIDE[dtype])) == is_finite


def test_arrays_that_do_not_fit_are_refused_by_name() -> None:
    codes, scales, out = np.zeros((130, 8), np.uint8), np.ones((2, 1), np.float32), np.empty((130, 8), np.uint16)
    assert num_blocks((130, 8), BLOCK) == (2, 1)
    assert widen_blocks(codes, scales, BLOCK, out)
    wrong: Any = {"codes": codes.astype(np.int8), "scales": scales[:1], "out": out.T, "out ": out.view(np.int16)}
    for name, array in wrong.items():
        arguments = {"codes": codes, "scales": scales, "out": out, name.strip(): array}
        with pytest.raises(ValueError, match=f"widen_blocks: {name.strip()}: expected contiguous"):
            widen_blocks(arguments["codes"], arguments["scales"], BLOCK, arguments["out"])
