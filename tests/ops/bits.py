# SPDX-License-Identifier: Apache-2.0
"""Comparison of tensors bit for bit."""

from collections.abc import Callable, Sequence

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


def values_of(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values of raw bits as float64."""
    as_float32 = raw if dtype == "float32" else raw.view(np.uint16).astype(np.uint32) << 16
    return as_float32.view(np.float32).astype(np.float64)


def is_finite(raw: np.ndarray, dtype: str) -> bool:
    """Return whether all values of raw bits are finite."""
    return bool(np.isfinite(values_of(raw, dtype)).all())


def assert_row_counts_agree(run: Callable[[Sequence[int]], np.ndarray], kv_len: int, dtype: str) -> None:
    """Fail if the last rows of a sequence depend on how many of them one call computes.

    Args:
        run: returns the bits of all rows, computed in calls that end at these positions.
        kv_len: length of the sequence, at least 6.
        dtype: of the rows.
    """
    alone = run([kv_len - 5, *range(kv_len - 4, kv_len + 1)])
    assert is_finite(alone, dtype)
    for rows in (2, 3, 5):
        assert_same_bits(run([kv_len - rows, kv_len])[-rows:], alone[-rows:], f"{rows} rows at {kv_len}")
