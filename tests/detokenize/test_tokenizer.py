# SPDX-License-Identifier: Apache-2.0
"""Loading a tokenizer's folder, and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.errors import ConfigError, InvalidRequestError
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.detokenize.tokenizers_for_tests import byte_level_backend, make_tokenizer, save_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def test_folder_gives_special_tokens_and_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(save_tokenizer(tmp_path))
    assert tokenizer.eos_token_id == 1
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.vocab_size == byte_level_backend().token_to_id("<think> now") + 1, "added tokens count"
    assert tokenizer.is_byte_level
    assert tokenizer.decode(tokenizer.encode("héllo 🙂</s>")) == "héllo 🙂"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'{"chat_template": "\ud83D\uDe42 \\ud800 \u00e9"}', "\U0001f642 \\ud800 é"),
        (r'{"chat_template": "a\ud83d"}', None),
        (r'{"chat_template": "\uDE42b"}', None),
    ],
)
def test_half_of_a_pair_in_a_file_is_refused(text: str, expected: str | None, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    if expected is not None:
        assert Tokenizer.from_pretrained(tmp_path).chat_templates.templates["default"] == expected
        return
    with pytest.raises(ConfigError, match=r"cannot read .*surrogates not allowed"):
        Tokenizer.from_pretrained(tmp_path)


def test_reading_a_tokenizer_does_not_write_it_again() -> None:
    """To serialize one of 150,000 tokens and parse that takes 0.4 s, which each process of a server would wait."""

    class Unserializable:
        def __init__(self) -> None:
            self.backend = byte_level_backend()

        def __getattr__(self, name: str) -> Any:
            assert name != "to_str"
            return getattr(self.backend, name)

    tokenizer = Tokenizer(Unserializable())  # type: ignore[arg-type]
    assert tokenizer.is_byte_level
    assert tokenizer.max_token_length == max(map(len, byte_level_backend().get_vocab()))


def test_truncation_in_the_file_is_disabled(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_pretrained(tmp_path).encode("the quick brown fox jumps over the lazy dog")) > 4


def test_errors_name_missing_and_invalid_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer in"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer.json"):
        Tokenizer.from_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer_config.json"):
        Tokenizer.from_pretrained(tmp_path)


def test_template_file_overrides_the_configuration(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template(MESSAGES) == "<s>user: hi\nassistant:"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template(MESSAGES) == "hi!"


def test_default_is_used_of_several_named_templates(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes {{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": named}))
    assert Tokenizer.from_pretrained(tmp_path).apply_chat_template(MESSAGES) == "yes </s>"


def test_helper_functions_of_templates_are_available() -> None:
    tokenizer = make_tokenizer("byte_level")
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}{{ extra }}"
    )
    text = tokenizer.apply_chat_template([{"role": "user", "content": "é<"}] * 2, chat_template=template, extra="x")
    assert text == '{"role": "user", "content": "é<"}4x'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['a']['b'] }}", "chat template"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% if %}", "cannot be compiled"),
        ("{{ 1 / 0 }}", "chat template"),
    ],
)
def test_templates_that_reject_messages_or_fail_are_request_errors(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make_tokenizer("byte_level").apply_chat_template(MESSAGES, chat_template=template)


def test_model_without_a_template_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match=r"no chat template"):
        Tokenizer(byte_level_backend()).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(("kind", "text"), [("byte_level", "</s>"), ("byte_fallback", "</s>")])
def test_token_text_and_bytes_of_single_tokens(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    half = tokenizer.encode("龍", add_special_tokens=False)[-1]
    assert len(tokenizer.token_bytes(half)) == 1
    assert tokenizer.token_text(tokenizer.encode(text)[-1]) == "</s>"
    the = tokenizer.encode("fox the")[-1]
    assert (tokenizer.token_text(the), tokenizer.token_bytes(the)) == (" the", b" the")
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(10**6) == ""
