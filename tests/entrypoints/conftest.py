# SPDX-License-Identifier: Apache-2.0
"""One mock server for all tests of the protocol."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.entrypoints.response_check import checked_client
from tests.entrypoints.server_process import ServerProcess, mock_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose engine emits two tokens a step."""
    folder = tmp_path_factory.mktemp("mock") / "tiny"
    folder.mkdir()
    with mock_server(folder, "--max-model-len", "200", "--seed", "5", tokens_per_step=2) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    """The official client."""
    return checked_client(server.url)
