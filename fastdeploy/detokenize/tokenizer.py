# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a folder in Hugging Face format, with its chat templates."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tokenizers

from fastdeploy.core.errors import ConfigError, InvalidRequestError
from fastdeploy.core.json_types import check_unicode
from fastdeploy.core.panics import RustPanicError, convert_panics
from fastdeploy.detokenize.chat_template import DEFAULT, ChatTemplates, Conversation
from fastdeploy.detokenize.json_file import read_json
from fastdeploy.detokenize.token_names import read_tokenizer_config
from fastdeploy.detokenize.tokenizer_files import load_backend
from fastdeploy.detokenize.tokenizer_limits import longest_inserted

CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"
MANY_TOKENS = 4096  # are decoded without the interpreter's lock
LENGTH_SLACK = 4
MAX_TEXT_LENGTH = 2**20  # tokenizing takes up to 400 bytes and a microsecond per character
MAX_CHARACTERS_PER_TOKEN = 16
LONGEST_EXPANSION = "\ufdfa"  # one character for which compatible normalization (NFKC) writes this many:
LONGEST_COMPATIBLE = 18
MAX_EXPANSION = 4  # characters that other kinds of normalization write for one
MIN_EXPANDED_LENGTH = 2**14  # characters; normalizing shorter texts costs little, however long they become
_BYTE_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Converts text to token ids and back. Thread-safe.

    Attributes:
        vocab_size: the largest id plus one; larger ids are never sampled.
        max_token_length: of the longest token, in bytes if `is_byte_level`, otherwise in characters.
        special_ids: ids of special tokens, which `decode` can skip.
        special_tokens: name, such as `bos_token`, -> text.
        eos_token_id: id of the EOS token, or None.
        is_byte_level: whether every token is a fixed byte string, independent of its neighbours.
        chat_templates: the chat templates of the folder.
        config: what `read_tokenizer_config` returns for the folder.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`, without the truncation and padding that its file may specify.

        Args:
            special_tokens: name -> text.
            chat_template: a template, or name -> template.
            config: the attribute.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_length = max(map(len, vocab), default=1)
        self.special_tokens = dict(special_tokens or {})
        self.config = dict(config or {})
        self.special_ids = _special_ids(backend)
        eos = self.special_tokens.get("eos_token")
        self.eos_token_id: int | None = backend.token_to_id(eos) if eos is not None else None
        decoder = backend.decoder
        self.is_byte_level = decoder is not None and _is_byte_level(json.loads(decoder.__getstate__()))
        templates = {DEFAULT: chat_template} if isinstance(chat_template, str) else chat_template or {}
        self.chat_templates = ChatTemplates(templates, self.special_tokens)
        self._token_bytes: dict[int, bytes] = {}
        normalizer = backend.normalizer
        self._expands = normalizer is not None and len(normalizer.normalize_str(LONGEST_EXPANSION)) > MAX_EXPANSION
        most = LONGEST_COMPATIBLE if self._expands else MAX_EXPANSION
        self._inserts = normalizer is not None and longest_inserted(normalizer) > most

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer, tokenizer_config.json and the chat templates of a folder.

        Raises:
            ConfigError: the folder has no tokenizer in a supported format, or a file cannot be read.
        """
        try:
            return cls._load(Path(path))
        except RustPanicError as error:
            raise ConfigError("tokenizer", f"cannot read the tokenizer of {str(path)!r}: {error!s:.300}") from error

    @classmethod
    @convert_panics
    def _load(cls, folder: Path) -> Tokenizer:
        config = read_tokenizer_config(folder)
        backend, special_tokens = load_backend(folder, config)
        return cls(backend, special_tokens, _chat_templates(folder, config), config)

    @property
    def num_base_tokens(self) -> int:
        """Number of tokens without those that were added to the vocabulary."""
        return int(self._backend.get_vocab_size(with_added_tokens=False))

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "text") -> list[int]:
        """Return the token ids of `text`; other threads run meanwhile.

        Args:
            field: name of the text in errors.

        Raises:
            InvalidRequestError: the text has a lone surrogate, or the library cannot encode it: a pattern of the
                tokenizer takes too many steps, or the vocabulary has no token for a character.
        """
        check_unicode(field, text)
        try:
            return self._encode(text, add_special_tokens)
        except Exception as error:  # the library raises bare Exception
            reason = f"{error.__cause__ or error!s:.300}"
            raise InvalidRequestError(field, f"the tokenizer of this model cannot encode it: {reason}") from error

    @convert_panics
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids that `Tokenizer.encode` of the library gives.

        That function takes longer, because it also computes the position of each token, and holds the interpreter's
        lock.
        """
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def max_text_length(self, max_tokens: int) -> int:
        """Return the maximum length, in characters, of a text that should have at most `max_tokens` tokens.

        It is `LENGTH_SLACK` of the longest tokens for each token: the slack is for normalizers, and for tokens that
        absorb white space around them. Memory limits it to the larger of `MAX_TEXT_LENGTH` and
        `MAX_CHARACTERS_PER_TOKEN` for each token.
        """
        longest = LENGTH_SLACK * self.max_token_length * max_tokens
        return min(longest, max(MAX_TEXT_LENGTH, MAX_CHARACTERS_PER_TOKEN * max_tokens))

    def text_length(self, text: str) -> int:
        """Return the number of characters of a text, after normalization if that can make it much longer."""
        if self._inserts:
            try:
                return self._sum_lengths(text, self._backend.normalizer.normalize_str)
            except RustPanicError:  # `encode` fails for the same reason, and says so
                return len(text)
        if not self._expands or len(text) < MIN_EXPANDED_LENGTH or text.isascii():
            return len(text)
        return self._sum_lengths(text, partial(unicodedata.normalize, "NFKC"))

    @convert_panics
    def _sum_lengths(self, text: str, normalize: Callable[[str], str]) -> int:
        starts = range(0, len(text), MIN_EXPANDED_LENGTH)  # other threads run between two parts
        return sum(len(normalize(text[start : start + MIN_EXPANDED_LENGTH])) for start in starts)

    @convert_panics
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, ignoring unknown ids."""
        if len(token_ids) < MANY_TOKENS:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        [text] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not; incomplete characters become U+FFFD."""
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
        """Return the bytes of one token; empty for unknown ids."""
        cached = self._token_bytes.get(token_id)
        if cached is None:
            cached = self._token_bytes[token_id] = self._compute_token_bytes(token_id)
        return cached

    def _compute_token_bytes(self, token_id: int) -> bytes:
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
        """Return whether the id belongs to a token; ids below `vocab_size` may be unused."""
        return bool(self.token_bytes(token_id)) or self._backend.id_to_token(token_id) is not None

    def digest(self) -> str:
        """Return a digest of everything that decides how texts become tokens, and tokens texts."""
        settings = f"{self._backend.to_str()}{self._backend.encode_special_tokens}"
        return blake2b(settings.encode(), digest_size=8).hexdigest()

    def vocabulary(self) -> dict[str, int]:
        """Return token -> id, with tokens as in the tokenizer's file."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Return id -> token of those that were added to the vocabulary, special or not."""
        return dict(self._backend.get_added_tokens_decoder())

    def is_byte_fallback(self, token_id: int) -> bool:
        """Return whether the token is a single byte, such as `<0xE4>`, of a vocabulary with byte fallback."""
        token = self._backend.id_to_token(token_id)
        return not self.is_byte_level and token is not None and _BYTE_FALLBACK.fullmatch(token) is not None

    def find_token(self, text: str) -> int | None:
        """Return the id of the token whose text this is; None if it is encoded as several tokens.

        Special tokens are found even if the tokenizer splits them in texts (`split_special_tokens`).
        """
        token_id = self._backend.token_to_id(text)
        if token_id is not None and token_id in self.special_ids:
            return int(token_id)
        token_ids = self.encode(text, add_special_tokens=False)
        return token_ids[0] if len(token_ids) == 1 else None

    def find_special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Return text -> id for the texts that are special tokens."""
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
        """Render a conversation as the text of a prompt; the template gets the messages as they are.

        Args:
            messages: mappings with `role` and `content`.
            add_generation_prompt: end with the start of the assistant's message.
            chat_template: a template, or the name of one of the tokenizer's; by default, the tokenizer's.
            tools: function definitions in OpenAI's format.
            continue_final_message: end within the last message, which the output continues.
            kwargs: further variables of the template.

        Raises:
            InvalidRequestError: there is no template, or it rejects the messages.
        """
        conversation = Conversation(
            messages, add_generation_prompt, continue_final_message, tools, kwargs, is_sent_as_given=True
        )
        return self.chat_templates.render(conversation, self.chat_templates.select(chat_template, bool(tools)))


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> template, from tokenizer_config.json and from template files, which take precedence."""
    configured = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    named = configured if isinstance(configured, list) else [{"name": DEFAULT, "template": configured}]
    pairs = [(item.get("name"), item.get("template")) for item in named if isinstance(item, Mapping)]
    templates = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    for file in sorted((folder / CHAT_TEMPLATE_FOLDER).glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        templates[DEFAULT] = (folder / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
    return templates


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the ids that the library's `decode` skips.

    The flags of the tokens do not tell: a token stays special if it is added again without its flag, and one whose text
    the normalizer changes is never skipped.
    """

    def is_skipped(token_id: int, token: tokenizers.AddedToken) -> bool:
        if not backend.decode([token_id], skip_special_tokens=False):
            return bool(token.special)
        return not backend.decode([token_id], skip_special_tokens=True)

    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if is_skipped(token_id, token))


def _is_byte_level(decoder: Mapping[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Return character -> byte of byte-level vocabularies: printable bytes stand for themselves, others are 256 + k."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + k): byte for k, byte in enumerate(rest)})
    return table
