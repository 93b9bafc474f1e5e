# SPDX-License-Identifier: Apache-2.0
"""The special tokens that tokenizer_config.json and special_tokens_map.json of a folder name.

The rules are those of `PreTrainedTokenizerFast` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from fastdeploy.config.checkpoint_json import TOKENIZER_KEYS, check_values
from fastdeploy.detokenize.json_file import read_json

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
ADDED_TOKENS_KEY = "added_tokens_decoder"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names that every tokenizer may have; new tokens get their ids in this order."""
_EXTRA, _OLD_EXTRA, _OTHER_NAMES = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_TYPE = "__type"  # objects of tokenizer_config.json say with this key that they are tokens
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with the special tokens of special_tokens_map.json.

    The keys of special_tokens_map.json take precedence, but the file is only read if tokenizer_config.json has no
    `added_tokens_decoder`: a folder that has it was saved with all that it needs in tokenizer_config.json.

    Raises:
        ConfigError: a file cannot be read, or a value that is used has another type.
    """
    config = read_json(folder / TOKENIZER_CONFIG_FILE)
    check_values(config, TOKENIZER_KEYS, f"{folder / TOKENIZER_CONFIG_FILE}: ")
    config = _with_new_keys(config)
    if config.get(ADDED_TOKENS_KEY) is not None:
        return config
    tokens = read_json(folder / SPECIAL_TOKENS_MAP_FILE)
    check_values(tokens, TOKENIZER_KEYS, f"{folder / SPECIAL_TOKENS_MAP_FILE}: ")
    return _merge(config, {key: value for key, value in tokens.items() if key != ADDED_TOKENS_KEY})


def named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return name -> token: the names that every tokenizer may have first, then those of the model alone."""
    others = {key: value for key, value in config.items() if _is_other_name(key, value)}
    tokens = {key: config.get(key) for key in NAMES} | others | dict(config.get(_OTHER_NAMES) or {})
    return {key: token for key, value in tokens.items() if (token := make_token(value)) is not None}


def unnamed_tokens(config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens that have no name."""
    values = config.get(_OLD_EXTRA) if config.get(_EXTRA) is None else config[_EXTRA]
    return [token for value in values or () if (token := make_token(value)) is not None]


def special_texts(config: Mapping[str, Any]) -> set[str]:
    """Return the texts that make a token of added_tokens.json special; objects of tokenizer_config.json do not."""
    values: Iterable[Any] = [*(config.get(key) for key in NAMES), *(config.get(_EXTRA) or ())]
    tokens = [make_token(value) for value in values if isinstance(value, str) or (value and _TYPE not in value)]
    return {token.content for token in tokens if token is not None}


def make_token(value: Any) -> AddedToken | None:
    """Return the token of a text, which is special, or of an object; None if there is no text."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        return None
    return AddedToken(value["content"], **{name: bool(value[name]) for name in _FLAGS if name in value})


def _with_new_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json with all names of the model in one key, and unnamed tokens under their newer key."""
    config = dict(config)
    if _OLD_EXTRA in config and not config.get(_EXTRA):
        config[_EXTRA] = config.pop(_OLD_EXTRA)
    names = {key: value for key, value in config.items() if _is_other_name(key, value) and isinstance(value, str)}
    if isinstance(config.get(_EXTRA), Mapping):
        names |= config.pop(_EXTRA)
    if names:
        config = {key: value for key, value in config.items() if key not in names} | {_OTHER_NAMES: names}
    return config


def _merge(config: dict[str, Any], tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of tokenizer_config.json with those of special_tokens_map.json over them."""
    merged = {**config, **{key: _as_special(value) for key, value in tokens.items()}}
    extra = tokens.get(_EXTRA)
    if isinstance(extra, list):
        earlier = list(config.get(_EXTRA) or [])
        merged[_EXTRA] = earlier + [token for token in map(_as_special, extra) if token not in earlier]
    elif isinstance(extra, Mapping):
        del merged[_EXTRA]
        merged[_OTHER_NAMES] = {**(merged.get(_OTHER_NAMES) or {}), **extra}
    return merged


def _as_special(value: Any) -> Any:
    return {**value, "special": True} if isinstance(value, Mapping) and "content" in value else value


def _is_other_name(key: str, value: Any) -> bool:
    return key.endswith("_token") and key not in NAMES and make_token(value) is not None
