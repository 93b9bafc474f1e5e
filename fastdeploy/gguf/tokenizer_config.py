# SPDX-License-Identifier: Apache-2.0
"""Makes tokenizer_config.json from the metadata of a GGUF file, and says which tokens end the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy.gguf.special_tokens import SPECIAL_KINDS, end_ids, token_kinds
from fastdeploy.gguf.tokenizer import added_tokens
from fastdeploy.gguf.vocabulary import Vocabulary, read_vocabulary

TEMPLATE_KEY, TEMPLATE_NAMES_KEY = "tokenizer.chat_template", "tokenizer.chat_templates"
_DEFAULT = "default"
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad", "mask": "mask"}
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # of SentencePiece


def make_tokenizer_config(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: named special tokens, which are added, and chat templates.

    A token that the file does not call special gets no name: files whose padding token is token 0, an exclamation mark,
    are common, and a name would hide it in all answers.

    Args:
        where: the file's name, with which messages begin.

    Raises:
        ConfigError: the tokenizer is not supported, or keys contradict each other.
    """
    vocabulary = read_vocabulary(metadata, where)
    kinds, texts = token_kinds(vocabulary), list(vocabulary.ids)
    before, after = added_tokens(vocabulary)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"add_bos_token": before is not None, "add_eos_token": after is not None}
    for key, name in _NAMES.items():
        token_id = vocabulary.token_id(key, None if vocabulary.is_byte_level else _DEFAULT_IDS.get(key))
        if token_id is not None and kinds[token_id] in SPECIAL_KINDS:
            config[f"{name}_token"] = texts[token_id]
    bos = config.get("bos_token") if config["add_bos_token"] else None
    templates = {name: _with_bos(text, bos) for name, text in _read_templates(vocabulary).items()}
    if templates.keys() == {_DEFAULT}:
        config["chat_template"] = templates[_DEFAULT]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def end_token_ids(metadata: Mapping[str, Any], where: str) -> list[int]:
    """Return the ids of the tokens that end the output, for generation_config.json; see `end_ids`.

    Raises:
        ConfigError: the tokenizer is not supported, or the file names a token that it does not have.
    """
    return end_ids(read_vocabulary(metadata, where))


def _read_templates(vocabulary: Vocabulary) -> dict[str, str]:
    """Return name -> template."""
    metadata = vocabulary.metadata
    names = metadata.get(TEMPLATE_NAMES_KEY, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        vocabulary.refuse(TEMPLATE_NAMES_KEY, f"expected a list of names, got {names!r:.60}")
    keys = {_DEFAULT: TEMPLATE_KEY} if TEMPLATE_KEY in metadata else {}
    prefix = f"{TEMPLATE_KEY}."
    keys |= {key.removeprefix(prefix): key for key in metadata if key.startswith(prefix)}
    for name in names:
        if f"{prefix}{name}" not in metadata:
            vocabulary.refuse(f"{prefix}{name}"[:100], f"is missing; {TEMPLATE_NAMES_KEY} names it")
    for key in keys.values():
        if not isinstance(metadata[key], str):
            vocabulary.refuse(key[:100], f"expected a template, got {metadata[key]!r:.60}")
    return {name: metadata[key] for name, key in keys.items()}


def _with_bos(template: str, bos: str | None) -> str:
    """Return a template that begins with the BOS token: llama.cpp adds it to the prompts of templates without it."""
    if bos is None or "bos_token" in template or bos in template:
        return template
    return "{{ bos_token }}" + template
