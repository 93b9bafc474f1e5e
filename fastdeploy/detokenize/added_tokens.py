# SPDX-License-Identifier: Apache-2.0
"""Tokens that a folder adds to its vocabulary, and those that it names, as its JSON files say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.json_file import read_json

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
_FURTHER_KEYS = ("cls_token", "sep_token", "mask_token")  # special too, though no template asks for them
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens (`bos_token`, ...); older files store a mapping with the text under `content`."""
    found = {key: _text(config.get(key)) for key in SPECIAL_TOKEN_KEYS}
    return {key: text for key, text in found.items() if text is not None}


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Give `backend` the tokens of added_tokens.json and of tokenizer_config.json, each under the id it has there.

    Raises:
        ConfigError: an id that is taken, or that leaves a gap.
    """
    special = _special_texts(config)
    for token_id, token in sorted(_declared(folder, config, special).items()):
        expected = backend.token_to_id(token.content)
        if (backend.get_vocab_size() if expected is None else expected) != token_id:
            raise ConfigError(
                "tokenizer",
                f"{str(folder)!r}: added token {token.content!r} has id {token_id}, "
                + (f"the next free id is {backend.get_vocab_size()}" if expected is None else f"and id {expected}"),
            )
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    backend.add_special_tokens([text for text in special if backend.token_to_id(text) is not None])


def wrap_in_tokens(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Make `add_special_tokens` put a token before the text and one after it; None and unknown tokens put nothing."""
    known = [(token, backend.token_to_id(token)) for token in (before, after) if token is not None]
    special = [(token, token_id) for token, token_id in known if token_id is not None]
    if special:
        texts = {token for token, _ in special}
        parts = [before if before in texts else None, "$A", after if after in texts else None]
        template = [part for part in parts if part is not None]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict(special).items())
        )


def _declared(folder: Path, config: Mapping[str, Any], special: list[str]) -> dict[int, AddedToken]:
    """Return id -> token; tokenizer_config.json knows more than added_tokens.json and wins."""
    declared = {
        int(token_id): AddedToken(text, special=text in special, normalized=False)
        for text, token_id in read_json(folder / "added_tokens.json").items()
    }
    for token_id, value in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        declared[int(token_id)] = AddedToken(value["content"], **flags)
    return declared


def _special_texts(config: Mapping[str, Any]) -> list[str]:
    further = [config.get(key) for key in _FURTHER_KEYS] + list(config.get("additional_special_tokens") or [])
    texts = [*named_special_tokens(config).values(), *(_text(value) for value in further)]
    return [text for text in dict.fromkeys(texts) if text]


def _text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
