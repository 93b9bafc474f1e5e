# SPDX-License-Identifier: Apache-2.0
"""The native operator library: where it is, whether it fits this package, and which instruction-set path it runs."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import paddle

from fastdeploy.ops.missing_library import missing_library
from fastdeploy.ops.registry import OperatorLibraryError
from fastdeploy.version import __version__

# Calls an operator of the library: run_native("fd_linear", *tensors, *attributes).
run_native: Callable[..., Any] = paddle._C_ops._run_custom_op


def library_path() -> Path:
    """Return where the build puts the operator library of this Python."""
    return Path(__file__).parents[2] / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """Load the library and register its operators with Paddle; later calls return the same handle.

    Raises:
        OperatorLibraryError: the file is missing, has another version, or FD_CPU_ISA or FD_NUM_THREADS is invalid.
    """
    path = library_path()
    if not path.exists():
        raise OperatorLibraryError(f"operator library: {missing_library(path)}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OperatorLibraryError(f"operator library: cannot load {path}: {error}; rebuild it") from error
    check_version(library, path)
    library.fd_configuration_error.restype = ctypes.c_char_p
    library.fd_isa_name.restype = ctypes.c_char_p
    if (reason := library.fd_configuration_error()) is not None:
        raise OperatorLibraryError(reason.decode())
    paddle.base.core.load_op_meta_info_and_register_op(str(path))
    return library


def check_version(library: ctypes.CDLL, path: Path) -> str:
    """Return the library's source hash.

    Raises:
        OperatorLibraryError: the library was built for another version of the package.
    """
    library.fd_library_version.restype = ctypes.c_char_p
    library.fd_library_hash.restype = ctypes.c_char_p
    version = library.fd_library_version().decode()
    if version != __version__:
        raise OperatorLibraryError(
            f"operator library: {path.name}: expected version {__version__}, got {version}; rebuild it with "
            "`pip install -e .` or reinstall the package"
        )
    return str(library.fd_library_hash().decode())


def isa() -> str:
    """Return the instruction-set path of this process: "avx512_bf16", "avx512", "avx2" or "portable"."""
    return str(load_library().fd_isa_name().decode())


def num_threads() -> int:
    """Return the number of threads that execute operators, including the caller's."""
    return int(load_library().fd_num_threads())


def library_version() -> str:
    """Return the package version that the loaded library was built for."""
    return str(load_library().fd_library_version().decode())


def paddle_version() -> str:
    """Return the version of Paddle that the loaded library was built with."""
    library = load_library()
    library.fd_paddle_version.restype = ctypes.c_char_p
    return str(library.fd_paddle_version().decode())


def library_hash() -> str:
    """Return 16 hexadecimal digits over the sources that the loaded library was built from."""
    return check_version(load_library(), library_path())
