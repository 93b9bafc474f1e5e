# SPDX-License-Identifier: Apache-2.0
"""Makes the GPU known to Paddle, which has to happen before Paddle is imported. Nothing here imports Paddle."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module
from pathlib import Path

from fastdeploy.config.env import read_env
from fastdeploy.config.machine import GPU_LIBRARY
from fastdeploy.core.errors import ConfigError, DeviceError

PADDLE_DEVICE = "fd_gpu"  # the device's name in Paddle, kDeviceType of custom_ops/gpu_ops/paddle_device.cc
_PACKAGE = Path(__file__).parents[3]
_FOLDER = "CUSTOM_DEVICE_ROOT"  # Paddle loads every library in it
_LOG_LEVEL = "GLOG_minloglevel"  # without it, Paddle reports how it loads the library
STRIDES = "FLAGS_use_stride_kernel"  # views with strides have no fallback to the CPU


def prepare(device: str) -> None:
    """Set what Paddle reads when it is imported.

    Raises:
        ConfigError: there is no library for GPUs or no such GPU, or Paddle has been imported without it.
        DeviceError: there is no GPU, or its driver is too old.
    """
    path = library_path()
    _check_device(path, int(device.partition(":")[2] or 0))
    folder = str(path.parent)
    if os.environ.get(_FOLDER) == folder:
        return
    if "paddle" in sys.modules:
        raise ConfigError(
            "device", f"{device} cannot be used any more, because paddle was imported before the LLM was created"
        )
    os.environ[_FOLDER] = folder
    os.environ[STRIDES] = "0"
    os.environ.setdefault(_LOG_LEVEL, "1")


def _check_device(path: Path, index: int) -> None:
    """Check that a GPU exists, before Paddle looks for it."""
    count = ctypes.c_int()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError("operator library", f"cannot load {path}: {error}") from error
    library.fd_last_error.restype = ctypes.c_char_p
    if library.fd_device_count(ctypes.byref(count)):
        raise DeviceError(library.fd_last_error().decode())
    if count.value == 0:
        raise DeviceError("there is no GPU that this process may use")
    if index >= count.value:
        last = f" to gpu:{count.value - 1}" if count.value > 1 else ""
        raise ConfigError("device", f"expected gpu:0{last}, got gpu:{index}")


def library_path() -> Path:
    """Return the library of the device: the one for GPUs, or with FD_GPU_EMULATED=1 the emulated one, built if needed.

    Raises:
        ConfigError: it does not exist.
    """
    env = read_env()
    if env.gpu_emulated:
        return build_emulated(env.emulation_checks)
    path = GPU_LIBRARY
    if not path.exists():
        raise ConfigError(
            "device", "gpu needs operators that were compiled with nvcc: FD_BUILD_GPU=native pip install -e ."
        )
    return path


def build_emulated(has_checks: bool) -> Path:
    """Compile the kernels for the emulator, if they have changed, and return the library.

    Raises:
        ConfigError: there are no sources.
    """
    checkout = _PACKAGE.parent
    if not (checkout / "custom_ops").exists():
        raise ConfigError("FD_GPU_EMULATED", "needs a checkout, whose kernels are compiled for the emulator")
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    path: Path = import_module("custom_ops.tools.emulated_library").build_emulated_gpu(has_checks)
    return path
