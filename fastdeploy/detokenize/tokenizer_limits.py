# SPDX-License-Identifier: Apache-2.0
"""Limits of the rules in tokenizer.json, without which a short text could fill the memory.

The length of a prompt is limited before it is tokenized, so the rules that change it must not make it much longer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import normalizers

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.panics import convert_panics
from fastdeploy.detokenize.json_file import read_json

MAX_INSERTED_LENGTH = 1024  # characters that a rule may write for one that it replaces, with the rules after it
MAX_RULES = 256
_INSERTED_TEXTS = {"Prepend": "prepend", "Replace": "content"}  # type of a rule -> key of the text that it writes
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")

Rule = Mapping[str, Any]


def check_tokenizer_file(file: Path) -> None:
    """Check how much longer the rules of tokenizer.json can make a text, before the library applies them.

    Raises:
        ConfigError: the file cannot be read, has too many rules, or a rule writes more than `MAX_INSERTED_LENGTH`
            characters for one.
    """
    content = read_json(file)
    for part in _PARTS:
        rules = list(_rules(content.get(part)))
        if len(rules) > MAX_RULES:
            raise ConfigError("tokenizer", f"{file}: {part}: expected at most {MAX_RULES} rules, got {len(rules)}")
        length = _longest_inserted(rules)
        if length > MAX_INSERTED_LENGTH:
            expected = f"expected rules that write up to {MAX_INSERTED_LENGTH} characters for one"
            raise ConfigError("tokenizer", f"{file}: {part}: {expected}, got {length}")


def longest_inserted(normalizer: normalizers.Normalizer) -> int:
    """Return the number of characters that the rules of a normalizer, with those after them, write for one at most.

    Compatible normalization (NFKC) is not counted.
    """
    return _longest_inserted(list(_rules(json.loads(normalizer.__getstate__()))))


def _rules(rule: Any) -> Iterator[Rule]:
    """Yield a rule, or those of a sequence in their order; what is no rule is left to the library."""
    if not isinstance(rule, Mapping):
        return
    if rule.get("type") != "Sequence":
        yield rule
        return
    for key in _SEQUENCES:
        for item in rule.get(key) or ():
            yield from _rules(item)


def _longest_inserted(rules: Sequence[Rule]) -> int:
    return max((_inserted_length(rule, rules[index + 1 :]) for index, rule in enumerate(rules)), default=0)


def _inserted_length(rule: Rule, following: Sequence[Rule]) -> int:
    """Return the length of the text that a rule writes, or of what the rules that follow make of it if it is longer."""
    if rule.get("type") == "Precompiled":
        return _longest_of_charsmap(rule.get("precompiled_charsmap"))
    text = rule.get(_INSERTED_TEXTS.get(str(rule.get("type")), ""))
    if not isinstance(text, str):
        return 0
    longest = len(text)
    for later in following:
        if longest > MAX_INSERTED_LENGTH:
            break
        try:
            text = _apply(later, text)
        except Exception:  # not a normalizer, or one that the library refuses when it reads the file
            continue
        longest = max(longest, len(text))
    return longest


@convert_panics
def _apply(rule: Rule, text: str) -> str:
    normalizer = normalizers.Prepend("")
    normalizer.__setstate__(json.dumps(rule).encode())
    return str(normalizer.normalize_str(text))


def _longest_of_charsmap(value: Any) -> int:
    """Return the length of the longest text in compiled rules of SentencePiece: a trie, then texts that end in NUL."""
    try:
        data = base64.b64decode(value, validate=True)
    except (TypeError, ValueError):  # the library refuses it when it reads the file
        return 0
    num_trie_bytes = int.from_bytes(data[:4], "little")
    return max(len(text.decode(errors="replace")) for text in data[4 + num_trie_bytes :].split(b"\0"))
