# SPDX-License-Identifier: Apache-2.0
"""From messages to the prompt: roles, contents, templates per request, and one that blocks no other request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.detokenize.tokenizers_for_tests import CHAT_TEMPLATE
from tests.entrypoints.chat_server import chat_server, rendered
from tests.entrypoints.server_process import ServerProcess
from tests.mock_engine import save_mock_model

HI = {"role": "user", "content": "hi"}
NAMES = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
ENDLESS = (
    "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat") / "model"


@pytest.fixture(scope="module")
def chats(folder: Path) -> Iterator[ServerProcess]:
    with chat_server(folder, script=False) as running:
        yield running


def prompt_of(chats: ServerProcess, folder: Path, body: dict[str, Any]) -> str:
    """Return the prompt that the server renders for a body."""
    response = chats.post("/v1/chat/completions", {"max_tokens": 1, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return rendered(folder, response.json()["choices"][0]["prompt_token_ids"])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "developer", "content": "be brief"}, HI], "system=be brief;user=hi;"),
        ([{"role": "latest_reminder", "content": [{"type": "text", "text": "x"}]}, HI], "latest_reminder=x;user=hi;"),
        ([{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}], "user=a\nb;"),
        ([{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}], "user=a\nb;"),
        ([HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, HI], None),
        ([HI, {"role": "assistant", "content": None, "refusal": "no", "tool_calls": None}, HI], None),
        (
            [HI, {"role": "tool", "content": {"rain": True}}],
            'user=hi;user=<tool_response>\n{"rain": true}\n</tool_response>;',
        ),
        (
            [HI, {"role": "assistant", "tool_calls": [CALL]}],
            'user=hi;assistant=<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>;',
        ),
        ([HI, {"role": "assistant", "content": None, "tool_calls": []}], "user=hi;assistant=;"),
        ([HI, {"role": "assistant", "content": "", "audio": None, "function_call": None}], "user=hi;assistant=;"),
    ],
)
def test_messages_reach_the_template(
    chats: ServerProcess, folder: Path, messages: list[Any], expected: str | None
) -> None:
    prompt = prompt_of(chats, folder, {"messages": messages, "chat_template": NAMES})
    assert prompt == (expected or "user=hi;assistant=no;user=hi;")


@pytest.mark.parametrize(
    ("message", "field", "reason"),
    [
        ({"content": "x"}, "role", "assistant, tool or another role that the chat template knows, got None"),
        ({"role": "", "content": "x"}, "role", "another role that the chat template knows, got ''"),
        ({"role": "function", "content": "x"}, "role", "use tool"),
        ({"role": ["user"], "content": "x"}, "role", "expected system, developer"),
        ({"role": "ipython"}, "content", "expected text or a list of text parts, got None"),
        ({"role": "user"}, "content", "expected text or a list of text parts, got None"),
        ({"role": "user", "content": 3}, "content", "expected text"),
        ({"role": "user", "content": {"a": 1}}, "content", "expected text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content", "text only"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content", "expected parts of type text"),
        ({"role": "user", "content": [3]}, "content", "expected parts of type text, got 3: this server"),
        ({"role": "user", "content": [{"type": "text"}]}, "content", "expected a text as text of a part, got None"),
        ({"role": "assistant", "content": 3}, "content", "expected text"),
        ({"role": "user", "content": "x", "name": 3}, "name", "expected text, got 3"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id", "expected text"),
        ({"role": "assistant", "content": "x", "reasoning_content": []}, "reasoning_content", "expected text"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls", "allowed only for role assistant"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls", "expected a list"),
        ({"role": "assistant", "tool_calls": ["x"]}, "tool_calls[0]", "of type function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}, "tool_calls[0].id", "expected text"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls[0].function", "name and arguments"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "tool_calls[0].function.arguments",
            "expected JSON text",
        ),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "use tool_calls"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "audio", "text only"),
    ],
)
def test_wrong_messages_are_400_and_name_their_field(
    chats: ServerProcess, message: dict[str, Any], field: str, reason: str
) -> None:
    response = chats.post("/v1/chat/completions", {"messages": [HI, message]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"messages[1].{field}")
    assert reason in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_role_that_the_template_leaves_out_is_400(chats: ServerProcess, path: str) -> None:
    template = "{% for m in messages if m.role in ('user', 'ipython') %}{{ m.content }};{% endfor %}"
    messages = [HI, {"role": "ipython", "content": "h"}, {"role": "latest_reminder", "content": "h"}]
    response = chats.post(path, {"messages": messages, "chat_template": template})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[2].role")
    assert f"the chat template {template[:64]!r} leaves out messages of role 'latest_reminder'" in error["message"]
    assert chats.post(path, {"messages": messages[:2], "chat_template": template}).status_code == 200


def test_last_message_is_continued(chats: ServerProcess, folder: Path) -> None:
    messages = [HI, {"role": "assistant", "content": "Well, "}]
    prompt = prompt_of(chats, folder, {"messages": messages, "continue_final_message": True})
    assert prompt == "<s>user: hi</s>\nassistant: Well, "
    assert prompt_of(chats, folder, {"messages": messages}) == prompt + "</s>\nassistant:"


def test_prompt_may_end_without_the_assistant_s_opening(chats: ServerProcess, folder: Path) -> None:
    assert prompt_of(chats, folder, {"messages": [HI], "add_generation_prompt": False}) == "<s>user: hi</s>\n"


@pytest.mark.parametrize("tier", ["flex", "priority", "auto", 3, None])
def test_every_service_tier_is_accepted(chats: ServerProcess, tier: Any) -> None:
    assert chats.post("/v1/chat/completions", {"messages": [HI], "max_tokens": 1, "service_tier": tier}).is_success


def test_template_may_be_left_out(chats: ServerProcess, folder: Path) -> None:
    assert prompt_of(chats, folder, {"messages": [HI], "disable_chat_template": True}) == "hi"


def test_chat_template_kwargs_reach_the_template(chats: ServerProcess, folder: Path) -> None:
    template = "{{ messages[0].content }} {{ a }} {{ b.c }}"
    body = {"messages": [HI], "chat_template": template, "chat_template_kwargs": {"a": 1, "b": {"c": "d"}}}
    assert prompt_of(chats, folder, body) == "hi 1 d"


def test_variables_of_the_server_stand_under_those_of_the_request(tmp_path: Path) -> None:
    folder, kwargs = tmp_path / "model", '{"a": 1, "b": {"c": "d"}, "reasoning_effort": "low"}'
    template = "{{ messages[0].content }} {{ a }} {{ b.c }} {{ reasoning_effort }}"
    with chat_server(folder, "--default-chat-template-kwargs", kwargs, script=False) as server:
        body = {"messages": [HI], "chat_template": template}
        assert prompt_of(server, folder, body) == "hi 1 d low"
        given = {"chat_template_kwargs": {"a": 2}, "reasoning_effort": "high"}
        assert prompt_of(server, folder, body | given) == "hi 2 d high"


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"chat_template": "{% if %}"}, "chat_template", "cannot be compiled"),
        ({"chat_template": "{{ raise_exception('not you') }}"}, "messages", "rejects them: not you"),
        ({"chat_template": "{{ messages.append(1) }}"}, "messages", "the chat template"),
        ({"chat_template": "{{ 1 / 0 }}"}, "messages", "fails on them"),
        ({"chat_template": "{{ '' }}"}, "messages[0].role", "leaves out messages of role 'user'"),
        ({"chat_template": ENDLESS}, "chat_template", "processor time"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools' is a field of its own"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "expected false with continue_final_message",
        ),
        ({"continue_final_message": True}, "continue_final_message", "the last message to be the assistant's"),
        ({"disable_chat_template": True, "chat_template": "x"}, "chat_template", "has no effect with"),
        ({"prompt_token_ids": [5], "chat_template": "x"}, "chat_template", "has no effect with prompt_token_ids"),
        ({"disable_chat_template": True, "messages": [HI, HI]}, "messages", "expected one message"),
    ],
)
def test_wrong_template_fields_are_400(chats: ServerProcess, change: dict[str, Any], param: str, message: str) -> None:
    response = chats.post("/v1/chat/completions", {"messages": [HI], **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_other_requests_run_while_a_template_does_not_end(chats: ServerProcess, path: str) -> None:
    async def both() -> list[str]:
        finished: list[str] = []
        async with httpx.AsyncClient(base_url=chats.url, timeout=60) as client:

            async def endless() -> None:
                body = json.dumps({"messages": [HI], "chat_template": ENDLESS})
                await client.post(path, content=body.replace("chat_template", "chat\\u005ftemplate"))
                finished.append("endless")

            running = asyncio.create_task(endless())
            for _ in range(3):
                await client.post("/v1/chat/completions", json={"messages": [HI], "max_tokens": 2})
                finished.append("other")
            await running
        return finished

    assert asyncio.run(both()) == ["other", "other", "other", "endless"]


def test_the_tokenizer_s_tool_template_is_selected_for_tools_or_by_name(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    save_mock_model(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "default", "template": CHAT_TEMPLATE},
        {
            "name": "tool_use",
            "template": "{{ messages[0].content }} with {{ (tools or []) | map(attribute='function.name') | join }}",
        },
    ]
    config = {**json.loads(file.read_text()), "chat_template": named}
    file.write_text(json.dumps(config))
    server = ServerProcess([str(tmp_path), "--tool-call-parser", "hermes"])
    try:
        running = server.wait_ready()
        assert prompt_of(running, tmp_path, {"messages": [HI], "tools": tools}) == "hi with now"
        assert prompt_of(running, tmp_path, {"messages": [HI]}) == "<s>user: hi\nassistant:"
        assert prompt_of(running, tmp_path, {"messages": [HI], "chat_template": "tool_use"}) == "hi with "
        named_default = {"messages": [HI], "tools": tools, "chat_template": "default"}
        prompt = prompt_of(running, tmp_path, named_default)
        assert prompt.startswith("<s>system: # Tools\n") and prompt.endswith("\nuser: hi\nassistant:")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--tool-call-parser", "hermess", "expected one of hermes, qwen3_coder"),
        ("--reasoning-parser", "qwen9", "expected one of qwen3, deepseek_r1"),
        ("--chat-template", "{% if %}", "cannot be compiled"),
        ("--chat-template", "/no/such/file", "cannot read '/no/such/file'"),
    ],
)
def test_an_unusable_value_ends_the_start_with_one_line(tmp_path: Path, flag: str, value: str, message: str) -> None:
    server = ServerProcess([str(save_mock_model(tmp_path)), flag, value])
    try:
        assert server.wait_end(60) == 2
        assert message in server.stderr and server.stderr.count("\n") == 1
    finally:
        server.close()
