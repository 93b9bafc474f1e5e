# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenization: the cost per token does not depend on the length of the text."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence

from fastdeploy.detokenize.tokenizer import Tokenizer

NUM_CONTEXT_TOKENS = 6  # tokens before those to decode, because decoders treat the start of a text specially
MAX_HELD_TOKENS = 8  # a character has at most 4 bytes, so more tokens would not complete it
REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Decodes the tokens emitted after a prompt.

    The texts of `push` and `flush`, joined, are what the emitted tokens add to the decoded prompt. An incomplete
    character is held back until it is complete. In a run of byte-fallback tokens, complete characters are returned at
    once; bytes after them that are not valid UTF-8 become U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        visible_token_ids: Collection[int] = (),
    ) -> None:
        """Create a detokenizer.

        Args:
            prompt_token_ids: tokens before the output; only the last few are used.
            skip_special_tokens: leave special tokens out of the text, except `visible_token_ids`.
        """
        make = _ByteDecoder if tokenizer.is_byte_level else _WindowDecoder
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if visible_token_ids:
            self._skipped = self._skipped.difference(visible_token_ids)
        self._decoder: _ByteDecoder | _WindowDecoder = make(tokenizer, self._context(prompt_token_ids))

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the new text."""
        return self._decoder.push([token_id for token_id in token_ids if self._has_text(token_id)])

    def flush(self) -> str:
        """Return the text that is held back, at the end."""
        return self._decoder.flush()

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.has_token(token_id)

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt, starting with one that starts a character."""
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._has_text(token_id):
                tail.append(token_id)
                if len(tail) >= NUM_CONTEXT_TOKENS and not self._tokenizer.is_byte_fallback(token_id):
                    break
        return tail[::-1]


class _ByteDecoder:
    """Decodes tokens that are byte strings as a stream of UTF-8."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.push(context)  # the decoder keeps an incomplete character at the end of the prompt

    def push(self, token_ids: list[int]) -> str:
        token_bytes = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join([token_bytes(token_id) for token_id in token_ids]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowDecoder:
    """Decodes tokens whose text depends on their neighbours, in a short window.

    The window is context | held: tokens whose text has been returned, then tokens whose text has not. The context
    consists of groups of tokens whose text was returned together, so that it never starts within a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._group_sizes: deque[int] = deque([len(context)])
        self._held: list[int] = []

    def push(self, token_ids: list[int]) -> str:
        return "".join([self._push_token(token_id) for token_id in token_ids])

    def _push_token(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._held_text()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        self._move_held()
        return text

    def flush(self) -> str:
        text = self._held_text() if self._held else ""
        self._move_held()
        return text

    def _held_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        after = self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)
        return after[len(before) :]

    def _move_held(self) -> None:
        self._context += self._held
        self._group_sizes.append(len(self._held))
        self._held = []
        while len(self._context) - self._group_sizes[0] >= NUM_CONTEXT_TOKENS:
            del self._context[: self._group_sizes.popleft()]
