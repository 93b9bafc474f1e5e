# SPDX-License-Identifier: Apache-2.0
"""Run by paddlenlp_tokenizer.py in an environment that has PaddleNLP: writes a folder's tokenizer as tokenizer.json.

    python paddlenlp_convert.py FOLDER TOKENIZER_JSON

It imports nothing of this package, which that environment need not have.
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
SPLIT_SYMBOLS = (
    r"\p{S}|[\u00AD\u00B2\u00BA\u3007\u00B5\u00D8\u014B\u01B1]"  # each a word of its own, as PaddleNLP has it
)


def convert(folder: str, file: str) -> None:
    """Write the tokenizer that PaddleNLP finds in `folder`; refuse one that does not give the same ids afterwards."""
    from paddlenlp.transformers import AutoTokenizer
    from paddlenlp.transformers.convert_slow_tokenizer import convert_slow_tokenizer

    slow = AutoTokenizer.from_pretrained(folder)
    fast = convert_slow_tokenizer(slow)
    if hasattr(slow, "basic_tokenizer"):
        _split_symbols(fast)
    _add_tokens(fast, slow)
    for text in SAMPLES:
        expected, found = slow(text)["input_ids"], fast.encode(text).ids
        if list(expected) != list(found):
            raise SystemExit(f"the result gives other ids than {type(slow).__name__} for {text!r}")
    fast.save(file)


def _split_symbols(fast: Any) -> None:
    """Repair what PaddleNLP's conversion of BERT-like tokenizers leaves out."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    fast.pre_tokenizer = Sequence([Split(Regex(SPLIT_SYMBOLS), "isolated"), fast.pre_tokenizer])


def _add_tokens(fast: Any, slow: Any) -> None:
    """Give the converted tokenizer the added and the special tokens, which the conversion leaves out."""
    for token_id, token in sorted(slow.added_tokens_decoder.items()):
        content = str(getattr(token, "content", token))
        (fast.add_special_tokens if content in slow.all_special_tokens else fast.add_tokens)([content])
        if fast.token_to_id(content) != token_id:
            raise SystemExit(f"added token {content!r} cannot have the id {token_id}")
    fast.add_special_tokens([token for token in slow.all_special_tokens if fast.token_to_id(token) is not None])


if __name__ == "__main__":
    convert(*sys.argv[1:])
