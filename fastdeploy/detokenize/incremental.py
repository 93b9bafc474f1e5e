# SPDX-License-Identifier: Apache-2.0
"""Turns a growing list of token ids into a growing text, at a cost per token that does not depend on the length."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence

from fastdeploy.detokenize.tokenizer import Tokenizer

NUM_CONTEXT_TOKENS = 6  # of what came before, so that a decoder sees that it is not at the beginning
MAX_HELD_TOKENS = 8  # a character has at most 4 bytes: a longer tail that is no character never becomes one
REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Text of the tokens emitted after a prompt.

    The texts that `push` and `flush` return, joined, are what the emitted tokens add to the decoded prompt. Half a
    character waits for its other half. In a run of byte-fallback tokens, whole characters are given out at once; bytes
    after them that form none become U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        visible_token_ids: Collection[int] = (),
    ) -> None:
        """Start after `prompt_token_ids`, of which only the last few are looked at; some special tokens may be kept."""
        make = _ByteStream if tokenizer.is_byte_level else _WindowStream
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if visible_token_ids:
            self._skipped = self._skipped.difference(visible_token_ids)
        self._stream: _ByteStream | _WindowStream = make(tokenizer, self._context(prompt_token_ids))

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that is certain now and was not before."""
        return self._stream.push([token_id for token_id in token_ids if self._has_text(token_id)])

    def flush(self) -> str:
        """Return what was held back, at the end."""
        return self._stream.flush()

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.has_token(token_id)

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the end of the prompt, beginning at a token that begins a character."""
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._has_text(token_id):
                tail.append(token_id)
                if len(tail) >= NUM_CONTEXT_TOKENS and not self._tokenizer.is_byte_fallback(token_id):
                    break
        return tail[::-1]


class _ByteStream:
    """Every token is a byte string: decode UTF-8 as it comes."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.push(context)  # leaves in the decoder the first half of a character that the prompt ends in

    def push(self, token_ids: list[int]) -> str:
        token_bytes = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join([token_bytes(token_id) for token_id in token_ids]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowStream:
    """The text of a token depends on its neighbours: decode a short window and give out what it gained.

    The window is context | held: tokens whose text is out, then tokens whose text is not. The context consists of
    groups of tokens whose text came out together, so that it never begins inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._group_sizes: deque[int] = deque([len(context)])
        self._held: list[int] = []

    def push(self, token_ids: list[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._gain()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._gain() if self._held else ""
        self._advance()
        return text

    def _gain(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        after = self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)
        return after[len(before) :]

    def _advance(self) -> None:
        self._context += self._held
        self._group_sizes.append(len(self._held))
        self._held = []
        while len(self._context) - self._group_sizes[0] >= NUM_CONTEXT_TOKENS:
            del self._context[: self._group_sizes.popleft()]
