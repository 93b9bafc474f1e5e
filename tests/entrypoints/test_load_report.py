# SPDX-License-Identifier: Apache-2.0
"""Answers have the load in the header `endpoint-load-metrics` if the request asks for it (ORCA)."""

from __future__ import annotations

import json

import pytest

from fastdeploy.core.stats import EngineStats
from fastdeploy.entrypoints.openai.load_report import load_report
from tests.entrypoints.error_table import BATCH, CHATS, COMPLETIONS, MESSAGES, RESPONSES, VALID
from tests.entrypoints.server_process import ServerProcess

ROUTES = (CHATS, BATCH, COMPLETIONS, "/invocations", RESPONSES, MESSAGES)
STATS = EngineStats(num_blocks=8, num_free_blocks=6, num_waiting=3)
TEXT = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"


def report_for(wanted: str | None, stats: EngineStats = STATS) -> str | None:
    headers = [] if wanted is None else [(b"endpoint-load-metrics-format", wanted.encode())]
    return load_report({"type": "http", "headers": headers}, stats)


def test_formats_are_those_of_orca_in_any_case() -> None:
    assert report_for("TEXT") == report_for("text") == TEXT
    assert report_for("JSON") == report_for("Json")
    kind, _, values = str(report_for("JSON")).partition(" ")
    assert (kind, json.loads(values)) == (
        "JSON",
        {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}},
    )


@pytest.mark.parametrize("wanted", [None, "", "BIN", "TEXT,JSON", "xml"])
def test_other_formats_get_no_report(wanted: str | None) -> None:
    assert report_for(wanted) is None


def test_usage_of_an_engine_without_blocks_is_zero() -> None:
    assert "kv_cache_usage_perc=0.0," in str(report_for("TEXT", EngineStats()))


@pytest.mark.parametrize("path", ROUTES)
def test_whole_answers_have_the_report_that_was_asked_for(server: ServerProcess, path: str) -> None:
    for wanted in ("TEXT", "json"):
        response = server.post(path, VALID[path], headers={"Endpoint-Load-Metrics-Format": wanted})
        assert response.status_code == 200
        assert response.headers["endpoint-load-metrics"].startswith(f"{wanted.upper()} ")
    assert "endpoint-load-metrics" not in server.post(path, VALID[path]).headers


def test_streams_and_errors_have_no_report(server: ServerProcess) -> None:
    headers = {"endpoint-load-metrics-format": "TEXT"}
    for change in ({"stream": True}, {"temperature": -1}):
        assert "endpoint-load-metrics" not in server.post(CHATS, {**VALID[CHATS], **change}, headers=headers).headers
