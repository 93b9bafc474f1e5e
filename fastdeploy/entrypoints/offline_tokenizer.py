# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of `LLM.get_tokenizer`, with the methods, defaults and results of transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import shorten, to_integer, to_integers, to_list
from fastdeploy.detokenize.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
UNSUPPORTED = (
    "text_pair",
    "text_target",
    "text_pair_target",
    "padding",
    "truncation",
    "max_length",
    "stride",
    "is_split_into_words",
    "pad_to_multiple_of",
    "padding_side",
    "return_tensors",
    "return_token_type_ids",
    "return_overflowing_tokens",
    "return_special_tokens_mask",
    "return_offsets_mapping",
    "return_length",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
    "clean_up_tokenization_spaces",
)
"""Options of transformers' tokenizers that only have their default here."""


class BatchEncoding(dict[str, Any]):
    """Token ids (`input_ids`) and attention masks of one text or of a list; keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OfflineTokenizer:
    """The tokenizer of a loaded model, without the transformers package.

    Attributes:
        bos_token, eos_token, pad_token, unk_token: texts of special tokens; None if the model has none.
        bos_token_id, eos_token_id, pad_token_id, unk_token_id: their ids, or None.
        vocab_size: number of tokens without those that were added to the vocabulary; `len()` counts all.
        chat_template: the default template, or None.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocab = tokenizer.vocabulary()
        self._tokens = {token_id: token for token, token_id in self._vocab.items()}
        self.vocab_size = tokenizer.num_base_tokens
        special = tokenizer.special_tokens.get
        self.bos_token, self.eos_token = special("bos_token"), special("eos_token")
        self.pad_token, self.unk_token = special("pad_token"), special("unk_token")
        self.bos_token_id, self.eos_token_id = self._id(self.bos_token), self._id(self.eos_token)
        self.pad_token_id, self.unk_token_id = self._id(self.pad_token), self._id(self.unk_token)
        self.chat_template = tokenizer.chat_templates.templates.get("default")

    def __len__(self) -> int:
        return len(self._vocab)

    def encode(self, text: Any, *, add_special_tokens: bool = True, **options: Any) -> Any:
        """Return the token ids of a text, or of each text of a list.

        Args:
            add_special_tokens: add those that the model expects around a text, such as the BOS token.
            options: options of transformers; only their defaults are allowed.

        Raises:
            InvalidRequestError: `text` is neither, or an option is not supported.
        """
        _refuse(options)
        if isinstance(text, str):
            return self._tokenizer.encode(text, add_special_tokens)
        if not isinstance(text, Sequence) or not all(isinstance(item, str) for item in text):
            raise InvalidRequestError("text", f"expected a text or a list of texts, got {shorten(text)}")
        return [self._tokenizer.encode(item, add_special_tokens) for item in text]

    def __call__(
        self, text: Any, *, add_special_tokens: bool = True, return_attention_mask: bool | None = True, **options: Any
    ) -> BatchEncoding:
        """Return the token ids of a text or of a list of texts, with attention masks of ones.

        Raises:
            InvalidRequestError: as `encode`.
        """
        ids = self.encode(text, add_special_tokens=add_special_tokens, **options)
        return _encoding(ids, return_attention_mask is not False)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Return the text of a token id or of a list of them, or the texts of a list of such lists.

        Raises:
            InvalidRequestError: `token_ids` is none of these.
        """
        _refuse(options)
        token_id = to_integer(token_ids)
        ids = [token_id] if isinstance(token_id, int) else _ids_of(token_ids)
        if all(isinstance(item, int) for item in ids):
            return self._tokenizer.decode(ids, skip_special_tokens)
        return self.batch_decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Any], skip_special_tokens: bool = False, **options: Any) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(token_ids, skip_special_tokens, **options) for token_ids in sequences]

    def apply_chat_template(
        self,
        conversation: Messages | Sequence[Messages],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        *,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Render a conversation, or each of a list of conversations, with a chat template.

        Args:
            tools: function definitions in OpenAI's format; Python functions are refused.
            documents: for the template.
            chat_template: a template, or the name of one of the tokenizer's; by default, the tokenizer's.
            tokenize: return a `BatchEncoding`, or token ids if `return_dict` is false, instead of the text.
            kwargs: further variables of the template.

        Raises:
            InvalidRequestError: there are no messages or no template, or the template rejects the messages.
        """
        _refuse({name: kwargs.pop(name) for name in UNSUPPORTED if name in kwargs})
        if any(not isinstance(tool, Mapping) for tool in tools or ()):
            raise InvalidRequestError("tools", "expected function definitions in OpenAI's format")
        is_batch = bool(conversation) and not isinstance(conversation[0], Mapping)
        texts = []
        for messages in conversation if is_batch else [conversation]:
            if not messages:
                raise InvalidRequestError("conversation", "expected at least one message")
            texts.append(
                self._tokenizer.apply_chat_template(
                    messages,  # type: ignore[arg-type]
                    add_generation_prompt,
                    chat_template,
                    tools,
                    continue_final_message,
                    documents=documents,
                    **kwargs,
                )
            )
        prompt = texts if is_batch else texts[0]
        if not tokenize:
            return prompt
        ids = self.encode(prompt, add_special_tokens=False)
        return _encoding(ids, True) if return_dict else ids

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id, with tokens as in the tokenizer's file."""
        return dict(self._vocab)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token or of each token of a list; for an unknown one, `unk_token_id`."""
        if isinstance(tokens, str):
            return self._vocab.get(tokens, self.unk_token_id)
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the token of an id or of each id of a list, as in the tokenizer's file; None for an unknown id.

        Raises:
            InvalidRequestError: `ids` is neither.
        """
        token_id = to_integer(ids)
        if isinstance(token_id, int):
            return self._tokens.get(token_id)
        token_ids = _ids_of(ids)
        for item in token_ids:
            if not isinstance(item, int):
                raise InvalidRequestError("ids", f"expected token ids, got {shorten(item)}")
        return [self._tokens.get(item) for item in token_ids]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._vocab.get(token)


def _ids_of(token_ids: Any) -> list[Any]:
    return to_integers(to_list("token_ids", token_ids, "expected a token id or a list of token ids"))


def _encoding(ids: Any, has_mask: bool) -> BatchEncoding:
    encoding = BatchEncoding(input_ids=ids)
    if has_mask:
        is_batch = bool(ids) and isinstance(ids[0], list)
        encoding["attention_mask"] = [[1] * len(row) for row in ids] if is_batch else [1] * len(ids)
    return encoding


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for an option that is unknown, or has another value than a default."""
    for name, value in options.items():
        if name not in UNSUPPORTED:
            raise InvalidRequestError(name, "is not an option of this tokenizer")
        if value:
            raise InvalidRequestError(name, "is not supported; load the model's folder with transformers for it")
