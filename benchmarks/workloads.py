# SPDX-License-Identifier: Apache-2.0
"""Prompts made of real local text: the source of the Python standard library."""

from __future__ import annotations

import ast
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from fastdeploy.detokenize.tokenizer import Tokenizer

FILES = (
    "textwrap.py",
    "shlex.py",
    "configparser.py",
    "fractions.py",
    "statistics.py",
    "csv.py",
    "heapq.py",
    "difflib.py",
)


def code_editing(tokenizer: Tokenizer, count: int, max_prompt_tokens: int, seed: int = 0) -> list[list[int]]:
    """Return prompts that ask for a function again: its whole source, then the first third of it once more.

    What follows overlaps the prompt as far as the model edits little: the work of an editor that rewrites a function.
    """
    return [prompts[0] for prompts in agent_loops(tokenizer, count, 1, max_prompt_tokens, seed)]


def agent_loops(
    tokenizer: Tokenizer, count: int, num_turns: int, max_prompt_tokens: int, seed: int = 0
) -> list[list[list[int]]]:
    """Return [count][num_turns] prompts: an agent that asks for one function turn after turn, each time a line later.

    What follows overlaps the prompt, and beyond it what the model said in earlier turns.
    """
    functions = library_functions(20, 60, seed)
    loops = []
    for source in functions:
        lines = source.splitlines(keepends=True)
        starts = range(len(lines) // 3, len(lines) // 3 + num_turns)
        prompts = [tokenizer.encode(source + "\n\n" + "".join(lines[:start])) for start in starts]
        if all(len(prompt) <= max_prompt_tokens for prompt in prompts):
            loops.append(prompts)
        if len(loops) == count:
            return loops
    raise ValueError(f"the library holds {len(loops)} fitting functions, {count} are wanted")


def source_tokens(tokenizer: Tokenizer, count: int) -> Iterator[list[int]]:
    """Yield the tokens of this Python's own source files and of its packages', `count` tokens in all."""
    paths = sysconfig.get_paths()
    folders = [Path(paths["stdlib"]), *(Path(folder) for folder in sys.path if folder.endswith("site-packages"))]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        tokens = tokenizer.encode(path.read_text(errors="replace"))[:count]
        count -= len(tokens)
        yield tokens
        if count == 0:
            return
    raise ValueError(f"this Python's sources are {count} tokens too short")


def library_functions(min_lines: int, max_lines: int, seed: int) -> list[str]:
    """Return the source of the library's functions of so many lines, shuffled."""
    found = []
    for name in FILES:
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.col_offset == 0:
                found.append((ast.get_source_segment(text, node) or "") + "\n")
    fitting = [source for source in found if min_lines <= len(source.splitlines()) <= max_lines]
    random.Random(seed).shuffle(fitting)
    return fitting
