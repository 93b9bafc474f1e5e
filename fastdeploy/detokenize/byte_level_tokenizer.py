# SPDX-License-Identifier: Apache-2.0
"""Builds a `tokenizers.Tokenizer` from the byte-level BPE of vocab.json and merges.txt, as in GPT-2 and Qwen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.split_patterns import CONTRACTIONS, words_pattern

VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
_GPT2, _QWEN2 = "gpt2", "qwen2"
_SPLITS_BY_CLASS = {"GPT2Tokenizer": _GPT2, "GPTTokenizer": _GPT2, "Qwen2Tokenizer": _QWEN2}
_SPLITS_BY_MODEL_TYPE = {"gpt2": _GPT2, "qwen2": _QWEN2, "qwen3": _QWEN2}


def find_split(config: Mapping[str, Any], model_type: str) -> str | None:
    """Return how the pre-tokenizer splits text, by the class in tokenizer_config.json or by the type of the model.

    Returns None for unknown classes and types.
    """
    name = config.get("tokenizer_class")
    return (
        _SPLITS_BY_MODEL_TYPE.get(model_type) if name is None else _SPLITS_BY_CLASS.get(str(name).removesuffix("Fast"))
    )


def build_byte_level(folder: Path, split: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer of vocab.json and merges.txt, without added tokens.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        model = models.BPE.from_file(str(folder / VOCAB_FILE), str(folder / MERGES_FILE))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            "tokenizer", f"cannot read {VOCAB_FILE} and {MERGES_FILE} of {str(folder)!r}: {error}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    add_prefix_space = bool(config.get("add_prefix_space", False))
    if split == _QWEN2:
        backend.normalizer = normalizers.NFC()
        split_words = pre_tokenizers.Split(Regex(words_pattern(CONTRACTIONS)), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split_words, to_bytes])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend
