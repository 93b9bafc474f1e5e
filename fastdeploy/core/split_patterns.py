# SPDX-License-Identifier: Apache-2.0
"""Regular expressions, in Oniguruma's syntax, by which byte-level tokenizers split text into words before BPE."""

from __future__ import annotations

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # also with U+017F, which is an S without case
ASCII_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


def words_pattern(contractions: str = "", number: str = r"\p{N}", letters: str = r"\p{L}") -> str:
    """Return the pattern of Qwen 2, or one of those that differ from it in a few places.

    Args:
        contractions: what is split off as the end of a contracted word.
        number: what is a word of digits.
        letters: the classes of characters that make a word.
    """
    words = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    symbols = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return "|".join(part for part in (contractions, words, number, symbols, *_SPACES) if part)


def cased_words_pattern(after: str = "", number: str = r"\p{N}") -> str:
    """Return the pattern of Tekken or GPT-4o as llama.cpp applies it: words also end before a capital letter.

    Letters outside ASCII count as both capital and small.

    Args:
        after: what may follow the letters of a word.
        number: what is a word of digits.
    """
    begin, capital, small = r"[^\r\n\p{L}\p{N}]?", r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
    words = (f"{begin}{capital}*{small}+{after}", f"{begin}{capital}+{small}*{after}")
    return "|".join((*words, number, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", *_SPACES))
