# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE stored as vocab.json and merges.txt, as GPT-2 and Qwen have it, as a `tokenizers.Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from fastdeploy.core.errors import ConfigError

VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
_GPT2, _QWEN2 = "gpt2", "qwen2"
_RULES = {"GPT2Tokenizer": _GPT2, "GPTTokenizer": _GPT2, "Qwen2Tokenizer": _QWEN2}
_RULES_BY_MODEL_TYPE = {"gpt2": _GPT2, "qwen2": _QWEN2, "qwen3": _QWEN2}
_QWEN2_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def find_rules(config: Mapping[str, Any], model_type: str) -> str | None:
    """Return how text is cut into words, by the class that tokenizer_config.json names, else by the type of the model.

    None for a class that is not known here.
    """
    name = config.get("tokenizer_class")
    return _RULES_BY_MODEL_TYPE.get(model_type) if name is None else _RULES.get(str(name).removesuffix("Fast"))


def build_byte_level(folder: Path, rules: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
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
    has_prefix = bool(config.get("add_prefix_space", False))
    if rules == _QWEN2:
        backend.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    backend.decoder = decoders.ByteLevel()
    return backend
