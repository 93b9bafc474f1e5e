# SPDX-License-Identifier: Apache-2.0
"""Requests as coding agents send them after a tool's result: they are answered, and the prompt has all of their texts.

Each fixture has the structure of a request that Codex 0.171, Claude Code 2.1.197 or OpenCode 1.18 sent to a local
server, with other texts and fewer tools; the last result tells the model of the test what to write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy.entrypoints.openai.messages_api.input import chat_input
from fastdeploy.entrypoints.openai.messages_api.protocol import MessagesRequest
from fastdeploy.entrypoints.openai.responses_api.input import translate
from fastdeploy.entrypoints.openai.responses_api.protocol import ResponsesRequest
from tests.entrypoints.chat_server import chat_server, rendered
from tests.entrypoints.server_process import ServerProcess

DATA = Path(__file__).parent / "data"
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{{ m.reasoning_content or '' }}{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}</s>\n{% endfor %}"
    "assistant:"
)
RESPONSES, MESSAGES, CHATS = "/v1/responses", "/v1/messages?beta=true", "/v1/chat/completions"
REQUESTS = {
    "codex": RESPONSES,
    "codex_known_model": RESPONSES,
    "claude_code": MESSAGES,
    "opencode_chat": CHATS,
    "opencode_responses": RESPONSES,
    "opencode_messages": MESSAGES,
}
"""Fixture -> where it is sent. Codex knows some models of OpenAI by name, and sends other tools with these names."""
TEXTS = ("Words ", "Thought ", "It ", "What ", "value ")
"""How the texts of the fixtures begin that a model must see."""
LEFT_OUT = ("custom", "tool_search", "web_search")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents") / "model"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    flags = ("--tool-call-parser", "hermes", "--max-model-len", "20000", "--chat-template", TEMPLATE)
    with chat_server(model, *flags) as running:
        yield running


def request(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DATA / f"{name}_request.json").read_text())
    return body


def answer_text(stream: str) -> str:
    """Return the text of a stream in any of the protocols."""
    text = ""
    for line in stream.split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        match event:
            case {"type": "response.output_text.delta", "delta": str(delta)}:
                text += delta
            case {"type": "content_block_delta", "delta": {"text": str(delta)}}:
                text += delta
            case {"choices": [{"delta": {"content": str(delta)}}]}:
                text += delta
    return text


def visible_texts(value: Any) -> Iterator[str]:
    """Yield the texts of a request that the model must see."""
    if isinstance(value, str):
        if value.startswith(TEXTS):
            yield value
        elif value.startswith("{"):  # arguments of a call
            yield from visible_texts(json.loads(value))
    elif isinstance(value, list):
        for one in value:
            yield from visible_texts(one)
    elif isinstance(value, dict) and value.get("type") not in LEFT_OUT:
        for one in value.values():
            yield from visible_texts(one)


def chat_of(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return messages and tools of the chat that a request is translated to."""
    body = {key: value for key, value in body.items() if key not in ("client_metadata", "prompt_cache_key", "metadata")}
    if REQUESTS[name] == CHATS:
        return {key: body[key] for key in ("messages", "tools")}
    if REQUESTS[name] == RESPONSES:
        chat = translate(ResponsesRequest(**body), False).chat
    else:
        chat = chat_input(MessagesRequest(**body), False).request
    return {"messages": chat.messages, "tools": chat.tools}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_request_of_an_agent_is_answered(server: ServerProcess, name: str) -> None:
    response = server.post(REQUESTS[name], request(name))
    assert response.status_code == 200, response.text
    assert answer_text(response.text) == "I am done."


@pytest.mark.parametrize("name", REQUESTS)
def test_the_prompt_has_every_text_of_the_request(server: ServerProcess, model: Path, name: str) -> None:
    body = request(name)
    prompt = rendered(model, server.post("/tokenize", chat_of(name, body)).json()["tokens"])
    texts = [*visible_texts(body)]
    assert len(texts) > 15
    assert [text for text in texts if text not in prompt] == []
    left_out = [tool["description"] for tool in body["tools"] if tool.get("type") in LEFT_OUT and "description" in tool]
    assert [text for text in left_out if text in prompt] == []


def test_a_namespace_of_codex_is_in_the_names_of_its_functions(server: ServerProcess, model: Path) -> None:
    prompt = rendered(model, server.post("/tokenize", chat_of("codex", request("codex"))).json()["tokens"])
    names = [tool["function"]["name"] for tool in json.loads(prompt.partition("TOOLS ")[2].partition("\n")[0])]
    assert names == [
        *("run", "type_in", "helpers_v1__close", "helpers_v1__wake", "mcp__sky__weather", "mcp__sky__tides"),
        "read_goal",
    ]
    assert '"name": "mcp__sky__weather", "arguments"' in prompt, "the call in the history"


def test_what_a_request_of_codex_does_not_get_is_logged_once(server: ServerProcess) -> None:
    for _ in range(2):
        assert server.post(RESPONSES, request("codex_known_model")).status_code == 200
    for text in (
        "the field client_metadata has no effect",
        "the field text.verbosity has no effect",
        "include reasoning.encrypted_content has no effect",
        *(f"/v1/responses: tools of type {kind} are left out" for kind in LEFT_OUT),
    ):
        assert server.stderr.count(text) == 1, text


def test_a_search_of_claude_code_is_refused_because_its_answer_would_pass_for_results(server: ServerProcess) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    body = {**request("claude_code"), "tools": [search], "tool_choice": {"type": "auto"}}
    error = server.post(MESSAGES, body).json()["error"]
    assert error["message"].startswith("tools[0].type: web_search_20250305 is not supported")
    beside = {**body, "tools": [search, *request("claude_code")["tools"]]}
    assert server.post(MESSAGES, beside).status_code == 200
    assert server.stderr.count("/v1/messages: tools of type web_search_20250305 are left out") == 1
    named = {**beside, "tool_choice": {"type": "tool", "name": "web_search"}}
    assert server.post(MESSAGES, named).json()["error"]["message"].startswith("tool_choice.name: 'web_search' is not")


@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/models?client_version=0.171.0"])
def test_agents_that_look_whether_a_server_is_there_find_it(server: ServerProcess, path: str) -> None:
    assert httpx.head(server.url + path).status_code == 200
