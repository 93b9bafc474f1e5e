# SPDX-License-Identifier: Apache-2.0
"""What a Python block of a page uses stands above it: packages in an install line, names in an earlier block."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if "```python" in path.read_text()
]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"\bpip install ([^`\n]+)")
BRINGS = {  # what a package brings besides a module of its own name
    "instructor": {"openai", "pydantic"},
    "openai-agents": {"agents", "openai", "pydantic"},
    "pydantic-ai-slim": {"pydantic_ai", "pydantic"},
}


def installed_modules(text: str) -> set[str]:
    """Return the modules that the install lines of a text bring."""
    names = {re.split(r"[\[=]", word.strip("'\""))[0] for line in INSTALL.findall(text) for word in line.split()}
    return {name.replace("-", "_") for name in names}.union(*(BRINGS.get(name, set()) for name in names))


def imported_modules(tree: ast.AST) -> set[str]:
    """Return the top-level modules that a block imports."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [
        node.module if isinstance(node, ast.ImportFrom) else alias.name for node in imports for alias in node.names
    ]
    return {str(name).partition(".")[0] for name in names}


def used_and_defined(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that a block reads, and those that it defines anywhere."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    return used, defined


def missing(page: str) -> list[str]:
    """Return the modules without an install line and the names without a definition above the block that uses them."""
    found, known = [], {*dir(builtins), "__name__"}
    for block in BLOCK.finditer(page):
        tree = ast.parse(block[1])
        provided = {*sys.stdlib_module_names, "fastdeploy", *installed_modules(page[: block.start()])}
        used, defined = used_and_defined(tree)
        known |= defined
        found += sorted(imported_modules(tree) - provided) + sorted(used - known)
    return found


@pytest.mark.parametrize("page", PAGES, ids=[path.name for path in PAGES])
def test_what_a_block_uses_stands_above_it(page: Path) -> None:
    assert missing(page.read_text()) == []


@pytest.mark.parametrize(
    ("page", "lacks"),
    [
        ("```python\nimport openai\nopenai.x\n```\n`pip install openai`", ["openai"]),
        ("`pip install openai`\n```python\nimport openai\nopenai.x\n```\n", []),
        (
            "pip install -q 'pydantic-ai-slim[openai]' httpx==1\n```python\nimport pydantic_ai, httpx, pydantic\n```\n",
            [],
        ),
        ("```python test=a\nimport json\nfrom fastdeploy import LLM\nclient = LLM(json)\n```\n", []),
        ("```python\nclient.run()\n```\n```python\nclient = 1\n```\n", ["client"]),
        ("```python\nx = [y for y in ()]\ndef f(a): return a\n```\n```python\nprint(x, f)\n```\n", []),
    ],
)
def test_the_check_sees_imports_and_names(page: str, lacks: list[str]) -> None:
    assert missing(page) == lacks
