# SPDX-License-Identifier: Apache-2.0
"""The registry: which implementation runs, and which library is refused."""

import ctypes
import gc
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paddle
import pytest

import fastdeploy.ops
from fastdeploy.ops import registry
from fastdeploy.ops.backends.cpu import library
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.version import __version__
from tests.models.reference_backend import reference_backend


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the CPU backend selected and the registry as it was."""
    registered = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(registered)
    registry.select_backend("cpu")


def test_the_library_reports_its_version_and_sources() -> None:
    assert library.library_version() == __version__
    assert re.fullmatch("[0-9a-f]{16}", library.library_hash())
    assert library.isa() in ("avx512_bf16", "avx512", "avx2", "portable")


def test_another_version_of_paddle_than_the_one_the_library_was_built_with_is_one_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, built = registry.find_backend("cpu"), paddle.__version__
    assert (library.paddle_version(), backend.notes()) == (built, [])
    monkeypatch.setattr(paddle, "__version__", "3.9.0")
    assert backend.notes() == [
        f"Paddle 3.9.0 is imported, but the operators were built with Paddle {built}: install paddlepaddle=={built}, "
        "or build them again"
    ]


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__version__", "9.9.9")
    loaded = ctypes.CDLL(str(library.library_path()))
    with pytest.raises(registry.OperatorLibraryError, match=f"expected version 9.9.9, got {__version__}; rebuild"):
        library.check_version(loaded, library.library_path())


def test_the_error_for_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "_cpu.so")
    with pytest.raises(registry.OperatorLibraryError, match=r"got none; .*build it with `pip install -e \.`"):
        library.load_library.__wrapped__()


def test_an_operator_without_a_kernel_runs_its_reference_and_is_not_exact(caplog: pytest.LogCaptureFixture) -> None:
    registry.select_backend("cpu")
    with caplog.at_level("WARNING", logger="fastdeploy.ops.registry"):
        entry = registry.register(registry.OpEntry("no_kernel", lambda: "reference"))
    assert (entry.run(), registry.is_exact()) == ("reference", False)
    assert sum("no_kernel" in record.getMessage() for record in caplog.records) == 1


def test_the_cpu_has_a_kernel_for_every_operator_and_no_other() -> None:
    for module in pkgutil.iter_modules(fastdeploy.ops.__path__, "fastdeploy.ops."):
        if not module.name.rpartition(".")[2].startswith("_"):  # not the native libraries
            importlib.import_module(module.name)  # which registers its operators
    assert registry.find_backend("cpu").kernels.keys() == registry.entries().keys()
    assert registry.is_exact()
    with reference_backend():
        assert not registry.is_exact()


def test_a_device_without_a_backend_is_refused() -> None:
    with pytest.raises(registry.OperatorLibraryError, match="no backend for 'abacus'"):
        registry.select_backend("abacus")


def test_a_name_is_registered_once() -> None:
    registry.register(registry.OpEntry("twice", print))
    with pytest.raises(ValueError, match="got 'twice' twice"):
        registry.register(registry.OpEntry("twice", print))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
def test_tensor_and_array_of_a_host_buffer_share_memory(dtype: str) -> None:
    buffer = HostBuffer((3, 4), dtype)
    assert not buffer.array.any()
    buffer.array[1, 2] = 5
    assert buffer.tensor[1, 2].item() == 5
    buffer.tensor[2, 3] = 6
    assert buffer.array[2, 3] == 6


def test_a_view_of_a_host_buffer_keeps_its_memory_alive() -> None:
    view = HostBuffer(1000, "int32").array[10:20]
    view[:] = 7
    gc.collect()
    others = [HostBuffer(1000, "int32") for _ in range(50)]
    assert np.array_equal(view, np.full(10, 7)) and len(others) == 50
