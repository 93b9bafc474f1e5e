# SPDX-License-Identifier: Apache-2.0
"""Destination, level and format of log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy.config.env import Env, read_env
from fastdeploy.core.errors import ConfigError
from fastdeploy.metrics.logs import engine_line, set_up_engine_logging, set_up_logging
from tests.entrypoints.server_process import mock_server

LOGGERS = ("fastdeploy", "fastdeploy.request", "uvicorn")


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """Restore the loggers after each test."""
    kept = {name: logging.getLogger(name) for name in LOGGERS}
    states = {name: (list(logger.handlers), logger.level, logger.propagate) for name, logger in kept.items()}
    yield
    for name, logger in kept.items():
        logger.handlers[:], logger.level, logger.propagate = states[name]


def emit_all_levels() -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("fastdeploy.server").log(level, "at %s", logging.getLevelName(level))


@pytest.mark.parametrize(
    ("level", "seen"),
    [("DEBUG", ["DEBUG", "INFO", "WARNING", "ERROR"]), ("WARNING", ["WARNING", "ERROR"]), ("ERROR", ["ERROR"])],
)
def test_level_decides_which_lines_are_written(level: str, seen: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(Env(log_level=level))
    emit_all_levels()
    assert [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()] == seen


def test_request_lines_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(Env(log_requests=False))
    logging.getLogger("fastdeploy.request").info("one request")
    logging.getLogger("fastdeploy.server").info("something else")
    assert [line.rsplit(" INFO ", 1)[1] for line in capsys.readouterr().err.splitlines()] == ["something else"]


def test_invalid_environment_variables_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_LOG_LEVEL", "debug")
    monkeypatch.setenv("FD_LOG_REQUESTS", "0")
    env = read_env()
    assert (env.log_level, env.log_requests) == ("DEBUG", False)
    monkeypatch.setenv("FD_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="FD_LOG_LEVEL: expected one of DEBUG, INFO, WARNING, ERROR, got 'LOUD'"):
        read_env()


def test_text_lines_of_the_engine_are_logged_and_its_warnings_shown(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_engine_logging(Env())
    emit_all_levels()
    lines = capsys.readouterr().err.splitlines()
    assert [engine_line(line, is_json=False) for line in lines] == [
        ("[fastdeploy] INFO fastdeploy.server: at INFO", False),
        ("[fastdeploy] WARNING fastdeploy.server: at WARNING", True),
        ("[fastdeploy] ERROR fastdeploy.server: at ERROR", True),
    ]
    assert engine_line("WARNING of a library", is_json=False) == ("WARNING of a library", False)


def test_lines_of_the_level_debug_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for log_format in ("text", "json"):
        set_up_engine_logging(Env(log_level="DEBUG", log_format=log_format))
        emit_all_levels()
        lines = capsys.readouterr().err.splitlines()
        assert [engine_line(line, log_format == "json")[1] for line in lines] == [True, False, True, True]


def test_json_lines_of_the_engine_are_logged_and_other_output_becomes_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_engine_logging(Env(log_format="json"))
    emit_all_levels()
    lines = capsys.readouterr().err.splitlines()
    converted = [engine_line(line, is_json=True) for line in lines]
    assert [line for line, _ in converted] == lines
    assert [(json.loads(line)["level"], shown) for line, shown in converted] == [
        ("INFO", False), ("WARNING", True), ("ERROR", True),
    ]  # fmt: skip
    line, shown = engine_line('printed by "C"', is_json=True)
    assert (json.loads(line)["message"], json.loads(line)["logger"], shown) == (
        'printed by "C"',
        "engine.output",
        False,
    )


def test_both_log_files_of_a_server_contain_json_documents_only(tmp_path: Path) -> None:
    model, logs = tmp_path / "model", tmp_path / "logs"
    model.mkdir()
    env = {"FD_LOG_DIR": str(logs), "FD_LOG_FORMAT": "json"}
    with mock_server(model, "--workers", "2", env=env) as server:
        for i in range(4):
            server.post("/v1/completions", {"prompt": "the", "max_tokens": 3, "request_id": f"r{i}"})
        server.terminate()
        assert server.wait_end() == 0
    requests = [json.loads(line) for line in (logs / "api_server.log").read_text().splitlines()]
    assert sorted(line["request_id"] for line in requests if "request_id" in line) == [f"cmpl-r{i}" for i in range(4)]
    engine = [json.loads(line) for line in (logs / "engine.log").read_text().splitlines()]
    assert any(line["message"].startswith("ready for requests") for line in engine)
