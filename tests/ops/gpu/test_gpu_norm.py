# SPDX-License-Identifier: Apache-2.0
"""RMSNorm on an emulated GPU: close to float64, and a row has the same bits in every call, order and block size."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.ops.examples import random_rows
from tests.ops.bits import assert_same_bits, bits
from tests.ops.gpu.emulated import SEEDS, counts_on_device, emulate

EPS = 1e-6
SIZES = (8, 64, 248, 256, 264, 512, 1032, 2048, 2056, 4104)  # at and beside the chunks of a warp and of a block


def run(
    x: paddle.Tensor, weight: paddle.Tensor, num_rows: int, seed: int = 0, has_checks: bool = True
) -> paddle.Tensor:
    out = paddle.full(x.shape, float("nan"), "bfloat16")
    emulate(seed, has_checks)("rms_norm")(x, weight, out, num_rows, EPS)
    return out


def exact(x: paddle.Tensor, weight: paddle.Tensor) -> np.ndarray:
    wide = x.astype("float64").numpy()
    return wide / np.sqrt((wide * wide).mean(1, keepdims=True) + EPS) * weight.astype("float64").numpy()


@pytest.mark.parametrize("size", SIZES)
def test_gpu_norm_is_close_to_float64_with_the_bits_of_single_rows(size: int) -> None:
    rows = 5
    x, weight = random_rows(rows, size, "bfloat16", 1, 3.0), random_rows(1, size, "bfloat16", 2).reshape([size])
    out = run(x, weight, rows)
    want = exact(x, weight)
    assert (np.abs(out.astype("float64").numpy() - want) <= 8e-3 * (1 + np.abs(want))).all()
    for seed in SEEDS:
        assert_same_bits(bits(run(x, weight, rows, seed)), bits(out), f"seed {seed}")
    alone = [bits(run(x[row : row + 1], weight, 1)) for row in range(rows)]
    assert_same_bits(np.concatenate(alone), bits(out), "rows alone")


def test_gpu_norm_writes_only_its_rows_and_may_write_its_input() -> None:
    x, weight = random_rows(20, 72, "bfloat16", 3), random_rows(1, 72, "bfloat16", 4).reshape([72])
    x[7:] = float("nan")
    out = run(x, weight, 7)
    assert np.isfinite(out.astype("float32").numpy()[:7]).all()
    assert np.isnan(out.astype("float32").numpy()[7:]).all()
    emulate(1)("rms_norm")(x, weight, x, 7, EPS)
    assert_same_bits(bits(x)[:7], bits(out)[:7], "in place")


def test_gpu_norm_reads_the_number_of_rows_from_the_device() -> None:
    x, weight = random_rows(5, 72, "bfloat16", 3), random_rows(1, 72, "bfloat16", 4).reshape([72])
    with counts_on_device(3, 1):
        out = run(x, weight, 5)
    assert np.isnan(out.astype("float32").numpy()).all(1).tolist() == [False] * 3 + [True] * 2


def test_gpu_norm_of_504_rows() -> None:
    x, weight = random_rows(504, 2048, "bfloat16", 5), random_rows(1, 2048, "bfloat16", 6).reshape([2048])
    out = run(x, weight, 504, has_checks=False)
    want = exact(x, weight)
    assert (np.abs(out.astype("float64").numpy() - want) <= 8e-3 * (1 + np.abs(want))).all()
    assert_same_bits(bits(run(x[500:501], weight, 1)), bits(out)[500:501], "row 500")


@pytest.mark.parametrize(("dtype", "size", "message"), [("float32", 64, "bfloat16"), ("bfloat16", 12, "multiple of 8")])
def test_gpu_norm_refuses(dtype: str, size: int, message: str) -> None:
    x, weight = random_rows(2, size, dtype, 1), random_rows(1, size, dtype, 2).reshape([size])
    with pytest.raises(ValueError, match=f"rms_norm: .*expected .*{message}"):
        emulate()("rms_norm")(x, weight, x, 2, EPS)


def test_gpu_norm_refuses_rows_that_are_not_there() -> None:
    x, weight = random_rows(2, 64, "bfloat16", 1), random_rows(1, 64, "bfloat16", 2).reshape([64])
    with pytest.raises(ValueError, match=r"rms_norm: x: expected \[3 or more, 64\], got \[2, 64\]"):
        emulate()("rms_norm")(x, weight, x, 3, EPS)
