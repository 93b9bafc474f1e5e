# SPDX-License-Identifier: Apache-2.0
"""A request with many long stop strings does not keep the API process from answering others."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.entrypoints.test_lifecycle import StreamInThread

TEXT = "x" + 900 * " the"
N = 16


def body(length: int) -> dict[str, Any]:
    """Return the fields of a request for `N` outputs of `TEXT`, with 15 stop strings of `length` characters.

    One stop string is matched, and text held back, up to its last character. The others begin with the same character
    and match no further, so that a search of the held text for each of their prefixes takes longest.
    """
    held = (" the" * length)[: length - 1] + "!"
    stops = [*(" " + "x" * (length - 2) + last for last in string.ascii_lowercase[:14]), held]
    return {"prompt": f"[[{TEXT}]]", "max_tokens": len(TEXT), "n": N, "stop": stops}


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose outputs are given by the prompts, one token a step."""
    with mock_server(tmp_path, "--max-model-len", "2048", script=True, step_s=0.002) as running:
        yield running


def test_health_and_sigterm_are_answered_while_15_long_stop_strings_are_matched(scripted: ServerProcess) -> None:
    stream = StreamInThread(scripted, **body(length=1024))
    health = scripted.get("/health")
    assert (health.status_code, stream.has_ended) == (200, False)
    scripted.terminate()
    choices = [choice for event in stream.events() for choice in event["choices"]]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == i) for i in range(N)]
    assert texts == [TEXT] * N
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"] * N
    assert scripted.wait_end() == 0


def test_15_stop_strings_of_100000_characters_are_refused_by_name_and_range(scripted: ServerProcess) -> None:
    response = scripted.post("/v1/completions", {"model": "default", **body(length=100_000)})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "stop")
    assert error["message"] == "stop: expected strings of 1 to 1024 characters, got 100000"
    assert scripted.get("/health").status_code == 200
