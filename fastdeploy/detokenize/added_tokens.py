# SPDX-License-Identifier: Apache-2.0
"""Adds the tokens that the JSON files of a folder declare to the vocabulary of its tokenizer."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.json_file import read_json
from fastdeploy.detokenize.token_names import (
    ADDED_TOKENS_KEY,
    TOKENIZER_CONFIG_FILE,
    make_token,
    named_tokens,
    special_texts,
    unnamed_tokens,
)

ADDED_TOKENS_FILE = "added_tokens.json"

DeclaredTokens = Sequence[tuple[int, AddedToken]]
"""Pairs of id and token."""


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens of added_tokens.json and tokenizer_config.json to `backend`, with their ids.

    Tokens that have a name or are listed as special get the next free ids if no file declares an id. The order and the
    flags are those of `PreTrainedTokenizerFast` of transformers 5, which ignores ids that contradict the tokenizer.

    Args:
        config: what `read_tokenizer_config` returns.

    Raises:
        ConfigError: a declared id belongs to another token, or does not follow the ids before it.
    """
    existing, named = backend.get_added_tokens_decoder(), named_tokens(config)
    unchanged = {repr(token) for token in existing.values()}
    declared = _read_declared(folder, config)
    listed = list(declared)
    if config.get(ADDED_TOKENS_KEY) is None:
        listed += existing.items()  # behind those of added_tokens.json, whose flags they override
    tokens = [token for _, token in sorted(listed, key=lambda pair: pair[0])]
    known = {token.content for token in (*tokens, *existing.values())}
    new = [token for token in (*named.values(), *unnamed_tokens(config)) if token.content not in known]
    tokens += {repr(token): token for token in new}.values()
    names = {token.content for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in names
    backend.add_tokens([token for token in tokens if repr(token) not in unchanged])
    _check_ids(backend, folder, config, declared)


def wrap_in_tokens(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Make `add_special_tokens` add a token before and after a text; None and unknown tokens are ignored."""
    pairs = [(token, backend.token_to_id(token)) for token in (before, after) if token is not None]
    special = [(token, token_id) for token, token_id in pairs if token_id is not None]
    if special:
        texts = {token for token, _ in special}
        parts = [before if before in texts else None, "$A", after if after in texts else None]
        template = [part for part in parts if part is not None]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict(special).items())
        )


def _read_declared(folder: Path, config: Mapping[str, Any]) -> DeclaredTokens:
    """Return the tokens of `added_tokens_decoder`, or without it those of added_tokens.json, which has no flags."""
    decoder = config.get(ADDED_TOKENS_KEY)
    if decoder is not None:
        pairs = [(int(token_id), make_token(value)) for token_id, value in decoder.items()]
        return [(token_id, token) for token_id, token in pairs if token is not None]
    ids, special = _read_added_tokens(folder), special_texts(config)
    return [
        (token_id, AddedToken(text, special=text in special, normalized=text not in special))
        for text, token_id in ids.items()
    ]


def _read_added_tokens(folder: Path) -> Mapping[str, int]:
    ids = read_json(folder / ADDED_TOKENS_FILE)
    for text, token_id in ids.items():
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            where = f"{folder / ADDED_TOKENS_FILE}: {text!r:.100}"
            raise ConfigError("tokenizer", f"{where}: expected an id in [0, 2147483647], got {reprlib.repr(token_id)}")
    return ids


def _check_ids(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], declared: DeclaredTokens
) -> None:
    """Raise ConfigError if a token has another id than the folder declares."""
    for token_id, token in declared:
        actual = backend.token_to_id(token.content)
        if actual == token_id:
            continue
        key, file = "added_tokens.json", ADDED_TOKENS_FILE
        if config.get(ADDED_TOKENS_KEY) is not None:
            key, file = f"{ADDED_TOKENS_KEY}.{token_id}", TOKENIZER_CONFIG_FILE
        raise ConfigError(
            key,
            f"{folder / file}: token {token.content!r:.100} has id {token_id}, but the vocabulary gives it {actual}",
        )
