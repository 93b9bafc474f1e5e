# SPDX-License-Identifier: Apache-2.0
"""A server that is started in a folder with another package of the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entrypoints.server_process import mock_server


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder whose `fastdeploy` cannot be imported, like a checkout without built libraries."""
    folder = tmp_path / "checkout"
    (folder / "fastdeploy").mkdir(parents=True)
    (folder / "fastdeploy" / "__init__.py").write_text("raise ImportError('the package of the current folder')\n")
    return folder


def test_engine_api_workers_and_templates_run_the_package_of_their_parent(tmp_path: Path, checkout: Path) -> None:
    template = "{{ messages[0]['content'] }}"  # a request's own template has a process of its own
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template": template, "max_tokens": 2}
    with mock_server(tmp_path, "--workers", "2", cwd=checkout) as server:
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 2
