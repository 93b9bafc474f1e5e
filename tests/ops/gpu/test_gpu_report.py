# SPDX-License-Identifier: Apache-2.0
"""What is said of the GPU's operators: the report of the emulated device, the fingerprint, and of a library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from custom_ops.tools.gpu_library import gpu_source_hash
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.engine import description
from fastdeploy.entrypoints.cli import collect_env
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.backends.gpu import plugin
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from fastdeploy.ops.backends.gpu_emulated.backend import EmulatedGpuBackend
from fastdeploy.version import __version__

LIBRARY = f"{__version__}+{gpu_source_hash()}"


def test_the_report_names_the_device_its_library_and_the_operators_with_a_kernel() -> None:
    command = [sys.executable, "-m", "fastdeploy.ops.report", "gpu"]
    environment = {**os.environ, "FD_GPU_EMULATED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=240)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["backend"], report["device_name"], report["isa"]) == ("gpu", "emulated GPU", "emulated")
    assert report["operator_library"] == LIBRARY
    assert set(report["native_operators"]) == GpuBackend.kernels.keys()
    assert not set(report["reference_operators"]) & GpuBackend.kernels.keys()
    latent = ["allocate_latent_cache", "append_latent_attention", "pack_heads", "project_heads"]
    experts = ["experts_down", "experts_up", "pack_experts", "pack_gate", "route"]
    assert report["missing_operators"] == sorted([*latent, *experts])
    assert "CUSTOM_DEVICE_ROOT" not in done.stderr, "Paddle does not say how it loads the library"


def test_the_fingerprint_has_all_but_the_name_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = EmulatedGpuBackend()
    backend.load()
    monkeypatch.setattr(description, "selected_backend", lambda: backend)
    monkeypatch.setattr(description, "reference_names", lambda: ["sample"])
    model_config = ModelConfig.from_pretrained(resolve_model_path("demo"))
    fingerprint = description.make_fingerprint(EngineConfig(model="demo", device="gpu:1"), model_config, "", "")
    assert fingerprint["backend"] == "gpu"
    assert (fingerprint["isa"], fingerprint["operator_library"]) == ("emulated", LIBRARY)
    assert fingerprint["reference_operators"] == ["sample"]
    assert backend.device_name() not in str(fingerprint)


def test_collect_env_loads_the_library_and_says_what_it_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(collect_env, "GPU_LIBRARY", plugin.build_emulated(False))
    assert collect_env._gpu_library() == f"{LIBRARY} (number of GPUs: 1)"
    monkeypatch.setattr(collect_env, "GPU_LIBRARY", tmp_path / "none.so")
    assert collect_env._gpu_library() == "none (FD_BUILD_GPU builds it)"
