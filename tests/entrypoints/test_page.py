# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: its content security policy, and the fields of the API that it uses."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import fastdeploy
from fastdeploy.entrypoints.cli.openai import CODE, QUESTION
from tests.entrypoints.chat_server import says
from tests.entrypoints.server_process import ServerProcess, mock_server

PAGE = Path(fastdeploy.__file__).parent / "assets" / "page.html"


def content_of(name: str) -> str:
    (content,) = re.findall(rf"<{name}>(.*?)</{name}>", PAGE.read_text(), re.DOTALL)
    return str(content)


def test_page_needs_no_key_loads_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--api-key", "alpha") as running:
        response = running.get("/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert response.text == PAGE.read_text()
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(content_of(name).encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"


def test_page_is_self_contained_and_short() -> None:
    page = PAGE.read_text()
    assert len(page.splitlines()) < 310
    assert not re.search(r"https?://|\bsrc=|style=|innerHTML", page)
    assert re.findall(r'\bhref="(.*?)"', page) == ["docs", "redoc"] and page.count("href") == 2
    assert set(re.findall(r'\$\("(\w+)"\)', page)) <= set(re.findall(r'id="(\w+)"', page))


def test_stream_has_what_the_page_shows(server: ServerProcess) -> None:
    sent = set(re.findall(r"(\w+): (?:true|Number|\"default\")", content_of("script"))) | {
        "prompt",
        "seed",
        "speculative",
    }
    values = {
        "model": "default",
        "stream": True,
        "temperature": 0.5,
        "max_tokens": 9,
        "prompt": "the",
        "seed": 2**64 - 1,
    }
    body = {"return_token_ids": True, "collect_metrics": True, "speculative": {"method": "off"}, **values}
    assert sent == set(body)
    text, tokens, last = "", [], {}
    for last in stream_choices(server, body):
        text += last["text"]
        tokens += last["tokens"]
    assert len(tokens) == 9 and {token["origin"] for token in tokens} <= {"draft", "target"}
    assert b"".join(token_bytes(token["text"]) for token in tokens).decode("utf-8", "replace") == text
    assert last["finish_reason"] == "length" and last["seed"] == 2**64 - 1
    shown = set(re.findall(r"\bm\??\.(\w+)", content_of("script"))) - {"exec"}
    assert len(shown) == 6 and shown <= set(last["speculate_metrics"])
    assert type(last["speculate_metrics"]["accept_ratio_per_head"]) is list


def stream_choices(server: ServerProcess, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the choice of each chunk."""
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                yield from json.loads(line.removeprefix("data: "))["choices"]


def token_bytes(text: str) -> bytes:
    """Return the bytes of a token's text, as the page decodes them."""
    if not text.startswith("bytes:\\x"):
        return text.encode()
    return bytes(int(part, 16) for part in text.removeprefix("bytes:\\x").split("\\x"))


@pytest.mark.parametrize("min_tokens_per_chunk", [1, 16])
def test_origins_add_up_to_the_accepted_drafts_for_any_size_of_chunks(
    drafting_server: ServerProcess, min_tokens_per_chunk: int
) -> None:
    body = {
        "prompt": "def fibonacci(n):",
        "max_tokens": 60,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "collect_metrics": True,
        "max_streaming_response_tokens": min_tokens_per_chunk,
    }
    chunks = list(stream_choices(drafting_server, body))
    origins = [token["origin"] for chunk in chunks for token in chunk["tokens"]]
    metrics = chunks[-1]["speculate_metrics"]
    assert len(origins) == 60 and origins[0] == "target"
    assert origins.count("draft") == metrics["accepted_tokens"] > 0
    sources = [token.get("source") for chunk in chunks for token in chunk["tokens"]]
    assert sources == ["ngram" if origin == "draft" else None for origin in origins]
    assert all(len(chunk["tokens"]) >= min_tokens_per_chunk for chunk in chunks[:-1])


def test_labels_that_name_the_model_and_the_method_are_readable_without_a_key(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--api-key", "alpha", "--served-model-name", 'a "quoted" {model}') as running:
        page = running.get("/metrics").text
    script = content_of("script")
    line = re.search(re.findall(r"/(\^fastdeploy:.*)/m\.exec", script)[0], page, re.MULTILINE)
    assert line is not None and line[2] == "0.0"
    value = re.findall(r'RegExp\(`\\\\b\$\{name\}="(.*)"`\)', script)[0].replace("\\\\", "\\")
    found = {name: re.findall(rf'\b{name}="{value}"', line[1]) for name in ("model_name", "method")}
    assert found == {"model_name": [r"a \"quoted\" {model}"], "method": ["naive"]}


def test_only_the_demonstration_models_get_an_example_in_python() -> None:
    """Other models are asked in English, at the endpoint for chats, which is the first one."""
    (pattern,) = re.findall(r"/(\^demo.*)/\.test", content_of("script"))
    pattern = pattern.replace(r"\/", "/")
    names = ("demo", "demo/moe", "smollm2", "demolition", "/models/demo", "…")
    assert [name for name in names if re.search(pattern, name)] == ["demo", "demo/moe"]
    page = PAGE.read_text()
    assert re.findall(r'<option value="(/v1/.*?)"', page) == ["/v1/chat/completions", "/v1/completions"]
    assert re.findall(r'<textarea id="prompt".*?>(.*?)</textarea>', page) == [QUESTION]
    assert f'["/v1/completions", "{CODE}"]' in page


def test_chunks_of_chats_have_what_the_page_sends_back(parsing_server: ServerProcess) -> None:
    """The page sends the contents of earlier answers again, without their reasoning and special tokens."""
    (read,) = re.findall(r"turn\.text \+= choice\.(.*?) \?\?", content_of("script"))
    assert read == "delta?.content"
    body = {"messages": says("<think>Let me see.</think>It is 4."), "stream": True, "return_token_ids": True}
    lines = parsing_server.post("/v1/chat/completions", body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    contents = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(content or "" for content in contents) == "It is 4."
    assert lines[-2:] == ["data: [DONE]", ""], "the page takes a stream without it for a cut one"


def test_an_answer_without_text_can_be_sent_back(parsing_server: ServerProcess) -> None:
    empty = {"role": "assistant", "content": ""}
    body = {"messages": [*says(""), empty, *says("It is 4.")]}
    answer = parsing_server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "It is 4."


def test_the_card_of_a_model_has_what_the_page_says_about_it(server: ServerProcess) -> None:
    shown = set(re.findall(r"\bcard\??\.(\w+)", content_of("script")))
    card = server.get("/v1/models").json()["data"][0]
    assert len(shown) == 6 and shown <= set(card)
