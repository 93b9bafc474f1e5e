# SPDX-License-Identifier: Apache-2.0
"""Converts the tokenizer of a folder to tokenizer.json with PaddleNLP, in an environment that has it.

    python paddlenlp_convert.py FOLDER TOKENIZER_JSON

paddlenlp_tokenizer.py runs this file as a script. It imports nothing of this package, which that environment may lack.
"""

from __future__ import annotations

import sys
from typing import Any

SAMPLES = (
    "The quick brown fox, 12345 times; it's DONE!",
    "  two  spaces\n\nand\ttabs ",
    "你好，世界。深度学习框架",
    "héllo wörld, привет мир, 한국어",
    "def add(a, b):\n    return a + b\n",
    "1🙂é ©2 €3 x²",
)
SPLIT_SYMBOLS = r"\p{S}|[\u00AD\u00B2\u00BA\u3007\u00B5\u00D8\u014B\u01B1]"  # PaddleNLP makes each of these a word


def convert(folder: str, file: str) -> None:
    """Convert the tokenizer and write it; exit with an error if the ids of the samples differ."""
    from paddlenlp.transformers import AutoTokenizer
    from paddlenlp.transformers.convert_slow_tokenizer import convert_slow_tokenizer

    slow = AutoTokenizer.from_pretrained(folder)
    fast = convert_slow_tokenizer(slow)
    if hasattr(slow, "basic_tokenizer"):
        _split_symbols(fast)
    _add_tokens(fast, slow)
    for text in SAMPLES:
        expected, actual = slow(text)["input_ids"], fast.encode(text).ids
        if list(expected) != list(actual):
            raise SystemExit(f"the converted tokenizer gives other ids than {type(slow).__name__} for {text!r}")
    fast.save(file)


def _split_symbols(fast: Any) -> None:
    """Split symbols as BERT-like tokenizers do, which PaddleNLP's conversion omits."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    fast.pre_tokenizer = Sequence([Split(Regex(SPLIT_SYMBOLS), "isolated"), fast.pre_tokenizer])


def _add_tokens(fast: Any, slow: Any) -> None:
    """Add the added and special tokens, which PaddleNLP's conversion omits."""
    for token_id, token in sorted(slow.added_tokens_decoder.items()):
        content = str(getattr(token, "content", token))
        (fast.add_special_tokens if content in slow.all_special_tokens else fast.add_tokens)([content])
        if fast.token_to_id(content) != token_id:
            raise SystemExit(f"added token {content!r} cannot have the id {token_id}")
    fast.add_special_tokens([token for token in slow.all_special_tokens if fast.token_to_id(token) is not None])


if __name__ == "__main__":
    convert(*sys.argv[1:])
