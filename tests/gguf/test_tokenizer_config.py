# SPDX-License-Identifier: Apache-2.0
"""What the metadata of a GGUF file says about special tokens and chat templates reaches the tokenizer of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.gguf.tokenizer import make_tokenizer_json
from fastdeploy.gguf.tokenizer_config import make_tokenizer_config

PREFIX = "tokenizer.ggml."
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<pad>": 3, "<mask>": 4, "<|im_end|>": 3}
TEMPLATE = "{% for message in messages %}<|{{ message.content }}|>{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]


def sentencepiece_keys(**keys: Any) -> dict[str, Any]:
    tokens, letters = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))], [*"\u2581!|<>hi"]
    lists = {"tokens": tokens + letters, "scores": [0.0] * len(tokens + letters)}
    kinds = [*SPECIAL.values()] + [6] * 256 + [1] * len(letters)
    content = {"model": "llama", **lists, "token_type": kinds, **keys}
    return {PREFIX + key: value for key, value in content.items() if value is not None}


def byte_level_keys(**keys: Any) -> dict[str, Any]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = [*map(chr, printable), *map(chr, range(256, 256 + 256 - len(printable)))]
    tokens = [*characters, *SPECIAL, "hi"]
    lists = {"tokens": tokens, "merges": ["h i"], "token_type": [1] * 256 + [*SPECIAL.values(), 1]}
    content = {"model": "gpt2", "pre": "llama-bpe", **lists, **keys}
    return {PREFIX + key: value for key, value in content.items() if value is not None}


def load(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer_json(metadata, "m.gguf")))
    (folder / "tokenizer_config.json").write_text(json.dumps(make_tokenizer_config(metadata, "m.gguf")))
    return Tokenizer.from_pretrained(folder)


def test_sentencepiece_files_without_keys_have_the_tokens_of_llama_2(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece_keys(), tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (tokenizer.encode("hi")[0], tokenizer.eos_token_id) == (1, 2)
    config = make_tokenizer_config(sentencepiece_keys(), "m.gguf")
    assert (config["add_bos_token"], config["add_eos_token"]) == (True, False)


def test_keys_name_the_special_tokens(tmp_path: Path) -> None:
    ids = {"bos_token_id": 2, "eos_token_id": 5, "padding_token_id": 3, "mask_token_id": 4, "seperator_token_id": 1}
    tokenizer = load(sentencepiece_keys(**ids, add_bos_token=False, add_eos_token=True), tmp_path)
    assert tokenizer.special_tokens == {
        **{"bos_token": "</s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "sep_token": "<s>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    }
    ids_of_text = tokenizer.encode("hi")
    assert ids_of_text[-1] == 5 and ids_of_text[0] != 2


def test_a_byte_level_file_that_names_no_token_has_none(tmp_path: Path) -> None:
    tokenizer = load(byte_level_keys(pre="qwen2"), tmp_path)
    assert (tokenizer.special_tokens, tokenizer.eos_token_id) == ({}, None)


def test_an_ordinary_token_that_the_file_names_is_not_hidden(tmp_path: Path) -> None:
    tokenizer = load(byte_level_keys(pre="qwen2", padding_token_id=0), tmp_path)
    assert tokenizer.decode(tokenizer.encode("hi!")) == "hi!"
    assert "pad_token" not in tokenizer.special_tokens


@pytest.mark.parametrize("keys", [sentencepiece_keys(), byte_level_keys(bos_token_id=257)])
@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE, "<s>" + TEMPLATE])
def test_texts_and_chats_begin_with_one_bos_token(keys: dict[str, Any], template: str, tmp_path: Path) -> None:
    """A template that does not write it begins with it here, as llama.cpp adds it to the prompt."""
    tokenizer = load(keys | {"tokenizer.chat_template": template}, tmp_path)
    bos = tokenizer.encode("")
    assert len(bos) == 1
    prompt = tokenizer.apply_chat_template(MESSAGES)
    assert prompt == "<s><|hi|>"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[:1] == bos and ids.count(bos[0]) == 1


def test_chats_have_no_bos_token_if_texts_have_none(tmp_path: Path) -> None:
    keys = sentencepiece_keys(add_bos_token=False) | {"tokenizer.chat_template": TEMPLATE}
    assert load(keys, tmp_path).apply_chat_template(MESSAGES) == "<|hi|>"


def test_named_templates_are_chosen_by_their_names(tmp_path: Path) -> None:
    templates = {"": "{{ bos_token }}default", ".tool_use": "{{ bos_token }}tools", ".rag": "{{ bos_token }}rag"}
    keys = {f"tokenizer.chat_template{name}": text for name, text in templates.items()}
    names = {"tokenizer.chat_templates": ["tool_use", "rag"]}
    tokenizer = load(sentencepiece_keys() | keys | names, tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES) == "<s>default"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="rag") == "<s>rag"
    assert set(tokenizer.chat_templates.templates) == {"default", "tool_use", "rag"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.chat_template": 1}, "tokenizer.chat_template: expected a template, got 1"),
    ({"tokenizer.chat_template.x": ["a"]}, r"tokenizer.chat_template.x: expected a template, got \['a'\]"),
    ({"tokenizer.chat_templates": "x"}, "tokenizer.chat_templates: expected a list of names, got 'x'"),
    ({"tokenizer.chat_templates": [1]}, r"tokenizer.chat_templates: expected a list of names, got \[1\]"),
    ({"tokenizer.chat_templates": ["x"]}, "tokenizer.chat_template.x: is missing; tokenizer.chat_templates names it"),
    ({f"{PREFIX}padding_token_id": 999}, r"padding_token_id: expected the id of one of the \d+ tokens, got 999"),
]


@pytest.mark.parametrize(("keys", "message"), BAD)
def test_a_key_that_cannot_be_used_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tokenizer: m\.gguf: .*{message}$"):
        make_tokenizer_config(sentencepiece_keys() | keys, "m.gguf")
