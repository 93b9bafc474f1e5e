# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}

_SCALE_BYTES = 4  # of an fp32 scale
_ITEM_BYTES = {"bfloat16": 2, "int8": 1}


def row_bytes(head_dim: int, dtype: str) -> tuple[int, int]:
    """Return the bytes of one head's key and value at one position."""
    size = head_dim * _ITEM_BYTES[dtype] + (_SCALE_BYTES if dtype == "int8" else 0)
    return size, size
