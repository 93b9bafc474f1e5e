# SPDX-License-Identifier: Apache-2.0
"""Which prompts and answers do benchmarks use? Real local text: Python's standard library and its language reference.

A session is a conversation of one or more turns. A turn is a prompt and the answer that follows it in the text, for
replay; a model that generates from the prompt gives an answer of its own.
"""

from __future__ import annotations

import ast
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fastdeploy.detokenize.tokenizer import Tokenizer

FILES = """
    textwrap shlex configparser fractions statistics csv heapq difflib inspect typing shutil pydoc platform dataclasses
    functools dis pickletools pkgutil posixpath ntpath ipaddress base64 uuid subprocess zipfile tempfile ssl locale
    doctest datetime mimetypes traceback warnings webbrowser runpy os gettext tokenize site selectors
"""  # of the standard library
RANDOM_IDS = range(300, 4000)  # ordinary tokens in all vocabularies of the benchmarks
NUM_PASSAGES = 6


@dataclass(frozen=True)
class Turn:
    """A prompt and its recorded answer, as token ids."""

    prompt: list[int]
    answer: list[int]


Session = list[Turn]


def editing(tokenizer: Tokenizer, num_turns: int, seed: int) -> Iterator[Session]:
    """Yield sessions of one turn: a function and its first third again; the answer changes one line in eight."""
    rng = random.Random(seed)
    for source in library_functions(20, 80, seed):
        lines = source.splitlines(keepends=True)
        third = len(lines) // 3
        prompt = source + "\n\n" + "".join(lines[:third])
        yield [Turn(tokenizer.encode(prompt), _answer(tokenizer, edited("".join(lines[third:]), 1 / 8, rng)))]


def loop(tokenizer: Tokenizer, num_turns: int, seed: int) -> Iterator[Session]:
    """Yield sessions whose answers repeat one another but not their prompts: an agent that rewrites a function.

    From turn to turn one line in forty changes, and the prompt has one more line.
    """
    rng = random.Random(seed)
    for source in library_functions(20 + num_turns, 80, seed):
        session = []
        for turn in range(num_turns):
            lines = source.splitlines(keepends=True)
            prompt, answer = "".join(lines[: 2 + turn]), "".join(lines[2 + turn :])
            session.append(Turn(tokenizer.encode(prompt), _answer(tokenizer, answer)))
            source = "".join(lines[: 3 + turn]) + edited("".join(lines[3 + turn :]), 1 / 40, rng)
        yield session


def quoting(tokenizer: Tokenizer, num_turns: int, seed: int) -> Iterator[Session]:
    """Yield sessions of one turn: passages of a manual, and an answer that quotes some between other words."""
    rng = random.Random(seed)
    passages = reference_passages()
    while True:
        chosen = rng.sample(passages, NUM_PASSAGES + 3)
        given, others = chosen[:NUM_PASSAGES], chosen[NUM_PASSAGES:]
        prompt = "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(given, 1)) + "\n\nAnswer:"
        quotes = rng.sample(given, len(others))
        answer = "".join(f' {first_words(text)} "{quote}"\n' for text, quote in zip(others, quotes))
        yield [Turn(tokenizer.encode(prompt), _answer(tokenizer, answer))]


def plain(tokenizer: Tokenizer, num_turns: int, seed: int) -> Iterator[Session]:
    """Yield sessions of one turn: the beginning of a function, and the rest as the answer."""
    for source in library_functions(20, 80, seed):
        yield [Turn(tokenizer.encode(source[:200]), _answer(tokenizer, source[200:]))]


def random_tokens(tokenizer: Tokenizer, num_turns: int, seed: int) -> Iterator[Session]:
    """Yield sessions of one turn of random tokens."""
    rng = random.Random(seed)
    while True:
        ids = rng.choices(RANDOM_IDS, k=1024)
        yield [Turn(ids[:256], ids[256:])]


WORKLOADS: dict[str, Callable[[Tokenizer, int, int], Iterator[Session]]] = {
    "editing": editing,
    "loop": loop,
    "quoting": quoting,
    "plain": plain,
    "random": random_tokens,
}


def sessions(
    workload: str, tokenizer: Tokenizer, count: int, num_turns: int, max_prompt_tokens: int, num_tokens: int, seed: int
) -> list[Session]:
    """Return `count` sessions of a workload whose prompts fit, with answers truncated to `num_tokens`.

    Raises:
        ValueError: the local text has fewer.
    """
    found = []
    for session in WORKLOADS[workload](tokenizer, num_turns, seed):
        if any(len(turn.prompt) > max_prompt_tokens or len(turn.answer) < num_tokens for turn in session):
            continue
        found.append([Turn(turn.prompt, turn.answer[:num_tokens]) for turn in session])
        if len(found) == count:
            return found
    raise ValueError(f"{workload}: the library has {len(found)} texts that fit, {count} are needed")


def source_tokens(tokenizer: Tokenizer, count: int) -> Iterator[list[int]]:
    """Yield the tokens of the source files of this Python and its packages, `count` tokens in total."""
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
    """Return the library's functions of `min_lines` to `max_lines` lines, shuffled."""
    fitting = [source for source in _all_functions() if min_lines <= len(source.splitlines()) <= max_lines]
    random.Random(seed).shuffle(fitting)
    return fitting


def edited(source: str, share: float, rng: random.Random) -> str:
    """Replace this share of the lines by other lines of the library."""
    others = _all_lines()
    return "".join(rng.choice(others) if rng.random() < share else line for line in source.splitlines(keepends=True))


@lru_cache(maxsize=1)
def reference_passages() -> list[str]:
    """Return the paragraphs of 30 to 90 words of Python's language reference."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    paragraphs = [" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text)]
    return [paragraph for paragraph in paragraphs if 30 <= len(paragraph.split()) <= 90]


def first_words(passage: str) -> str:
    """Return the first twelve words of a passage."""
    return " ".join(passage.split()[:12])


@lru_cache(maxsize=1)
def _all_functions() -> tuple[str, ...]:
    found = []
    for name in FILES.split():
        text = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.col_offset == 0:
                found.append((ast.get_source_segment(text, node) or "") + "\n")
    return tuple(found)


@lru_cache(maxsize=1)
def _all_lines() -> tuple[str, ...]:
    return tuple(line for source in _all_functions() for line in source.splitlines(keepends=True))


def _answer(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
