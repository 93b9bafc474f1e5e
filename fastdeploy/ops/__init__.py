# SPDX-License-Identifier: Apache-2.0
"""Operators: typed wrappers over native kernels with a Paddle reference for each.

The registry is imported when one of its names is first used, so that `fastdeploy.ops.host` runs without Paddle.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastdeploy.ops.registry import (
        OpEntry,
        OperatorLibraryError,
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("fastdeploy.ops.registry"), name)
