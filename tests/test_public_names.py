# SPDX-License-Identifier: Apache-2.0
"""The names that users import from `fastdeploy`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastdeploy

PAGE = Path(fastdeploy.__file__).parents[1] / "docs" / "guide" / "offline.md"
NAMES = [
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "ErrorInfo",
    "FastDeployError",
    "GuidedDecodingParams",
    "InvalidRequestError",
    "LLM",
    "Logprob",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculateMetrics",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def test_public_names_are_exactly_these() -> None:
    assert sorted(fastdeploy.__all__) == NAMES
    assert sorted(dir(fastdeploy)) == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name != "__version__"])
def test_public_name_is_the_class_of_that_name(name: str) -> None:
    assert getattr(fastdeploy, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fastdeploy' has no attribute 'AsyncLLM'"):
        fastdeploy.AsyncLLM  # noqa: B018


def test_import_is_lazy_and_paddle_is_imported_when_a_model_is_loaded() -> None:
    script = f"""
import sys
import fastdeploy
assert not [name for name in sys.modules if name.startswith("fastdeploy.core")], "nothing is imported before its use"
from fastdeploy import {", ".join(NAMES)}
assert "paddle" not in sys.modules
LLM(model="demo", max_model_len=64)
assert "paddle" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_docs_describe_every_public_name() -> None:
    section = PAGE.read_text().partition("## Names")[2].partition("\n## ")[0]
    described = re.findall(r"`(\w+)`", "".join(line for line in section.splitlines() if line.startswith("| `")))
    assert sorted({*described} & {*NAMES}) == [name for name in NAMES if name != "__version__"]
