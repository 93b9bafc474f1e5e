# SPDX-License-Identifier: Apache-2.0
"""Where tokens begin in the text that a client gets, which leaves some tokens out and decodes others differently."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.tokenizer import Tokenizer

MAX_SKIPPED = 64  # characters of a prompt that no token has, because they are unknown or were removed by a normalizer
SPACE = "\u2581"  # vocabularies with this character for spaces cannot tell the two apart


class TextOffsets:
    """The offsets of output tokens in a text of which they are the end.

    A token that is not in the text has the offset of the text after it, and so has each token of one character.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, num_before: int
    ) -> None:
        """Create the offsets of an output; `num_before` characters of the text come before it."""
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens, params.visible_token_ids
        )
        self._length = num_before

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Append tokens; return their offsets."""
        return [self._push_token(token_id) for token_id in token_ids]

    def _push_token(self, token_id: int) -> int:
        piece = self._detokenizer.push([token_id])
        begin = self._length + _num_chars_before(piece, self._tokenizer.token_text(token_id))
        self._length += len(piece)
        return begin


def _num_chars_before(piece: str, token_text: str) -> int:
    """Return the length of what precedes a token in the text that it completes: characters that were incomplete."""
    return len(piece) - len(token_text) if token_text and piece.endswith(token_text) else 0


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str, added: Sequence[int] = ()) -> list[int]:
    """Return where the tokens of a prompt begin in its text.

    Normalizers may have changed characters, and special tokens may have been added: a token whose text does not follow
    has the offset at which the next one is searched.

    Args:
        added: tokens with which the tokenizer begins every prompt, whatever its text is.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    offsets, position = [], 0
    num_added = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(added, token_ids)))
    text = text.replace(SPACE, " ")
    for i, token_id in enumerate(token_ids):
        name = tokenizer.token_text(token_id)
        piece = detokenizer.push([token_id]).replace(SPACE, " ")
        if token_id in tokenizer.special_ids:
            position = min(position + _num_chars_before(piece, name), len(text))
            begin, end = (_find(text, name, position) if i >= num_added else None) or (position, position)
        else:
            begin, end = _find(text, piece, position) or (position, min(position + len(piece), len(text)))
            begin += _num_chars_before(piece, name)
        offsets.append(begin)
        position = end
    return offsets


def _find(text: str, piece: str, position: int) -> tuple[int, int] | None:
    """Return begin and end of a piece in the text, at a position or soon after it; None if it is not there."""
    for candidate in (piece, piece.removeprefix(" ")):  # tokenizers may have put a space before it
        if text.startswith(candidate, position):
            return position, position + len(candidate)
    begin = text.find(piece, position, position + len(piece) + MAX_SKIPPED)
    return None if begin < 0 else (begin, begin + len(piece))
