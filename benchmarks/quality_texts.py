# SPDX-License-Identifier: Apache-2.0
"""The texts that bench_quality scores: parts of files that every installation has."""

from __future__ import annotations

import hashlib
import itertools
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import ROOT
from fastdeploy.detokenize.tokenizer import Tokenizer
from scripts.demo_model.data import read_corpus

WINDOW = 1024  # tokens of the longest text
File = tuple[str, str]  # name and content


class Text(NamedTuple):
    """A part of a file that is scored on its own, beginning with the tokens that the tokenizer adds."""

    name: str
    token_ids: list[int]


def demo_texts(tokenizer: Tokenizer, num_tokens: int) -> list[Text]:
    """Return the beginnings of the source files that the demonstration model was not trained on."""
    texts = (Text(name, tokenizer.encode(content)[:WINDOW]) for name, content in _held_out_sources())
    return _take([texts], num_tokens)


def installed_texts(tokenizer: Tokenizer, num_tokens: int) -> list[Text]:
    """Return parts of Python's license, its language reference and its library's sources, and of this project's pages.

    The four kinds alternate.
    """
    kinds = (_license(), _reference(), _held_out_sources(), _pages())
    return _take([_parts_of_files(tokenizer, kind) for kind in kinds], num_tokens)


def texts_of_files(tokenizer: Tokenizer, paths: Sequence[Path], num_tokens: int) -> list[Text]:
    """Return parts of UTF-8 files, which alternate."""
    files = [(path.name, path.read_text(encoding="utf-8")) for path in paths]
    return _take([_parts_of_files(tokenizer, [file]) for file in files], num_tokens)


def digest(texts: Sequence[Text]) -> str:
    """Return the SHA-256 of the names and tokens of texts."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _take(kinds: Sequence[Iterator[Text]], num_tokens: int) -> list[Text]:
    """Return texts of alternating kinds, at least `num_tokens` tokens in total if there are so many."""
    texts: list[Text] = []
    total = 0
    for text in itertools.chain.from_iterable(itertools.zip_longest(*kinds)):
        if total >= num_tokens:
            break
        if text is not None and len(text.token_ids) > 1:  # the first token has no probability
            texts.append(text)
            total += len(text.token_ids)
    return texts


def _parts_of_files(tokenizer: Tokenizer, files: Iterator[File] | Sequence[File]) -> Iterator[Text]:
    """Yield each file in parts of at most WINDOW tokens."""
    added = tokenizer.encode("")
    for name, content in files:
        ids = tokenizer.encode(content, add_special_tokens=False)
        size = WINDOW - len(added)
        for start in range(0, len(ids), size):
            yield Text(f"{name}, from token {start}" if start else name, added + ids[start : start + size])


def _license() -> Iterator[File]:
    """Yield Python's license file; some distributions have it elsewhere, which then is no text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in (folder / "LICENSE.txt", folder.parent / "LICENSE.txt"):
        if path.exists():
            yield path.name, path.read_text(encoding="utf-8")
            return


def _reference() -> Iterator[File]:
    """Yield the chapters of the language reference that `help` shows."""
    from pydoc_data.topics import topics

    for name, content in sorted(topics.items()):
        yield f"pydoc_data: {name}", content


def _held_out_sources() -> Iterator[File]:
    for file in read_corpus():
        if file.held_out:
            yield file.path, file.text


def _pages() -> Iterator[File]:
    for path in sorted((ROOT / "docs").rglob("*.md")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
