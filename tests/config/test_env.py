# SPDX-License-Identifier: Apache-2.0
"""Environment variables: which ones are known, and what is said about the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fastdeploy
from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.env import VARIABLES, read_env


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
    build = (root / "setup.py").read_text()
    read = {
        *re.findall(r'environ.get\("(FD_\w+)"', python + build),
        *re.findall(r'getenv\("(FD_\w+)"', native),
        "FD_API_KEY",
    }
    assert read == set(VARIABLES)
