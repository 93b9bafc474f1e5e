# SPDX-License-Identifier: Apache-2.0
"""Servers that tests of several modules share: one process per configuration and test worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.entrypoints.chat_server import chat_server
from tests.entrypoints.response_check import checked_client
from tests.entrypoints.server_process import ServerProcess, mock_server, real_server

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "adaptive": false}'


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A mock server whose engine emits two tokens per step."""
    folder = tmp_path_factory.mktemp("mock") / "tiny"
    folder.mkdir()
    with mock_server(folder, "--max-model-len", "200", "--seed", "5", tokens_per_step=2) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    """The official client."""
    return checked_client(server.url)


@pytest.fixture(scope="session")
def parsing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model of `parsing_server`."""
    return tmp_path_factory.mktemp("parsing") / "model"


@pytest.fixture(scope="session")
def parsing_server(parsing_model: Path) -> Iterator[ServerProcess]:
    """A mock server that generates the text between `[[` and `]]`, with parsers of reasoning and tool calls."""
    with chat_server(parsing_model, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3") as running:
        yield running


@pytest.fixture
def parsing_client(parsing_server: ServerProcess) -> openai.OpenAI:
    """The official client of `parsing_server`."""
    return checked_client(parsing_server.url)


@pytest.fixture(scope="session")
def drafting_server() -> Iterator[ServerProcess]:
    """The demonstration model with n-gram drafts of fixed length and a parser of tool calls."""
    limits = ("--max-model-len", "512", "--num-gpu-blocks-override", "40")
    with real_server("demo", *limits, "--tool-call-parser", "hermes", "--speculative-config", NGRAM) as running:
        yield running
