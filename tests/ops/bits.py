# SPDX-License-Identifier: Apache-2.0
"""Comparison of tensors bit for bit."""

import numpy as np
import paddle


def bits(tensor: paddle.Tensor) -> np.ndarray:
    """Return the tensor's raw bits as integers: int16 for bfloat16, int32 for float32 and int32."""
    name = str(tensor.dtype).removeprefix("paddle.")
    return tensor.view({"bfloat16": "int16", "float32": "int32", "int32": "int32"}[name]).numpy()


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Fail with the first differing row when two integer arrays differ."""
    different = np.flatnonzero((got != want).any(axis=-1)) if got.ndim > 1 else np.flatnonzero(got != want)
    assert different.size == 0, f"{what}: {different.size} rows differ, first {different[:1]}"
