# SPDX-License-Identifier: Apache-2.0
"""/v1/messages with the real engine: the texts of chats, prompts without output, and the request of an agent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.drafting_models import SERVED_METHODS
from tests.entrypoints.anthropic_client import messages_client
from tests.entrypoints.chat_server import SPECIAL_TOKENS, TEMPLATE, rendered
from tests.entrypoints.server_process import ServerProcess, real_server, speculating_server
from tests.entrypoints.test_responses_server import CHAT_TOOL, SCHEMA
from tests.mock_engine import save_mock_model

AGENT_REQUEST = Path(__file__).parent / "data" / "agent_request.json"
AGENT_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-app": "cli",
    "x-api-key": "none",
}
TOOL: dict[str, Any] = {"name": "weather", "input_schema": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"seed": 7, "temperature": 0.8, "top_k": 20}, {}),
    ({"seed": 7, "temperature": 1, "speculative": {"method": "off"}}, {}),
    ({"seed": 8, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"response_format": FORMAT}),
    (
        {"seed": 9, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
]
OWN_FIELDS = ("output_config", "tools", "tool_choice")


def check_equal_to_chat(server: ServerProcess, form: dict[str, Any], chat_form: dict[str, Any]) -> None:
    """Check that a message, whole and streamed, has the text or the call of the chat with the same prompt."""
    messages = [{"role": "user", "content": "def add(a, b):"}]
    shared = {"max_tokens": 60, **{name: value for name, value in form.items() if name not in OWN_FIELDS}}
    chat = {"messages": [{"role": "system", "content": "be brief"}, *messages], **shared, **chat_form}
    choice = server.post("/v1/chat/completions", chat).json()["choices"][0]
    body = {"system": "be brief", "messages": messages, **shared, **form}
    whole = server.post("/v1/messages", body).json()
    client = messages_client(server)
    with client.messages.stream(model="default", messages=messages, max_tokens=60, extra_body=body) as stream:  # type: ignore[arg-type]
        streamed = stream.get_final_message().to_dict()
    for message in (whole, streamed):
        if calls := choice["message"].get("tool_calls"):
            expected = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
            assert [(block["name"], block["input"]) for block in message["content"]] == expected
        else:
            assert [block["text"] for block in message["content"]] == [choice["message"]["content"]] != [""]
        assert (message["stop_reason"] == "max_tokens") == (choice["finish_reason"] == "length")


@pytest.mark.parametrize(("form", "chat_form"), FORMS)
def test_texts_and_calls_are_those_of_chats(
    drafting_server: ServerProcess, form: dict[str, Any], chat_form: dict[str, Any]
) -> None:
    check_equal_to_chat(drafting_server, form, chat_form)


@pytest.mark.nightly
@pytest.mark.parametrize("method", SERVED_METHODS)
def test_texts_and_calls_are_those_of_chats_with_every_speculation_method(method: str) -> None:
    with speculating_server(method) as running:
        for form, chat_form in FORMS:
            check_equal_to_chat(running, form, chat_form)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_before_the_first_event_name_the_client_s_field(
    drafting_server: ServerProcess, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "stream": stream}
    for fields, param in (
        ({"output_config": {"format": {"type": "json_schema", "schema": schema}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": schema}}, "output_format"),
    ):
        response = drafting_server.post("/v1/messages", {**body, **fields})
        assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
        assert response.json()["error"]["details"] == {"error_code": "invalid_value", "param": param}


def test_a_prompt_without_output_fills_the_cache(drafting_server: ServerProcess) -> None:
    client = messages_client(drafting_server)
    options: dict[str, Any] = {
        "model": "default",
        "system": "a prompt that nobody else has: " + "def f(x):\n    return x\n" * 10,
        "messages": [{"role": "user", "content": "go on"}],
    }
    first = client.messages.create(max_tokens=0, **options)
    assert (first.content, first.stop_reason, first.usage.output_tokens) == ([], "max_tokens", 0)
    assert first.usage.cache_creation_input_tokens and first.usage.cache_read_input_tokens == 0
    second = client.messages.create(max_tokens=2, **options)
    assert second.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens
    assert (second.usage.input_tokens, second.usage.cache_creation_input_tokens) == (first.usage.input_tokens, 0)
    with client.messages.stream(max_tokens=0, **options) as stream:
        assert (stream.get_final_message().stop_reason, stream.get_final_message().content) == ("max_tokens", [])


@pytest.fixture(scope="module")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mock_model(tmp_path_factory.mktemp("agent"), special_tokens=SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def agent_server(agent_model: Path) -> Iterator[ServerProcess]:
    """A model with random weights, a context of 64 K and a template that shows tools, without a parser of reasoning."""
    weights = ("--load-choices", "dummy", "--dtype", "float32", "--seed", "3")
    limits = ("--max-model-len", "64K", "--max-num-seqs", "2", "--num-gpu-blocks-override", "1100")
    template = ("--chat-template", TEMPLATE, "--tool-call-parser", "hermes")
    with real_server(str(agent_model), *weights, *limits, *template) as running:
        yield running


def agent_request(attribution: str) -> dict[str, Any]:
    """Return the request with another attribution line, and a limit that the test can wait for."""
    body = json.loads(AGENT_REQUEST.read_text())
    body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.80.4be; cch={attribution};"
    return {**body, "max_tokens": 20, "temperature": 0}


def test_the_request_of_an_agent_is_answered(agent_server: ServerProcess) -> None:
    body = json.loads(AGENT_REQUEST.read_text())
    assert (len(body["tools"]), max(len(tool["name"]) for tool in body["tools"])) == (20, 104)
    response = agent_server.post("/v1/messages?beta=true", agent_request("a1"), headers=AGENT_HEADERS)
    assert response.status_code == 200, response.text
    names = [line for line in response.text.split("\n") if line.startswith("event: ")]
    assert (names[0], names[-1]) == ("event: message_start", "event: message_stop")
    assert '"stop_reason":"max_tokens"' in response.text
    assert agent_server.stderr.count("`thinking` has no effect") == 1


def test_the_attribution_line_does_not_keep_the_prefix_from_the_cache(
    agent_server: ServerProcess, agent_model: Path
) -> None:
    usages, texts = [], []
    for attribution in ("b1", "b2"):
        whole = {**agent_request(attribution), "stream": False}
        message = agent_server.post("/v1/messages?beta=true", whole, headers=AGENT_HEADERS).json()
        usages.append(message["usage"])
        texts.append(message["content"])
    total = usages[0]["input_tokens"] + usages[0]["cache_read_input_tokens"] + usages[0]["cache_creation_input_tokens"]
    assert usages[1]["cache_read_input_tokens"] == total // 64 * 64 > 4000
    assert texts[0] == texts[1]
    assert agent_server.stderr.count("x-anthropic-billing-header") == 1


def test_the_prompt_of_an_agent_has_its_tools_results_and_texts(agent_server: ServerProcess, agent_model: Path) -> None:
    body = agent_request("c1")
    counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking", "output_config")}
    count = agent_server.post("/v1/messages/count_tokens?beta=true", counted, headers=AGENT_HEADERS).json()
    with_more = json.loads(json.dumps(counted))
    with_more["system"][0]["text"] += "\nbe kind"
    more = agent_server.post("/v1/messages/count_tokens", with_more).json()
    assert more["input_tokens"] > count["input_tokens"], "what follows the line stays in the prompt"
    function = [
        {"type": "function", "function": {"name": tool["name"], "description": tool["description"],
                                          "parameters": tool["input_schema"]}}
        for tool in body["tools"]
    ]  # fmt: skip
    guide = body["system"][2]["text"]
    results = body["messages"][2]["content"]
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["input"]}}
        for call in body["messages"][1]["content"][2:]
    ]
    chat = [
        {"role": "system", "content": f"You are a command line agent.\n{guide}"},
        {"role": "user", "content": "\n".join(part["text"] for part in body["messages"][0]["content"])},
        {
            "role": "assistant",
            "reasoning_content": "The parser must be found first.",
            "content": "I look for the place where lines are split.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "toolu_01A", "content": results[0]["content"]},
        {"role": "tool", "tool_call_id": "toolu_01B", "content": results[1]["content"][0]["text"]},
        {"role": "user", "content": results[2]["text"]},
    ]
    variables = {"reasoning_effort": "medium"}
    options = {"messages": chat, "tools": function, "chat_template_kwargs": variables}
    tokens = agent_server.post("/tokenize", options).json()["tokens"]
    assert len(tokens) == count["input_tokens"]
    prompt = rendered(agent_model, tokens)
    assert "billing" not in prompt and "mcp__tracker__" in prompt


def test_the_official_client_sends_the_request_of_the_agent(agent_server: ServerProcess) -> None:
    body = agent_request("d1")
    extra = {name: body.pop(name) for name in ("temperature", "stream")}
    client = messages_client(agent_server)
    with client.beta.messages.stream(**body, betas=["claude-code-20250219"], extra_body=extra) as stream:
        message = stream.get_final_message()
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 20)
    assert isinstance(message, anthropic.types.beta.BetaMessage)
