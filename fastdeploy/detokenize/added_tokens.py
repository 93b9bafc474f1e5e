# SPDX-License-Identifier: Apache-2.0
"""Added tokens and named special tokens from the JSON files of a tokenizer's folder."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.json_file import read_json

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
_OTHER_KEYS = ("cls_token", "sep_token", "mask_token")  # special as well, but not used by chat templates
ADDED_TOKENS_FILE = "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens, such as `bos_token`; older files store a mapping with the text in `content`."""
    tokens = {key: _text(config.get(key)) for key in SPECIAL_TOKEN_KEYS}
    return {key: text for key, text in tokens.items() if text is not None}


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens of added_tokens.json and tokenizer_config.json to `backend`, with their ids.

    Raises:
        ConfigError: an id belongs to another token, or does not follow the ids before it.
    """
    special = _special_texts(config)
    for token_id, token in sorted(_declared(folder, config, special).items()):
        existing = backend.token_to_id(token.content)
        if (backend.get_vocab_size() if existing is None else existing) != token_id:
            raise ConfigError(
                "tokenizer",
                f"{str(folder)!r}: added token {token.content!r} has id {token_id}, "
                + (
                    f"the next free id is {backend.get_vocab_size()}" if existing is None else f"but also id {existing}"
                ),
            )
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    backend.add_special_tokens([text for text in special if backend.token_to_id(text) is not None])


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


def _declared(folder: Path, config: Mapping[str, Any], special: list[str]) -> dict[int, AddedToken]:
    """Return id -> token; tokenizer_config.json overrides added_tokens.json, which has no flags."""
    ids: Mapping[str, int] = read_json(folder / ADDED_TOKENS_FILE)
    for text, token_id in ids.items():
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            where = f"{folder / ADDED_TOKENS_FILE}: {text!r:.100}"
            raise ConfigError("tokenizer", f"{where}: expected an id in [0, 2147483647], got {reprlib.repr(token_id)}")
    declared = {token_id: AddedToken(text, special=text in special, normalized=False) for text, token_id in ids.items()}
    for token_id, value in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        declared[int(token_id)] = AddedToken(value["content"], **flags)
    return declared


def _special_texts(config: Mapping[str, Any]) -> list[str]:
    others = [config.get(key) for key in _OTHER_KEYS] + list(config.get("additional_special_tokens") or [])
    texts = [*named_special_tokens(config).values(), *(_text(value) for value in others)]
    return [text for text in dict.fromkeys(texts) if text]


def _text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
