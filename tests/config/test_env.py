# SPDX-License-Identifier: Apache-2.0
"""Environment variables: which ones are known, and what is said about the others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fastdeploy
from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.env import VARIABLES, child_environment, read_env

STARTS_A_PROCESS = {"Popen", "run", "check_output", "create_subprocess_exec", "create_subprocess_shell"}


def test_unknown_variables_are_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_BUILD_PATHS", "all")
    monkeypatch.setenv("FD_ATTENTION_BACKEND", "APPEND_ATTN")
    monkeypatch.setenv("FD_LOG_DIRS", "log")
    assert [note for note in parse_serve_args(["demo"], read_env()).notes if "FD_" in note] == [
        "FD_ATTENTION_BACKEND has no effect: unknown variable",
        "FD_LOG_DIRS has no effect: unknown variable; did you mean 'FD_LOG_DIR'?",
    ]


def test_table_of_variables_holds_what_the_sources_read() -> None:
    root = Path(fastdeploy.__file__).parents[1]
    python = (root / "fastdeploy" / "config" / "env.py").read_text().partition("def read_env")[2]
    native = "".join(file.read_text() for file in (root / "custom_ops" / "common").glob("*.cc"))
    tools = (root / "custom_ops" / "tools").glob("*.py")
    build = "".join(file.read_text() for file in (root / "setup.py", *tools))
    read = {
        *re.findall(r'(?:environ.get|_number)\("(FD_\w+)"', python + build),
        *re.findall(r'getenv\("(FD_\w+)"', native),
        "FD_API_KEY",
    }
    assert read == set(VARIABLES)


def test_child_processes_get_the_environment_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_API_KEY", "a")
    monkeypatch.setenv("OPENAI_API_KEY", "b")
    monkeypatch.setenv("FD_LOG_LEVEL", "INFO")
    environment = child_environment(ADDED="c")
    assert environment.keys() & {"FD_API_KEY", "OPENAI_API_KEY", "FD_LOG_LEVEL", "ADDED"} == {"FD_LOG_LEVEL", "ADDED"}


def test_a_replaced_process_gets_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_FAULT", "commit:raise")
    assert child_environment()["FD_FAULT"] == "commit:raise"
    assert "FD_FAULT" not in child_environment(is_replacement=True)


def test_every_child_process_of_a_server_is_given_its_environment() -> None:
    """Without `env`, it would inherit the keys. Commands for users (cli) run with the user's own environment."""
    root = Path(fastdeploy.__file__).parent
    starts = [
        (str(file.relative_to(root)), node)
        for file in sorted(root.rglob("*.py"))
        if "cli" not in file.relative_to(root).parts
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in STARTS_A_PROCESS
        and ast.unparse(node.func.value) in ("subprocess", "asyncio")
        and ast.unparse(node.func) != "asyncio.run"
    ]
    assert len(starts) >= 5
    assert [file for file, call in starts if "env" not in {keyword.arg for keyword in call.keywords}] == []
