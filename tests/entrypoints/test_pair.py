# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode node that speculate in different ways answer every kind of request like one plain node."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from tests.cluster.redis_server import RedisServer
from tests.entrypoints.server_process import ServerProcess, node_pair, real_server
from tests.exactness.requests import prompts_of_lengths

Requests = list[tuple[str, dict[str, Any]]]

SHARED = (
    "demo",
    "--block-size",
    "16",
    "--kv-cache-dtype",
    "int8",
    "--tool-call-parser",
    "hermes",
    "--max-model-len",
    "1024",
)
METHODS = {
    "prefill": '{"method": "ngram", "num_speculative_tokens": 4}',
    "decode": '{"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 3, "model": "demo"}',
}
LENGTHS = (3, 64, 65, 700)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 11, "n": 4},
    {"temperature": 0.8, "seed": 12, "top_p": 0.9, "top_k": 40, "logprobs": 3},
    {"temperature": 1.2, "seed": 13, "min_p": 0.05, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "bad_words": ["self", " return"]},
    {"min_tokens": 9, "stop": ["\n", " "]},
    {"logit_bias": {"40": 4.0}, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 14, "echo": True, "logprobs": 1},
    {"guided_regex": "[a-z]{3,9} = [0-9]{2,20};"},
    {"temperature": 1.0, "seed": 15, "guided_json": {"type": "array", "items": {"type": "integer"}, "maxItems": 8}},
    {"max_tokens": 1},
    {"max_tokens": 2, "temperature": 1.0, "seed": 16},
)
CHAT = {"tools": [TOOL], "tool_choice": "required", "temperature": 1.0, "seed": 17, "max_tokens": 120}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """Both nodes by role; every prompt crosses, however short it is."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        common = [*SHARED, "--scheduler-name", "splitwise", "--scheduler-port", str(redis.port)]
        common += ["--splitwise-min-prompt", "0"]
        flags = {role: [*common, "--splitwise-role", role, "--speculative-config", METHODS[role]] for role in METHODS}
        with node_pair(flags) as started:
            yield started


@pytest.fixture(scope="module")
def answered() -> tuple[Requests, list[Any]]:
    """The requests, and the answers of one node that drafts nothing."""
    with real_server(*SHARED, "--no-enable-prefix-caching") as server:
        requests = make_requests(server)
        return requests, [answer(server, *request) for request in requests]


def make_requests(server: ServerProcess) -> Requests:
    """Return each variant with a prompt, one with a stop string across the two nodes, and a call."""
    prompts = prompts_of_lengths(Tokenizer.from_pretrained(resolve_model_path("demo")), LENGTHS)
    fields = {"model": "demo", "temperature": 0, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    requests: Requests = [
        ("/v1/completions", {**fields, "prompt": prompt, **variant})
        for variant, prompt in zip(VARIANTS, itertools.cycle(prompts))
    ]
    seam = {**fields, "prompt": prompts[-1]}
    first, both = (
        server.post("/v1/completions", {**seam, "max_tokens": number}).json()["choices"][0]["text"] for number in (1, 2)
    )
    assert both.startswith(first) and len(both) > len(first) > 0
    requests.append(("/v1/completions", {**seam, "stop": [both[len(first) - 1 : len(first) + 1]]}))
    messages = [{"role": "user", "content": "def add(a, b):"}]
    requests.append(("/v1/chat/completions", {**fields, "messages": messages, **CHAT}))
    return requests


def answer(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what must not depend on the nodes of an answer; ids of calls are drawn."""
    response = server.post(path, body)
    content = response.json()
    assert response.status_code == 200, content
    for choice in content["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call.pop("id")
    usage = {name: content["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": content["choices"], "usage": usage}


def counted(server: ServerProcess, name: str) -> float:
    """Return the sum of a counter over its labels."""
    found = re.findall(rf"^fastdeploy:{name}(?:\{{.*\}})? (\S+)$", server.get("/metrics").text, re.M)
    return sum(map(float, found))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_kind_of_request_is_answered_like_on_one_node(
    nodes: dict[str, ServerProcess], answered: tuple[Requests, list[Any]], role: str
) -> None:
    for request, alone in zip(*answered, strict=True):
        assert answer(nodes[role], *request) == alone, request


def test_blocks_have_moved_and_drafts_were_accepted(
    nodes: dict[str, ServerProcess], answered: tuple[Requests, list[Any]]
) -> None:
    for request in answered[0]:
        answer(nodes["decode"], *request)
    assert counted(nodes["decode"], "kv_transfer_imported_tokens_total") >= 700
    assert counted(nodes["decode"], "spec_decode_num_accepted_tokens_total") > 0
    assert counted(nodes["decode"], "kv_transfer_failures_total") == 0
