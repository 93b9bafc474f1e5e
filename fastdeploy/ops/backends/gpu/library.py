# SPDX-License-Identifier: Apache-2.0
"""The library of GPU operators: a C interface that takes addresses, numbers and a stream.

Integers are int64, other numbers are double. Every function returns 0 or a code of custom_ops/gpu_ops/errors.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paddle import Tensor

from fastdeploy.core.errors import DeviceError
from fastdeploy.ops.registry import OperatorLibraryError
from fastdeploy.version import __version__

_INVALID_ARGUMENT = 1

Argument: TypeAlias = Tensor | int | float | None
Reference: TypeAlias = ctypes.Array | ctypes.Structure | ctypes.c_int64 | ctypes.c_void_p  # passed by reference


class Address(int):
    """An address in the memory of the host or the device."""


@dataclass(frozen=True)
class DeviceCounts:
    """Where the device finds the numbers of rows and of sequences of the launches that are being captured."""

    rows: Address
    seqs: Address


class DeviceProperties(ctypes.Structure):
    """FdDeviceProperties of custom_ops/gpu_ops/device_api.h."""

    name: bytes
    architecture: int
    num_multiprocessors: int
    driver_version: int
    total_bytes: int
    shared_bytes: int
    _fields_ = [
        ("name", ctypes.c_char * 256),
        ("architecture", ctypes.c_int32),
        ("num_multiprocessors", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
        ("total_bytes", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64),
    ]


class PaddleCounters(ctypes.Structure):
    """FdDeviceCounters of custom_ops/gpu_ops/device_api.h: what Paddle, not this library, has asked of the device.

    Attributes:
        allocations: of memory of the device, and of pinned memory; Paddle keeps what it frees and asks for less.
        copies: copies and fills; every operator of Paddle makes some, because it runs on the CPU.
        waits: for a stream, an event or the device.
    """

    allocations: int
    copies: int
    waits: int
    _fields_ = [("allocations", ctypes.c_int64), ("copies", ctypes.c_int64), ("waits", ctypes.c_int64)]

    def since(self, earlier: PaddleCounters) -> tuple[int, int, int]:
        """Return the allocations, copies and waits that were added since `earlier`."""
        return (
            self.allocations - earlier.allocations,
            self.copies - earlier.copies,
            self.waits - earlier.waits,
        )


class DeviceLibrary:
    """A loaded library.

    Attributes:
        device: number of the device among those that the process sees.
        stream: of all launches; None for the one that blocks, on which operators can be called with host memory if the
            device is emulated.
        counts: set while launches are captured, whose counts are not known yet.
    """

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            OperatorLibraryError: it cannot be loaded, or was built for another version of the package.
        """
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise OperatorLibraryError(f"operator library: cannot load {path}: {error}") from error
        for name in ("fd_last_error", "fd_library_version", "fd_library_hash"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self.path = path
        self.version = self._library.fd_library_version().decode()
        self.source_hash: str = self._library.fd_library_hash().decode()
        if self.version != __version__:
            raise OperatorLibraryError(
                f"operator library: {path.name}: expected version {__version__}, got {self.version}; rebuild it"
            )
        self.device = 0
        self.stream: Address | None = None
        self.counts: DeviceCounts | None = None

    def call(self, name: str, *arguments: Argument | Reference) -> None:
        """Call a C function.

        Args:
            arguments: tensors are passed as their address, objects of ctypes by reference.

        Raises:
            ValueError: an operator refuses an argument.
            DeviceError: the device failed.
        """
        code = getattr(self._library, name)(*map(_to_c, arguments))
        if code:
            message = self._library.fd_last_error().decode()
            raise (ValueError if code == _INVALID_ARGUMENT else DeviceError)(message)

    def launch(self, name: str, *arguments: Argument) -> None:
        """Call an operator, whose last parameter is the stream; raises as `call` does."""
        self.call(name, *arguments, self.stream)

    def make(self, name: str, *arguments: Argument) -> Address:
        """Call a function whose last parameter receives an address or a handle; raises as `call` does."""
        made = ctypes.c_void_p()
        self.call(name, *arguments, made)
        return Address(made.value or 0)

    def call_void(self, name: str, *arguments: Argument) -> None:
        """Call a function that returns nothing."""
        getattr(self._library, name)(*map(_to_c, arguments))

    def properties(self) -> DeviceProperties:
        """Return what is fixed for the device."""
        properties = DeviceProperties()
        self.call("fd_device_properties", self.device, properties)
        return properties

    def paddle_counters(self) -> PaddleCounters:
        """Return what Paddle has asked of the device so far; between a step's launches and its wait that is nothing."""
        counters = PaddleCounters()
        self.call("fd_device_counters", counters)
        return counters

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device."""
        free, total = ctypes.c_int64(), ctypes.c_int64()
        self.call("fd_device_memory", self.device, free, total)
        return free.value, total.value

    def row_count(self, num_rows: int) -> tuple[Address | None, int]:
        """Return a number of rows as operators take it: an address, or None, and a limit."""
        return (None if self.counts is None else self.counts.rows), num_rows

    def seq_count(self, num_seqs: int) -> tuple[Address | None, int]:
        """Return a number of sequences as operators take it: an address, or None, and a limit."""
        return (None if self.counts is None else self.counts.seqs), num_seqs

    @contextmanager
    def counted_by(self, counts: DeviceCounts) -> Iterator[None]:
        """Make launches read their counts from the device."""
        before, self.counts = self.counts, counts
        try:
            yield
        finally:
            self.counts = before


_active: list[DeviceLibrary] = []


def activate(library: DeviceLibrary) -> None:
    """Use this library from now on."""
    _active[:] = [library]


def active() -> DeviceLibrary:
    """Return the library in use; the backend of the GPU, or of the emulated one, has loaded it."""
    return _active[0]


def launch(name: str, *arguments: Argument) -> None:
    """Call an operator of the library in use, as `DeviceLibrary.launch` does."""
    _active[0].launch(name, *arguments)


def _to_c(argument: Argument | Reference) -> object:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None or isinstance(argument, Address):
        return ctypes.c_void_p(argument)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.byref(argument)
