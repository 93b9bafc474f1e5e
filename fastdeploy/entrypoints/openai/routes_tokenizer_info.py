# SPDX-License-Identifier: Apache-2.0
"""GET /tokenizer_info, which a server has with --enable-tokenizer-info-endpoint."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from fastdeploy.detokenize.chat_template import DEFAULT
from fastdeploy.detokenize.token_names import unnamed_tokens
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.clients import client_of
from fastdeploy.entrypoints.openai.openapi import Endpoint
from fastdeploy.entrypoints.openai.responses import ResponseBody
from fastdeploy.entrypoints.openai.routes_info import json_response, server_of
from fastdeploy.entrypoints.openai.threads import run_in_thread

DEFAULT_CLASS = "PreTrainedTokenizerFast"  # of folders that name no class
MAX_INTEGER = 2**63 - 1  # larger ones stand for no limit
SWITCHES = (
    *("add_bos_token", "add_eos_token", "add_prefix_space"),
    *("clean_up_tokenization_spaces", "split_special_tokens"),
)
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class AddedTokenInfo(ResponseBody, kw_only=True):
    """A token that was added to the vocabulary, and its flags as in tokenizer_config.json."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class TokenizerInfoResponse(ResponseBody, kw_only=True):
    """Body of GET /tokenizer_info: what tokenizer_config.json says, as this server uses it.

    Attributes:
        tokenizer_class: the class of transformers that the model names
        model_max_length: the tokenizer's own limit, which is not that of the context
        add_bos_token, add_eos_token, add_prefix_space, clean_up_tokenization_spaces, split_special_tokens: left out
            if the file does not say
        errors: what decoding does with incomplete characters
        bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token: texts; left out if there is none
        additional_special_tokens: special tokens without a name
        added_tokens_decoder: id to token
        chat_template: the one that renders conversations; left out if there is none
    """

    tokenizer_class: str
    model_max_length: int | UnsetType = UNSET
    add_bos_token: bool | UnsetType = UNSET
    add_eos_token: bool | UnsetType = UNSET
    add_prefix_space: bool | UnsetType = UNSET
    clean_up_tokenization_spaces: bool | UnsetType = UNSET
    split_special_tokens: bool | UnsetType = UNSET
    errors: str | UnsetType = UNSET
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET
    unk_token: str | UnsetType = UNSET
    sep_token: str | UnsetType = UNSET
    pad_token: str | UnsetType = UNSET
    cls_token: str | UnsetType = UNSET
    mask_token: str | UnsetType = UNSET
    additional_special_tokens: list[str]
    added_tokens_decoder: dict[str, AddedTokenInfo]
    chat_template: str | UnsetType = UNSET


async def tokenizer_info(request: Request) -> Response:
    """Return the settings of the tokenizer and the chat template."""
    server, client = server_of(request), client_of(request.scope)
    body = await run_in_thread(client.id, client.weight, describe_tokenizer, server.tokenizer, server.chat_template)
    return json_response(body)


def describe_tokenizer(tokenizer: Tokenizer, chat_template: str | None) -> TokenizerInfoResponse:
    """Return what tokenizer_config.json says of a tokenizer.

    Args:
        chat_template: used instead of the tokenizer's; None uses that one.
    """
    template = chat_template if chat_template is not None else tokenizer.chat_templates.templates.get(DEFAULT)
    known = TokenizerInfoResponse.__struct_fields__
    named = {name: text for name, text in tokenizer.special_tokens.items() if name in known}
    return TokenizerInfoResponse(
        **(_settings(tokenizer.config) | named),
        additional_special_tokens=[token.content for token in unnamed_tokens(tokenizer.config)],
        added_tokens_decoder={
            str(token_id): AddedTokenInfo(content=token.content, **{name: getattr(token, name) for name in TOKEN_FLAGS})
            for token_id, token in sorted(tokenizer.added_tokens().items())
        },
        chat_template=template if template is not None else UNSET,
    )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file whose values have the types of tokenizers."""
    name, limit, errors = (config.get(key) for key in ("tokenizer_class", "model_max_length", "errors"))
    settings: dict[str, Any] = {"tokenizer_class": name if isinstance(name, str) and name else DEFAULT_CLASS}
    if isinstance(limit, int) and not isinstance(limit, bool) and 0 < limit <= MAX_INTEGER:
        settings["model_max_length"] = limit
    if isinstance(errors, str):
        settings["errors"] = errors
    return settings | {key: config[key] for key in SWITCHES if isinstance(config.get(key), bool)}


ENDPOINTS = (
    Endpoint(
        "/tokenizer_info",
        tokenizer_info,
        response=TokenizerInfoResponse,
        tag="Tokens",
        flag="enable_tokenizer_info_endpoint",
    ),
)
