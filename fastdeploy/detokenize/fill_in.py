# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle prompts, for models trained to generate the text between a prefix and a suffix."""

from __future__ import annotations

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize.tokenizer import Tokenizer

MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""Tokens before the prefix, the suffix and the output, in the spellings of published vocabularies."""


def fill_in_prompt(tokenizer: Tokenizer, prefix: str, suffix: str, add_special_tokens: bool = True) -> list[int]:
    """Return the tokens of a prompt whose output is the text between `prefix` and `suffix`.

    Raises:
        InvalidRequestError: the vocabulary has no fill-in-the-middle tokens.
    """
    for markers in MARKERS:
        found = [tokenizer.find_token(marker) for marker in markers]
        ids = [token_id for token_id in found if token_id is not None]
        if tuple(map(tokenizer.token_text, ids)) == markers:
            begin = tokenizer.encode("", add_special_tokens)
            prefix_ids = tokenizer.encode(prefix, False, "prompt")
            suffix_ids = tokenizer.encode(suffix, False, "suffix")
            return [*begin, ids[0], *prefix_ids, ids[1], *suffix_ids, ids[2]]
    raise InvalidRequestError("suffix", "this model has no tokens for fill-in-the-middle prompts")
