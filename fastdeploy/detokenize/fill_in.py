# SPDX-License-Identifier: Apache-2.0
"""Prompts that ask for the text between a prefix and a suffix, for models trained to fill in."""

from __future__ import annotations

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize.tokenizer import Tokenizer

MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""Tokens before the prefix, before the suffix and before the text that is asked for, as vocabularies have them."""


def fill_in_prompt(tokenizer: Tokenizer, prefix: str, suffix: str, add_special_tokens: bool = True) -> list[int]:
    """Return the tokens of a prompt whose continuation is what stands between `prefix` and `suffix`.

    Raises:
        InvalidRequestError: the vocabulary has no tokens that mark such prompts.
    """
    for markers in MARKERS:
        marked = [tokenizer.encode(marker, add_special_tokens=False) for marker in markers]
        if all(
            len(token_ids) == 1 and tokenizer.token_text(token_ids[0]) == marker
            for token_ids, marker in zip(marked, markers)
        ):
            before, between, end = marked
            opening = tokenizer.encode("", add_special_tokens)
            inside = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
            return [*opening, *before, *inside[0], *between, *inside[1], *end]
    raise InvalidRequestError("suffix", "this model has no tokens that mark the place of a text to fill in")
