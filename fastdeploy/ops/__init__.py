# SPDX-License-Identifier: Apache-2.0
"""Operators: typed wrappers over native kernels with a Paddle reference for each."""

from fastdeploy.ops.registry import (
    OperatorLibraryError,
    OpEntry,
    is_exact,
    isa,
    library_hash,
    library_version,
    num_threads,
    register,
    select_backend,
)

__all__ = [
    "OpEntry",
    "OperatorLibraryError",
    "is_exact",
    "isa",
    "library_hash",
    "library_version",
    "num_threads",
    "register",
    "select_backend",
]
