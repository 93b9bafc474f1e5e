# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a tokenizer, as llguidance requires it. It needs no NumPy."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fastdeploy.detokenize.tokenizer import Tokenizer


class Vocabulary:
    """The bytes of every token, and an encoder of bytes.

    llguidance requires an end token. It gets an additional id after the last one, because the constraint decides which
    of the model's tokens end a request, and when.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int]) -> None:
        """Take the bytes of ids 0 .. len(tokens) - 1, and the ids of the special tokens among them."""
        self._special = frozenset(special_ids)
        self._id_of = {token: i for i, token in reversed(list(enumerate(tokens))) if token and i not in self._special}
        self._max_token_bytes = max(map(len, self._id_of), default=0)
        self.tokens = [*tokens, b"<end of output>"]
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.special_token_ids = [*sorted(self._special), self.eos_token_id]

    @property
    def special_ids(self) -> dict[str, int]:
        """Return the ids of the special tokens by their text."""
        return {self.tokens[token_id].decode(errors="replace"): token_id for token_id in sorted(self._special)}

    def __call__(self, text: bytes) -> list[int]:
        """Return ids whose bytes are exactly `text`: the longest token that matches, again and again."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            lengths = range(min(self._max_token_bytes, len(text) - start), 0, -1)
            length = next((n for n in lengths if text[start : start + n] in self._id_of), 0)
            if length == 0:
                break
            ids.append(self._id_of[text[start : start + length]])
            start += length
        return ids


class TokenizerAdapter(Vocabulary):
    """A vocabulary that encodes like its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Read the bytes of ids 0 .. vocab_size - 1."""
        self._tokenizer = tokenizer
        special_ids = [token_id for token_id in tokenizer.special_ids if token_id < vocab_size]
        super().__init__([tokenizer.token_bytes(token_id) for token_id in range(vocab_size)], special_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Return ids whose bytes are exactly `text`.

        The tokenizer encodes the text. If it finds a special token in the text or adds a space at the front, the text
        is encoded greedily instead.
        """
        ids = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        is_plain = all(token_id < self.eos_token_id and token_id not in self._special for token_id in ids)
        if is_plain and b"".join(self.tokens[token_id] for token_id in ids) == text:
            return ids
        return super().__call__(text)
