# SPDX-License-Identifier: Apache-2.0
"""Checks of shapes and dtypes that operators have in common; each raises a ValueError that names the argument."""

from __future__ import annotations

from paddle import Tensor


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as "bfloat16"."""
    return str(tensor.dtype).removeprefix("paddle.")


def require_dtype(operator: str, dtype: str, **tensors: Tensor) -> None:
    """Check that the tensors, named as arguments of the operator, have a dtype."""
    for name, tensor in tensors.items():
        if (got := dtype_of(tensor)) != dtype:
            raise ValueError(f"{operator}: {name}: expected {dtype}, got {got}")


def require_rows(operator: str, num_rows: int, size: int, **tensors: Tensor) -> None:
    """Check that the tensors hold at least num_rows rows of `size` elements."""
    for name, tensor in tensors.items():
        shape = tensor.shape
        if len(shape) != 2 or shape[0] < num_rows or shape[1] != size:
            raise ValueError(f"{operator}: {name}: expected [{num_rows} or more, {size}], got {list(shape)}")


def require_length(operator: str, length: int, **tensors: Tensor) -> None:
    """Check that the tensors are vectors of at least `length` elements."""
    for name, tensor in tensors.items():
        shape = tensor.shape
        if len(shape) != 1 or shape[0] < length:
            raise ValueError(f"{operator}: {name}: expected [{length} or more], got {list(shape)}")
