# SPDX-License-Identifier: Apache-2.0
"""`--shutdown-timeout`, vLLM's name for the time of a drain, of which 0 is none at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entrypoints.server_process import mock_server
from tests.entrypoints.test_lifecycle import StreamInThread


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]])
def test_shutdown_timeout_0_ends_running_requests_at_once(tmp_path: Path, flags: list[str]) -> None:
    with mock_server(tmp_path, "--shutdown-timeout", "0", *flags, step_s=0.05, hold=True) as server:
        (tmp_path / "hold").touch()
        stream = StreamInThread(server, max_tokens=2000)
        server.terminate()
        error = stream.events()[-1]["error"]
        assert error["message"] == "the server shut down before the request was finished (--shutdown-timeout 0)"
        assert error["code"] == "shutting_down"
        assert server.wait_end() == 0
        assert server.stdout.splitlines()[-1] == "Shutting down: ending 1 request"
