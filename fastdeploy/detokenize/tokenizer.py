# SPDX-License-Identifier: Apache-2.0
"""A tokenizer read from a Hugging Face style folder, and its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from fastdeploy.detokenize.chat_template import DEFAULT, ChatTemplates, Conversation
from fastdeploy.detokenize.json_file import read_json
from fastdeploy.detokenize.tokenizer_files import load_backend, read_tokenizer_config

CHAT_TEMPLATE_FILE = "chat_template.jinja"
MORE_CHAT_TEMPLATES = "additional_chat_templates"
_BYTE_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Text to token ids and back; its methods may be called from several threads.

    Attributes:
        vocab_size: one above the largest id that the tokenizer knows; ids from here on are never sampled.
        special_ids: ids left out of the text when special tokens are skipped.
        special_tokens: name (`bos_token`, ...) to text, as far as the folder says.
        eos_token_id: id of the end token, or None.
        is_byte_level: True when every token is a fixed byte string, whatever its neighbours.
        chat_templates: the chat templates that the folder brought.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a loaded `tokenizers.Tokenizer`; truncation and padding stored in its file are switched off.

        Args:
            chat_template: one template, or several by name.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_tokens = dict(special_tokens or {})
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        eos = self.special_tokens.get("eos_token")
        self.eos_token_id: int | None = backend.token_to_id(eos) if eos is not None else None
        self.is_byte_level = _is_byte_level(json.loads(backend.to_str()).get("decoder"))
        sources = {DEFAULT: chat_template} if isinstance(chat_template, str) else chat_template or {}
        self.chat_templates = ChatTemplates(sources, self.special_tokens)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer, tokenizer_config.json and the chat templates of the folder `path`.

        Raises:
            ConfigError: the folder has no tokenizer in a form that is read, or a file in it cannot be read.
        """
        folder = Path(path)
        config = read_tokenizer_config(folder)
        backend, special_tokens = load_backend(folder, config)
        return cls(backend, special_tokens, _chat_templates(folder, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token, in bytes if `is_byte_level`, else in characters."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids that the tokenizer does not know are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token on its own, special or not; half characters show as U+FFFD."""
        if self.is_byte_level:
            return self.token_bytes(token_id).decode("utf-8", errors="replace")
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        if token_id in self.special_ids:
            return str(token)
        text = self.decode([token_id], skip_special_tokens=False)
        return " " + text if token.startswith("\u2581") and not text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for ids that the tokenizer does not know."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._make_token_bytes(token_id)
        return known

    def _make_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_fallback(token_id):
            return bytes([int(token[3:5], 16)])
        if not self.is_byte_level:
            return self.token_text(token_id).encode("utf-8")
        table = _byte_of_char()
        if all(char in table for char in token):
            return bytes(table[char] for char in token)
        return bytes(token.encode("utf-8"))

    def has_token(self, token_id: int) -> bool:
        """Return True for ids that stand for a token; the ids below `vocab_size` may have gaps."""
        return bool(self.token_bytes(token_id)) or self._backend.id_to_token(token_id) is not None

    def vocabulary(self) -> dict[str, int]:
        """Return every token, as the tokenizer's file writes it, with its id."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def is_byte_fallback(self, token_id: int) -> bool:
        """Return True for tokens that stand for one byte each (`<0xE4>`) in vocabularies with byte fallback."""
        token = self._backend.id_to_token(token_id)
        return not self.is_byte_level and token is not None and _BYTE_FALLBACK.fullmatch(token) is not None

    def special_ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """Return text -> id of those texts that are special tokens."""
        ids = {text: self._backend.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in ids.items() if token_id in self.special_ids}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render a conversation into the prompt's text.

        Args:
            messages: mappings with `role` and `content`.
            add_generation_prompt: end with the opening of the assistant's turn.
            chat_template: a template to use instead of the tokenizer's own, or the name of one of its own.
            tools: the functions that may be called, in OpenAI's shape.
            continue_final_message: end within the last message, so that the output goes on with it.
            kwargs: further names that the template may read.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        conversation = Conversation(messages, add_generation_prompt, continue_final_message, tools, kwargs)
        return self.chat_templates.render(conversation, self.chat_templates.source(chat_template, bool(tools)))


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates' sources by name: those of the configuration, then files of their own, which win."""
    given = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    named = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
    pairs = [(item.get("name"), item.get("template")) for item in named if isinstance(item, Mapping)]
    found = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    for file in sorted((folder / MORE_CHAT_TEMPLATES).glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        found[DEFAULT] = (folder / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
    return found


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Return the byte behind each character of byte-level vocabularies (GPT-2): itself if printable, else 256 + k."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + k): byte for k, byte in enumerate(rest)})
    return table
