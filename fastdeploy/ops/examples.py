# SPDX-License-Identifier: Apache-2.0
"""Seeded random inputs for the examples in the registry."""

import numpy as np
import paddle


def random_rows(rows: int, size: int, dtype: str, seed: int, scale: float = 1.0) -> paddle.Tensor:
    """Return [rows, size] normal values times `scale`, rounded to `dtype`."""
    values = np.random.default_rng(seed).standard_normal((rows, size), dtype=np.float32) * np.float32(scale)
    return paddle.to_tensor(values).astype(dtype)
