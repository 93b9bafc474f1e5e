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
)


def convert(folder: str, file: str) -> None:
    """Write the tokenizer that PaddleNLP finds in `folder`; refuse one that does not give the same ids afterwards."""
    from paddlenlp.transformers import AutoTokenizer
    from paddlenlp.transformers.convert_slow_tokenizer import convert_slow_tokenizer

    slow = AutoTokenizer.from_pretrained(folder)
    fast = convert_slow_tokenizer(slow)
    _add_tokens(fast, slow)
    for text in SAMPLES:
        expected, found = slow(text)["input_ids"], fast.encode(text).ids
        if list(expected) != list(found):
            raise SystemExit(f"the result gives other ids than {type(slow).__name__} for {text!r}")
    fast.save(file)


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
