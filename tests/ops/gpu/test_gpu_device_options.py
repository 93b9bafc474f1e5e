# SPDX-License-Identifier: Apache-2.0
"""Which GPU is used, which graphs are captured, and which models a GPU takes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.machine import GPU_LIBRARY
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError, DeviceError
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.backend import DeviceOptions
from fastdeploy.ops.backends.gpu import backend as gpu_backend
from fastdeploy.ops.backends.gpu import plugin
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from fastdeploy.ops.backends.gpu.graph import BucketedGraphs
from fastdeploy.ops.backends.gpu_emulated.backend import EmulatedGpuBackend
from fastdeploy.ops.startup import prepare

LIBRARY = """
extern "C" const char* fd_last_error() {{ return "cudaGetDeviceCount: no CUDA-capable device is detected"; }}
extern "C" int fd_device_count(int* count) {{ *count = {count}; return {code}; }}
"""


def make_library(folder: Path, count: int, code: int = 0) -> Path:
    """Compile a library that finds so many GPUs."""
    source, library = folder / "a.cc", folder / "libfd_gpu.so"
    source.write_text(LIBRARY.format(count=count, code=code))
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=240)
    return library


def prepare_with(monkeypatch: pytest.MonkeyPatch, library: Path, device: str) -> None:
    """Prepare a process that has not imported Paddle."""
    monkeypatch.setenv("FD_GPU_EMULATED", "0")
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(library.parent))
    monkeypatch.setattr(plugin, "GPU_LIBRARY", library)
    prepare(device)


def test_the_chosen_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = make_library(tmp_path, count=2)
    prepare_with(monkeypatch, library, "gpu:1")
    with pytest.raises(ConfigError, match="device: expected gpu:0 to gpu:1, got gpu:2"):
        prepare_with(monkeypatch, library, "gpu:2")


@pytest.mark.parametrize(
    ("code", "message"),
    [(0, "there is no GPU that this process may use"), (2, "cudaGetDeviceCount: no CUDA-capable device is detected")],
)
def test_without_a_gpu_the_library_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        prepare_with(monkeypatch, make_library(tmp_path, 0, code), "gpu")


def test_without_a_library_the_error_says_how_to_build_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compiled with nvcc: FD_BUILD_GPU=native pip install"):
        prepare_with(monkeypatch, tmp_path / GPU_LIBRARY.name, "gpu")
    (tmp_path / GPU_LIBRARY.name).write_text("no library")
    with pytest.raises(ConfigError, match="operator library: cannot load"):
        prepare_with(monkeypatch, tmp_path / GPU_LIBRARY.name, "gpu")


def test_the_backend_uses_the_gpu_of_its_options() -> None:
    backend = EmulatedGpuBackend()
    backend.configure(DeviceOptions(index=1))
    backend.load()
    assert backend.library is not None and backend.library.device == 1
    with pytest.raises(DeviceError, match="expected device 0"):
        backend.activate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "dtype: float32 is not available on a GPU; take bfloat16"),
        ({"head_dim": 96}, "head_dim: expected 64, 128, 256 on a GPU, got 96"),
        ({"hidden_size": 260}, "hidden_size: expected a multiple of 8 on a GPU, got 260"),
        ({"intermediate_size": 764}, "intermediate_size: expected a multiple of 8 on a GPU, got 764"),
        ({"vocab_size": 262145}, "vocab_size: expected at most 262144 on a GPU, got 262145"),
    ],
)
def test_a_model_that_the_kernels_do_not_take_is_refused_before_it_is_loaded(
    changes: dict[str, Any], message: str
) -> None:
    backend, config = GpuBackend(), ModelConfig.from_pretrained(resolve_model_path("demo"))
    backend.check_model(config)
    with pytest.raises(ConfigError) as caught:
        backend.check_model(replace(config, **changes))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("configured", "buckets"), [((), []), ((2, 4), [2, 4]), ((2, 16), [2, 8]), (None, [1, 2, 4, 8])]
)
def test_graphs_are_captured_for_the_configured_rows(
    monkeypatch: pytest.MonkeyPatch, configured: tuple[int, ...] | None, buckets: list[int]
) -> None:
    monkeypatch.setattr(gpu_backend, "is_exact", lambda: True)
    backend = EmulatedGpuBackend()
    backend.configure(DeviceOptions(captured_rows=configured))
    backend.load()
    graphs = backend.capture(lambda num_rows, num_seqs: None, max_rows=8, max_seqs=8)
    assert isinstance(graphs, BucketedGraphs)
    assert graphs._buckets == buckets
