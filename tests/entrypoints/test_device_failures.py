# SPDX-License-Identifier: Apache-2.0
"""A device that cannot be used, or fails, ends a server with one line and status 1."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fastdeploy.core.errors import DeviceError, DeviceFailedError
from fastdeploy.entrypoints.cli import main
from fastdeploy.entrypoints.llm import LLM
from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.mock_engine import save_mock_model

COMPLETION = {"model": "default", "prompt": "the", "max_tokens": 100, "seed": 1}


def test_a_device_that_cannot_be_used_is_one_line_and_status_1(tmp_path: Path) -> None:
    error = "cudaGetDeviceCount: no CUDA-capable device is detected"
    server = ServerProcess([str(save_mock_model(tmp_path, start_error=["DeviceError", error]))])
    server.wait_end()
    server.close()
    assert server.process.returncode == 1
    assert [line for line in server.stderr.splitlines() if not line.startswith("weights")] == [
        f"fastdeploy: error: device: {error}"
    ]


def test_a_device_that_fails_in_a_step_ends_the_engine_and_its_streams_with_a_typed_error(tmp_path: Path) -> None:
    with mock_server(
        tmp_path, step_error=["DeviceError", "launch: an illegal memory access was encountered"]
    ) as server:
        answer = httpx.post(server.url + "/v1/completions", json=COMPLETION, timeout=60)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the engine process ended with status 1"
        assert server.wait_end() == 1
    assert "the device failed: launch: an illegal memory access was encountered" in server.stderr


def test_a_device_that_fails_in_a_step_of_the_engine_is_no_failure_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM("demo", num_gpu_blocks_override=8, max_model_len=256)

    def fail(plan: object) -> None:
        raise DeviceError("the device is lost")

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    with pytest.raises(DeviceFailedError, match="device: the device is lost"):
        llm.generate("a", use_tqdm=False)


def test_a_command_that_runs_the_engine_itself_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> int:
        raise DeviceFailedError("device: driver too old")

    monkeypatch.setattr(main, "run_subcommand", fail)
    assert main.main(["bench"]) == 1
    assert capsys.readouterr().err == "fastdeploy: error: device: driver too old\n"
