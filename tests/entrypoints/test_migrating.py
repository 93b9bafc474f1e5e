# SPDX-License-Identifier: Apache-2.0
"""docs/guide/migrating.md names flags, commands, fields and metrics that exist, and says of each what becomes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import fastdeploy
from fastdeploy.config.env import VARIABLES
from fastdeploy.config.flags import FLAG_BY_NAME, FLAGS, FlagClass
from fastdeploy.entrypoints.cli.main import COMMANDS

DOCS = Path(fastdeploy.__file__).parents[1] / "docs" / "guide"
PAGE = (DOCS / "migrating.md").read_text()
OF_COMMANDS = (
    "url",
    "dataset-name",
    "random-range-ratio",
    "use-beam-search",
    "profile",
    "lora-path",
    "model",
    "config",
)


SECTIONS = PAGE.split("\n## ")
LLAMA_CPP = next(section for section in SECTIONS if section.startswith("From llama.cpp"))


def rows(text: str = PAGE.replace(LLAMA_CPP, "")) -> Iterator[list[str]]:
    """Yield the cells of every row of a table, which begin with a flag of FastDeploy 2.x or vLLM by default."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_flags_exist_and_have_the_documented_class() -> None:
    for cells in rows():
        for option in re.findall(r"--([a-z][a-z0-9-]+)", cells[0]):
            if option in OF_COMMANDS:
                continue
            flag = FLAG_BY_NAME[option.replace("-", "_")]
            said = {"no effect": FlagClass.NO_EFFECT, "refused": FlagClass.REFUSED}
            for words, flag_class in said.items():
                if cells[-1].startswith(words):
                    assert flag.flag_class is flag_class, f"--{option} is {flag.flag_class.value}"


def test_flags_that_replace_those_of_llama_cpp_exist() -> None:
    named = [option for cells in rows(LLAMA_CPP) for option in re.findall(r"--([a-z][a-z0-9-]+)", cells[-1])]
    assert len(named) > 8
    for option in named:
        assert option.replace("-", "_") in FLAG_BY_NAME, option


def test_flags_of_llama_cpp_have_the_documented_class() -> None:
    said = {"the same": FlagClass.MAPPED, "no effect": FlagClass.NO_EFFECT, "refused": FlagClass.REFUSED}
    found = {}
    for cells in rows(LLAMA_CPP):
        for words, flag_class in said.items():
            if cells[-1].startswith(words):
                found |= dict.fromkeys(re.findall(r"`(--?[a-z-]+)", cells[0]), flag_class)
    assert {name: flag.flag_class for flag in FLAGS for name in flag.spellings if name in found} == found
    assert {"-c", "--ctx-size", "-np", "--parallel", "-ngl", "-t", "--threads"} <= set(found)


def test_commands_exist() -> None:
    for command in re.findall(r"`fastdeploy ([a-z-]+)", PAGE):
        assert command in COMMANDS


def test_metrics_exist() -> None:
    known = (DOCS / "observability.md").read_text()
    named = re.findall(r"`(fastdeploy:\w+)", PAGE)
    assert len(named) > 5
    for name in named:
        assert f"| `{name}` |" in known, name


def test_variables_are_read() -> None:
    section = PAGE.partition("### Environment")[2].partition("## From vLLM")[0]
    named = set(re.findall(r"`(FD_\w+)`", section)) - {"FD_"}
    assert named <= set(VARIABLES)
    assert "FD_API_KEY" in named
