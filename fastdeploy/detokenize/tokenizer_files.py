# SPDX-License-Identifier: Apache-2.0
"""Loads the tokenizer of a folder, whatever its format, as a `tokenizers.Tokenizer`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.added_tokens import add_tokens, wrap_in_tokens
from fastdeploy.detokenize.byte_level_tokenizer import MERGES_FILE, VOCAB_FILE, build_byte_level, find_split
from fastdeploy.detokenize.json_file import read_json
from fastdeploy.detokenize.paddlenlp_tokenizer import convert_with_paddlenlp
from fastdeploy.detokenize.sentencepiece_tokenizer import build_sentencepiece
from fastdeploy.detokenize.token_names import TOKENIZER_CONFIG_FILE, named_tokens
from fastdeploy.detokenize.tokenizer_limits import check_tokenizer_file

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")

SpecialTokens = dict[str, str]


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer in any format."""
    names = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, VOCAB_FILE, *SENTENCEPIECE_FILES)
    return any((folder / name).is_file() for name in names)


def load_backend(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    """Return the folder's tokenizer, with its added tokens, and its named special tokens.

    Formats are tried in this order: tokenizer.json, vocab.json with merges.txt, SentencePiece, PaddleNLP.

    Args:
        config: what `read_tokenizer_config` returns.

    Raises:
        ConfigError: there is none, it cannot be read, its files contradict each other, or it requires PaddleNLP, which
            is not installed.
    """
    backend, special = _load(folder, config)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    return backend, special


def _load(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    if (folder / TOKENIZER_FILE).is_file():
        backend = _read_tokenizer_json(folder / TOKENIZER_FILE)
        add_tokens(backend, folder, config)
        return backend, _texts_of_names(config)
    if (folder / VOCAB_FILE).is_file() and (folder / MERGES_FILE).is_file():
        split = find_split(config, str(read_json(folder / "config.json").get("model_type")))
        if split is not None:
            return _from_byte_level(folder, split, config)
    for name in SENTENCEPIECE_FILES:
        if (folder / name).is_file() and not _is_tiktoken(folder / name):
            return _from_sentencepiece(folder, folder / name, config)
    if config.get("tokenizer_class"):
        converted = convert_with_paddlenlp(folder, str(config["tokenizer_class"]))
        return _read_tokenizer_json(converted), _texts_of_names(config)
    raise _not_supported(folder)


def _not_supported(folder: Path) -> ConfigError:
    for name in SENTENCEPIECE_FILES:
        if (folder / name).is_file():
            return ConfigError(
                "tokenizer",
                f"{str(folder / name)!r} is in tiktoken format, which is not supported; use {TOKENIZER_FILE}",
            )
    return ConfigError(
        "tokenizer",
        f"no tokenizer in {str(folder)!r}: expected {TOKENIZER_FILE}, {VOCAB_FILE} with {MERGES_FILE} of a known "
        f"class, a SentencePiece model, or a {TOKENIZER_CONFIG_FILE} with a tokenizer_class of PaddleNLP",
    )


def _texts_of_names(config: Mapping[str, Any]) -> SpecialTokens:
    """Return name -> text of the named special tokens, such as `bos_token`."""
    return {name: token.content for name, token in named_tokens(config).items()}


def _read_tokenizer_json(file: Path) -> tokenizers.Tokenizer:
    check_tokenizer_file(file)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:  # the library raises bare Exception, and BaseException for its own faults
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError("tokenizer", f"cannot read {str(file)!r}: {error!s:.300}") from error


def _from_byte_level(folder: Path, split: str, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    backend = build_byte_level(folder, split, config)
    add_tokens(backend, folder, config)
    special = _texts_of_names(config)
    wrap_in_tokens(backend, special.get("bos_token") if config.get("add_bos_token") else None, None)
    return backend, special


def _from_sentencepiece(
    folder: Path, file: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    """Build the tokenizer; Llama classes, and folders without a class, add the BOS token to texts by default."""
    backend, model = build_sentencepiece(file, config)
    add_tokens(backend, folder, config)
    model_tokens = {"bos_token": model.text_of(model.bos_id), "eos_token": model.text_of(model.eos_id)}
    special = {key: text for key, text in model_tokens.items() if text is not None} | _texts_of_names(config)
    is_llama = str(config.get("tokenizer_class", "LlamaTokenizer")).startswith("LlamaTokenizer")
    wrap_in_tokens(
        backend,
        special.get("bos_token") if config.get("add_bos_token", is_llama) else None,
        special.get("eos_token") if config.get("add_eos_token", False) else None,
    )
    return backend, special


def _is_tiktoken(file: Path) -> bool:
    """Return whether a file has lines of base64 and rank, the format of the first releases of Llama 3."""
    with file.open("rb") as stream:
        return _TIKTOKEN_LINE.match(stream.read(256)) is not None
