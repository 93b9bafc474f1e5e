# SPDX-License-Identifier: Apache-2.0
"""The emulated device shows mistakes of a host: its memory is out of reach, poisoned, and streams run late."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from custom_ops.tools.emulated_library import build_emulated

HERE = Path(__file__).parent
SIZE = 100
SUM = np.arange(SIZE, dtype=np.float32) * 3


def build(name: str, has_paddle_device: bool = False) -> Path:
    return build_emulated(name, [HERE / "kernel.cc"], True, has_paddle_device)


class DeviceError(Exception):
    """What `fd_last_error` says."""


class Device:
    """The functions of device_api.h, which raise DeviceError."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.fd_last_error.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        given = [ctypes.c_void_p(a) if isinstance(a, int) and a > 2**31 else a for a in arguments]
        if getattr(self.library, name)(*given):
            raise DeviceError(self.library.fd_last_error().decode())

    def make(self, name: str, *arguments: object) -> int:
        """Call a function whose last argument receives a handle or an address."""
        handle = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(handle))
        assert handle.value is not None
        return handle.value

    def array(self) -> int:
        return self.make("fd_device_alloc", ctypes.c_size_t(4 * SIZE))

    def pinned(self, values: np.ndarray | None = None) -> tuple[int, np.ndarray]:
        """Return address and view of pinned memory for SIZE numbers."""
        address = self.make("fd_device_alloc_pinned", ctypes.c_size_t(4 * SIZE))
        view = np.ctypeslib.as_array((ctypes.c_float * SIZE).from_address(address))
        if values is not None:
            view[:] = values
        return address, view

    def copy(self, to: int, source: int, stream: int | None) -> None:
        self.call("fd_device_copy_async", to, source, ctypes.c_size_t(4 * SIZE), stream)

    def add(self, a: int, b: int, out: int, stream: int | None) -> None:
        self.call("fd_test_add", a, b, out, SIZE, stream)


@pytest.fixture(scope="module")
def device() -> Device:
    made = Device(build("test_runtime"))
    made.library.fd_emulation_configure(ctypes.c_uint64(0), 1)
    return made


@pytest.fixture
def stream(device: Device) -> int:
    return device.make("fd_device_stream_create")


class Sum:
    """Inputs in pinned memory, and what the steps of a sum need."""

    def __init__(self, device: Device) -> None:
        values = np.arange(SIZE, dtype=np.float32)
        self.device = device
        self.inputs = [device.pinned(values), device.pinned(values * 2)]
        self.output, self.result = device.pinned(np.full(SIZE, -1))
        self.arrays = [device.array() for _ in range(3)]

    def upload(self, stream: int) -> None:
        for (address, _), array in zip(self.inputs, self.arrays):
            self.device.copy(array, address, stream)

    def launch(self, stream: int) -> None:
        self.device.add(*self.arrays, stream)

    def download(self, stream: int) -> None:
        self.device.copy(self.output, self.arrays[2], stream)


def test_a_stream_does_nothing_before_somebody_waits(device: Device, stream: int) -> None:
    work = Sum(device)
    work.upload(stream)
    work.launch(stream)
    work.download(stream)
    assert (work.result == -1).all(), "without a wait, the host reads what was there before"
    device.call("fd_device_stream_sync", stream)
    np.testing.assert_array_equal(work.result, SUM)


def test_without_an_upload_a_kernel_reads_poison(device: Device, stream: int) -> None:
    work = Sum(device)
    work.launch(stream)
    work.download(stream)
    device.call("fd_device_stream_sync", stream)
    assert np.isnan(work.result).all()


def test_a_source_that_changes_before_its_copy_runs_is_a_fault(device: Device, stream: int) -> None:
    work = Sum(device)
    work.upload(stream)
    work.inputs[0][1][5] = 7
    with pytest.raises(DeviceError, match="its source was changed before the copy ran"):
        device.call("fd_device_stream_sync", stream)


def test_a_graph_runs_again_with_what_its_sources_hold_then(device: Device, stream: int) -> None:
    work = Sum(device)
    device.call("fd_device_graph_begin", stream)
    work.upload(stream)
    work.launch(stream)
    work.download(stream)
    graph = device.make("fd_device_graph_end", stream)
    device.call("fd_device_stream_sync", stream)
    assert (work.result == -1).all(), "what is recorded does not run"
    for factor in (1, 4):
        work.inputs[0][1][:] = np.arange(SIZE) * factor
        device.call("fd_device_graph_launch", graph, stream)
        device.call("fd_device_stream_sync", stream)
        np.testing.assert_array_equal(work.result, np.arange(SIZE) * (factor + 2))
    device.call("fd_device_graph_free", graph)


def test_a_stream_that_waits_for_an_event_runs_after_it(device: Device, stream: int) -> None:
    work, other = Sum(device), device.make("fd_device_stream_create")
    event = device.make("fd_device_event_create")
    work.upload(stream)
    device.call("fd_device_event_record", event, stream)
    device.call("fd_device_event_wait", event, other)
    work.launch(other)
    work.download(other)
    device.call("fd_device_stream_sync", other)
    np.testing.assert_array_equal(work.result, SUM)


def test_a_stream_that_does_not_wait_reads_poison(device: Device, stream: int) -> None:
    work, other = Sum(device), device.make("fd_device_stream_create")
    work.upload(stream)
    work.launch(other)
    work.download(other)
    device.call("fd_device_stream_sync", other)
    assert np.isnan(work.result).all()


def test_a_fault_of_a_kernel_is_told_at_the_wait(device: Device, stream: int) -> None:
    work = Sum(device)
    work.upload(stream)
    device.call("fd_test_add", work.arrays[0], work.arrays[1], work.arrays[0], SIZE, stream)  # in place is not allowed
    with pytest.raises(DeviceError, match=r"^add: block \(\d, 0, 0\), thread \d+, \S+kernel\.cc:\d+: writes an array"):
        device.call("fd_device_stream_sync", stream)


def test_memory_is_counted_and_runs_out(device: Device) -> None:
    free, total = ctypes.c_int64(), ctypes.c_int64()
    device.call("fd_device_memory", 0, ctypes.byref(free), ctypes.byref(total))
    before = free.value
    address = device.make("fd_device_alloc", ctypes.c_size_t(1000))
    device.call("fd_device_memory", 0, ctypes.byref(free), ctypes.byref(total))
    assert before - free.value == 1024
    device.call("fd_device_free", address)
    device.call("fd_device_memory", 0, ctypes.byref(free), ctypes.byref(total))
    assert free.value == before
    with pytest.raises(DeviceError, match="out of memory"):
        device.make("fd_device_alloc", ctypes.c_size_t(total.value + 1))


def test_the_host_cannot_touch_the_memory_of_the_device(device: Device) -> None:
    address = device.array()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(address, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


PADDLE = """
import ctypes, sys
import numpy as np
import paddle
paddle.set_device("fd_gpu:0")
tensor = paddle.to_tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
assert str(tensor.place) == "Place(fd_gpu:0)", tensor.place
assert np.isnan(paddle.empty([1000]).numpy()).all(), "what nobody has written is poison"
assert (paddle.matmul(tensor, tensor, transpose_y=True) + 1).numpy()[2, 2] == 367
library = ctypes.CDLL(sys.argv[1])
other = paddle.ones([3, 4])
out = paddle.zeros([3, 4])
for place in (tensor, other, out):
    place.numpy()  # Paddle's own stream has run
assert library.fd_test_add(*(ctypes.c_void_p(t.data_ptr()) for t in (tensor, other, out)), 12, None) == 0
print(out.numpy().ravel().tolist())
"""


def test_paddle_keeps_tensors_on_the_device(tmp_path: Path) -> None:
    plug_in = tmp_path / "libfd_gpu.so"
    plug_in.symlink_to(build("test_paddle_device", has_paddle_device=True).resolve())
    environment = {**os.environ, "CUSTOM_DEVICE_ROOT": str(tmp_path), "FLAGS_use_stride_kernel": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PADDLE, str(plug_in)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([float(number) for number in range(1, 13)])
