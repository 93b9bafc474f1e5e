# SPDX-License-Identifier: Apache-2.0
"""Large, deep and invalid texts: each gets one clear error, and other requests are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.detokenize.tokenizers_for_tests import save_tokenizer
from tests.entrypoints.fuzzing import send_all
from tests.entrypoints.hostile_values import hostile_request
from tests.entrypoints.server_process import ServerProcess, mock_server

USER = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PRINTS_16_MB = "{% for i in range(4000) %}{% for j in range(40) %}{{ 'x' * 100 }}{% endfor %}{% endfor %}"
LONG_WORD = "x" * 8_000_000


def check_hostile_members(server: ServerProcess, seed: int, count: int) -> None:
    """Send hostile requests; every one gets a valid response that is no fault of the server."""
    rng = random.Random(seed)
    outcome = asyncio.run(send_all(server.url, [hostile_request(rng) for _ in range(count)]))
    assert outcome.faults == []
    assert sum(outcome.statuses.values()) == count
    assert outcome.statuses[200] > count // 50 and outcome.statuses[400] > count // 2
    assert "Traceback" not in server.stderr
    assert server.post(COMPLETIONS, {"prompt": "the", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("seed", range(2))
def test_hostile_values_in_any_field_are_no_fault_of_the_server(parsing_server: ServerProcess, seed: int) -> None:
    check_hostile_members(parsing_server, seed, 600)


@pytest.mark.nightly
def test_a_thousand_hostile_values_are_no_fault_of_the_server(parsing_server: ServerProcess) -> None:
    check_hostile_members(parsing_server, 100, 1000)


def error_of(server: ServerProcess, path: str, body: Any) -> tuple[int, str]:
    """Return status and message of a refused request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = server.post(path, content, headers={"Content-Type": "application/json"})
    return response.status_code, response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"prompt": LONG_WORD}, "prompt: expected at most 2097152 characters, got 8000000"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": LONG_WORD}]},
            "messages: the chat template renders more than 2097152 characters",
        ),
        ("/detokenize", {"tokens": [5] * 1601}, "tokens: expected at most 1600 token ids, got 1601"),
        (COMPLETIONS, {"prompt": LONG_WORD, "truncate_prompt_tokens": 5}, "prompt: expected at most 83200 characters"),
        (COMPLETIONS, {"prompt": ["a", LONG_WORD]}, "prompt: expected 1 to 199 tokens, which have at most 10400"),
        (COMPLETIONS, {"prompt": "a", "bad_words": [LONG_WORD]}, "bad_words: at most 65536 characters in all strings"),
        (CHAT, {"messages": [USER], "chat_template": PRINTS_16_MB}, "the chat template renders more than 10400"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": LONG_WORD}], "truncate_prompt_tokens": -1},
            "messages: the chat template renders more than 83200 characters",
        ),
        (CHAT, {"messages": [USER] * 40_000}, "messages: at most 16384 messages, parts and tool calls in all"),
        (CHAT, {"messages": [USER], "chat_template": "{{ raise_exception('a\\ud800') }}"}, "rejects them: a\\ud800"),
        (CHAT, {"messages": [USER], "chat_template": "{{ '\\ud800' }}"}, "messages: expected valid Unicode"),
        (COMPLETIONS, {"prompt": "a", "model": "x" * 1_000_000}, f"model: '{'x' * 64}' is not served here"),
    ],
)
def test_error_names_the_field_and_its_limit(
    server: ServerProcess, path: str, body: dict[str, Any], message: str
) -> None:
    status, found = error_of(server, path, body)
    assert status == (404 if "model" in body else 400) and message in found


def test_forty_thousand_tools_are_refused_and_1024_are_not(parsing_server: ServerProcess) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(40_000)]
    error = (400, "tools: at most 1024 tools, got 40000")
    assert error_of(parsing_server, CHAT, {"messages": [USER], "tools": tools}) == error
    body = {"messages": [USER], "tools": tools[:1024], "max_tokens": 1, "truncate_prompt_tokens": 100}
    assert parsing_server.post(CHAT, body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 2_000_000}),
        ("/tokenize", {"prompt": "é" * 500_000, "return_token_strs": True}),
        (CHAT, {"messages": [USER], "chat_template": "{% for i in range(10**5) %}{% endfor %}" * 2000}),
        (CHAT, {"messages": [USER] * 16384}),
    ],
)
def test_health_is_answered_several_times_before_a_large_request(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    num_answered = 0
    with ThreadPoolExecutor(1) as threads, httpx.Client(base_url=server.url, timeout=60) as client:
        large = threads.submit(httpx.post, server.url + path, json=body, timeout=60)
        while not large.done():
            assert client.get("/health").status_code == 200
            num_answered += 1
    assert large.result().status_code in (200, 400) and num_answered >= 5


def test_text_of_another_client_passes_large_ones(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-model-len", "200", "--api-key", "a", "--api-key", "b") as running:
        answered: list[str] = []

        def send(key: str, length: int) -> None:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "x" * length}
            assert httpx.post(running.url + "/tokenize", json=body, headers=headers, timeout=60).status_code == 200
            answered.append(key)

        with ThreadPoolExecutor(7) as threads:
            large = [threads.submit(send, "a", 400_000) for _ in range(6)]
            for task in [*large, threads.submit(send, "b", 20_000)]:
                task.result(120)
    assert answered.index("b") < 3


def test_template_of_another_client_passes_slow_ones(tmp_path: Path) -> None:
    loops = "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    slow = f"{{% if messages[0].content == 'hi' %}}{loops}{{% endif %}}{{{{ messages[0].content }}}}"
    with mock_server(tmp_path, "--max-model-len", "200", "--api-key", "a", "--api-key", "b") as running:
        answered: list[str] = []

        def send(key: str, template: str) -> None:
            headers, body = {"Authorization": f"Bearer {key}"}, {"messages": [USER], "chat_template": template}
            assert httpx.post(running.url + "/tokenize", json=body, headers=headers, timeout=120).status_code == 200
            answered.append(key)

        with ThreadPoolExecutor(9) as threads:
            tasks = [threads.submit(send, "a", slow) for _ in range(8)]
            for task in [*tasks, threads.submit(send, "b", "{{ messages[0].content }}")]:
                task.result(120)
    assert answered.index("b") < 4


BACKTRACKING = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
BAD = "a" * 40 + "b"
BAD_USER = [{"role": "user", "content": BAD}]


@pytest.fixture(scope="module")
def backtracking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose tokenizer has a pattern that takes twice as many steps for each further letter."""
    tokenizer, model = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("model")
    save_tokenizer(tokenizer)
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    decoder = {"type": "Sequence", "decoders": [content["decoder"], BACKTRACKING]}
    (tokenizer / "tokenizer.json").write_text(json.dumps({**content, "normalizer": BACKTRACKING, "decoder": decoder}))
    with mock_server(model, "--tokenizer", str(tokenizer), "--served-model-name", "m") as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": BAD, "max_tokens": 1}, "prompt"),
        (COMPLETIONS, {"prompt": ["hi", BAD], "max_tokens": 1}, "prompt"),
        (COMPLETIONS, {"prompt": "hi", "bad_words": [BAD], "max_tokens": 1}, "bad_words"),
        (CHAT, {"messages": BAD_USER, "max_tokens": 1}, "messages"),
        ("/v1/responses", {"model": "m", "input": BAD}, "input"),
        ("/v1/messages", {"model": "m", "messages": BAD_USER, "max_tokens": 1}, "messages"),
        ("/v1/messages/count_tokens", {"model": "m", "messages": BAD_USER}, "messages"),
        ("/tokenize", {"prompt": BAD}, "prompt"),
        ("/tokenize", {"messages": BAD_USER}, "messages"),
        ("/detokenize", {"tokens": [67] * 40 + [68]}, "tokens"),
    ],
)
def test_a_text_on_which_the_tokenizer_panics_is_a_bad_request(
    backtracking_server: ServerProcess, path: str, body: dict[str, Any], field: str
) -> None:
    status, message = error_of(backtracking_server, path, body)
    assert status == 400 and message.startswith(f"{field}: the tokenizer of this model cannot ")
    assert message.endswith("Onig: Regex search error: retry-limit-in-match over")
    assert backtracking_server.post("/tokenize", {"prompt": "the"}).status_code == 200
