# SPDX-License-Identifier: Apache-2.0
"""The tokens that a GGUF file lists, and the settings of its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.pieces import PieceKind

PREFIX = "tokenizer.ggml."
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
_MODELS = (BYTE_LEVEL, SENTENCEPIECE)
_KINDS = {int(kind): kind for kind in PieceKind}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file; their index is their id.

    Attributes:
        where: the file's name, with which messages begin.
        metadata: of the file.
        ids: text -> id, in the order of the ids.
        kinds: the types of the tokens, as the file says them.
    """

    where: str
    metadata: Mapping[str, Any]
    ids: Mapping[str, int]
    kinds: list[PieceKind]

    @property
    def is_byte_level(self) -> bool:
        """Return whether the tokens are byte strings, in the spelling of GPT-2."""
        return bool(self.metadata.get(f"{PREFIX}model") == BYTE_LEVEL)

    def token_id(self, name: str, default: int | None = None) -> int | None:
        """Return the id that the file gives a special token, such as `bos`.

        Args:
            default: for a file that does not say it; ignored if there is no such token.

        Raises:
            ConfigError: there is no token with the id in the file.
        """
        key = f"{PREFIX}{name}_token_id"
        value = self.metadata.get(key)
        if value is None:
            return default if default is not None and default < len(self.kinds) else None
        if type(value) is not int or not 0 <= value < len(self.kinds):
            self.refuse(key, f"expected the id of one of the {len(self.kinds)} tokens, got {value!r:.60}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting of the tokenizer.

        Raises:
            ConfigError: it is not true or false.
        """
        value = self.metadata.get(PREFIX + name, default)
        if type(value) is not bool:
            self.refuse(PREFIX + name, f"expected true or false, got {value!r:.60}")
        return value

    def scores(self) -> list[float]:
        """Return the scores of the tokens.

        Raises:
            ConfigError: they are missing, too few or too many, or one is not finite.
        """
        values = self.read_list("scores", len(self.kinds))
        for index, value in enumerate(values):
            if type(value) not in (int, float) or not math.isfinite(value):
                self.refuse(f"{PREFIX}scores", f"item {index}: expected a finite number, got {value!r:.60}")
        return values

    def read_texts(self, name: str) -> list[str]:
        """Return a list of texts.

        Raises:
            ConfigError: it is missing, or holds something that is not Unicode text.
        """
        values = self.read_list(name)
        for index, value in enumerate(values):
            if not isinstance(value, str) or (not value.isascii() and not _is_unicode(value)):
                self.refuse(PREFIX + name, f"item {index}: expected text in UTF-8, got {value!r:.60}")
        return values

    def read_list(self, name: str, length: int | None = None) -> list[Any]:
        """Return a list, of which every token has an item if `length` is given."""
        value = self.metadata.get(PREFIX + name)
        if not isinstance(value, list) or not value:
            self.refuse(PREFIX + name, "expected a list" + ("" if value is None else f", got {value!r:.60}"))
        if length is not None and len(value) != length:
            self.refuse(PREFIX + name, f"expected {length} items, one for each token, got {len(value)}")
        return value

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise the error of a key of the file."""
        raise ConfigError("tokenizer", f"{self.where}: {key}: {problem}")


def read_vocabulary(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """Read and check the tokens and their types.

    Raises:
        ConfigError: the tokenizer is of a kind that is not supported, or its lists are missing or contradict each
            other.
    """
    ids: dict[str, int] = {}
    kinds: list[PieceKind] = []
    vocabulary = Vocabulary(where, metadata, ids, kinds)
    model = metadata.get(f"{PREFIX}model")
    if model not in _MODELS:
        expected = "a tokenizer of kind " + " or ".join(_MODELS)
        vocabulary.refuse(f"{PREFIX}model", f"expected {expected}, got {'none' if model is None else repr(model)[:80]}")
    if metadata.get(f"{PREFIX}suppress_tokens"):
        vocabulary.refuse(f"{PREFIX}suppress_tokens", "tokens that are never generated are not supported")
    for index, text in enumerate(vocabulary.read_texts("tokens")):
        text = text or f"[EMPTY_{index}]"  # as llama.cpp calls it
        if text in ids:
            vocabulary.refuse(f"{PREFIX}tokens", f"items {ids[text]} and {index} are both {text!r:.60}")
        ids[text] = index
    for index, value in enumerate(vocabulary.read_list("token_type", len(ids))):
        kind = _KINDS.get(value) if type(value) is int else None
        if kind is None:
            expected = f"expected {min(_KINDS)} to {max(_KINDS)}"
            vocabulary.refuse(f"{PREFIX}token_type", f"item {index}: {expected}, got {value!r:.60}")
        kinds.append(kind)
    return vocabulary


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
