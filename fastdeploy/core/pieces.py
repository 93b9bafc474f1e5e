# SPDX-License-Identifier: Apache-2.0
"""Entries of SentencePiece vocabularies, as model files and GGUF files list them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class PieceKind(IntEnum):
    """The type of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def rank_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces whose concatenation is a piece, in the order in which BPE merges them.

    SentencePiece merges the pair with the best score first, and of equal ones the leftmost; `tokenizers` uses the order
    of a list. Of equal scores the longest piece comes first, so that a run of one character, such as spaces, grows
    from its left end in both.

    Args:
        scores: text -> score of the pieces that text can become, in the order of their ids.
    """
    ranked = []
    for index, (text, score) in enumerate(scores.items()):
        for i in range(1, len(text)):
            if text[:i] in scores and text[i:] in scores:
                ranked.append((-score, -len(text), index, i, text))
    return [(text[:i], text[i:]) for _, _, _, i, text in sorted(ranked)]
