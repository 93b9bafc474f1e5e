# SPDX-License-Identifier: Apache-2.0
"""The registry: which implementation runs, and which library is refused."""

import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.version import __version__


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the CPU backend selected and the library's cache as it was."""
    registered = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(registered)
    registry.select_backend("cpu")


def test_the_library_names_its_version_and_sources() -> None:
    assert registry.library_version() == __version__
    assert re.fullmatch("[0-9a-f]{16}", registry.library_hash())
    assert registry.isa() in ("avx512_bf16", "avx512", "avx2", "portable")


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "__version__", "9.9.9")
    library = ctypes.CDLL(str(registry.library_path()))
    with pytest.raises(registry.OperatorLibraryError, match=f"expected version 9.9.9, got {__version__}; rebuild"):
        registry.check_version(library, registry.library_path())


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "library_path", lambda: tmp_path / "_cpu.so")
    with pytest.raises(registry.OperatorLibraryError, match=r"got none; build it with `pip install -e \.`"):
        registry.load_library.__wrapped__()


def test_an_accelerator_without_a_kernel_runs_the_reference_and_is_not_exact(caplog: pytest.LogCaptureFixture) -> None:
    entry = registry.register(registry.OpEntry("only_cpu", lambda: "reference", {"cpu": lambda: "native"}))
    registry.select_backend("cpu")
    assert (entry.run(), registry.is_exact()) == ("native", True)
    with caplog.at_level("WARNING", logger="fastdeploy.ops.registry"):
        registry.select_backend("xpu")
    assert (entry.run(), registry.is_exact()) == ("reference", False)
    assert sum("only_cpu" in record.getMessage() for record in caplog.records) == 1


def test_an_operator_without_a_cpu_kernel_is_an_error_on_the_cpu() -> None:
    with pytest.raises(registry.OperatorLibraryError, match="slow_one: expected a CPU kernel, got none"):
        registry.register(registry.OpEntry("slow_one", lambda: None, {}))
        registry.select_backend("cpu")


def test_a_name_is_registered_once() -> None:
    registry.register(registry.OpEntry("twice", print, {"cpu": print}))
    with pytest.raises(ValueError, match="got 'twice' twice"):
        registry.register(registry.OpEntry("twice", print, {"cpu": print}))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
def test_a_host_buffer_is_one_memory_seen_twice(dtype: str) -> None:
    buffer = HostBuffer((3, 4), dtype)
    assert not buffer.array.any()
    buffer.array[1, 2] = 5
    assert buffer.tensor[1, 2].item() == 5
    buffer.tensor[2, 3] = 6
    assert buffer.array[2, 3] == 6


def test_a_view_of_a_host_buffer_keeps_its_memory() -> None:
    view = HostBuffer(1000, "int32").array[10:20]
    view[:] = 7
    gc.collect()
    others = [HostBuffer(1000, "int32") for _ in range(50)]
    assert np.array_equal(view, np.full(10, 7)) and len(others) == 50
