# SPDX-License-Identifier: Apache-2.0
"""Destination, level and format of log lines."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy.config.env import Env, read_env
from fastdeploy.core.errors import ConfigError
from fastdeploy.metrics.logs import engine_line, set_up_engine_logging, set_up_logging, set_up_script_logging
from tests.entrypoints.server_process import mock_server

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
TEXT_LINE = re.compile(rf"{TIME} (DEBUG|INFO|WARNING|ERROR) [\w.]+: \S")


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
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO fastdeploy.server: something else")


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
    assert [engine_line(line, is_json=False) for line in lines] == list(zip(lines, (False, True, True)))
    assert [re.sub(TIME, "TIME", line) for line in lines] == [
        "TIME INFO fastdeploy.server: at INFO",
        "TIME WARNING fastdeploy.server: at WARNING",
        "TIME ERROR fastdeploy.server: at ERROR",
    ]


def test_text_lines_of_libraries_get_a_time_and_lines_that_continue_others_do_not() -> None:
    line, shown = engine_line("WARNING of a library", is_json=False)
    assert (re.sub(TIME, "TIME", line), shown) == ("TIME INFO engine.output: WARNING of a library", False)
    line, _ = engine_line("Traceback (most recent call last):", is_json=False, output_logger="agent.output")
    assert re.sub(TIME, "TIME", line) == "TIME INFO agent.output: Traceback (most recent call last):"
    for text in ('  File "x.py", line 1, in <module>', "", "\tat 0x1"):
        assert engine_line(text, is_json=False)[0] == text
    line, shown = engine_line("Current thread 0x00007f1 (most recent call first):", is_json=False)
    assert (TEXT_LINE.match(line) is not None, shown) == (True, True)


def test_lines_of_a_traceback_are_indented_below_the_line_of_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(Env())
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("fastdeploy.server").exception("it failed")
    first, *others = capsys.readouterr().err.splitlines()
    assert TEXT_LINE.match(first) and others[-1] == "  lines"
    assert all(line.startswith("  ") for line in others)


def test_lines_of_a_script_have_the_format_of_a_server_before_and_after_paddle_is_imported() -> None:
    script = 'from fastdeploy import LLM; LLM("demo", async_scheduling=True)'
    for first, log_format in (("import paddle; ", "text"), ("", "json")):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", first + script],
            env={**os.environ, "FD_LOG_FORMAT": log_format},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        lines = done.stderr.splitlines()
        assert any("async_scheduling" in line for line in lines) and any("operators: " in line for line in lines)
        for line in lines:
            assert TEXT_LINE.match(line) if log_format == "text" else json.loads(line)["time"], line


def test_logging_that_a_script_has_set_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, root = logging.getLogger("fastdeploy"), logging.getLogger()
    own, no_handlers = logging.NullHandler(), list[logging.Handler]()
    for of_root, of_package in (([own], no_handlers), (no_handlers, [own])):
        monkeypatch.setattr(root, "handlers", of_root)
        monkeypatch.setattr(logger, "handlers", list(of_package))
        set_up_script_logging(Env())
        assert logger.handlers == of_package
    monkeypatch.setattr(logger, "handlers", [])
    logger.setLevel(logging.ERROR)
    of_uvicorn = list(logging.getLogger("uvicorn").handlers)
    set_up_script_logging(Env(log_level="DEBUG"))
    assert (len(logger.handlers), logger.level) == (1, logging.ERROR)
    assert logging.getLogger("uvicorn").handlers == of_uvicorn
    logger.setLevel(logging.NOTSET)
    monkeypatch.setattr(logger, "handlers", [])
    set_up_script_logging(Env(log_level="DEBUG"))
    assert logger.level == logging.DEBUG


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


def test_every_line_of_both_log_files_of_a_server_begins_with_its_time(tmp_path: Path) -> None:
    model, logs = tmp_path / "model", tmp_path / "logs"
    model.mkdir()
    with mock_server(model, env={"FD_LOG_DIR": str(logs)}) as server:
        server.post("/v1/completions", {"prompt": "the", "max_tokens": 3})
        server.terminate()
        assert server.wait_end() == 0
        assert [line for line in server.stderr.splitlines() if not TEXT_LINE.match(line)] == []
    for name in ("api_server.log", "engine.log"):
        lines = (logs / name).read_text().splitlines()
        assert lines and [line for line in lines if not TEXT_LINE.match(line)] == []


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
