# SPDX-License-Identifier: Apache-2.0
"""A server whose model generates the text between `[[` and `]]` of the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.entrypoints.server_process import ServerProcess, mock_server

SPECIAL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|hidden|>")
TEMPLATE = (
    "{{ bos_token }}{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}"
    "{% if m.tool_call_id %}FOR {{ m.tool_call_id }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if reasoning_effort %} effort {{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)


@contextmanager
def chat_server(folder: Path, *flags: str, **options: Any) -> Iterator[ServerProcess]:
    """Run a server that emits three tokens a step, with markers that are special tokens."""
    folder.mkdir()
    flags = ("--max-model-len", "2000", "--chat-template", TEMPLATE, *flags)
    options = {"script": True, "tokens_per_step": 3, "special_tokens": SPECIAL_TOKENS, **options}
    with mock_server(folder, *flags, **options) as running:
        yield running


def says(text: str) -> list[Any]:
    """Return a conversation to which the model answers `text`."""
    assert "]]" not in text
    return [{"role": "user", "content": f"[[{text}]]"}]


def rendered(folder: Path, prompt_token_ids: list[int]) -> str:
    """Return a prompt's text, special tokens included."""
    return Tokenizer.from_pretrained(folder).decode(prompt_token_ids, skip_special_tokens=False)
