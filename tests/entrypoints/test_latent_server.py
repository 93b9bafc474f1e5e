# SPDX-License-Identifier: Apache-2.0
"""A model with latent attention is served on two nodes, which speculate in different ways, like on one plain node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.cluster.redis_server import RedisServer
from tests.entrypoints.server_process import ServerProcess, node_pair, real_server, sample
from tests.latent_model import save_latent_model

NAME = "latent"
METHODS = {
    "prefill": '{"method": "deepseek_mtp", "num_speculative_tokens": 2}',
    "decode": '{"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 3, "adaptive": false}',
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 6}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}
NUM_LAYERS, ROW_BYTES, STATE_BYTES = 2, 2 * 40, 2 * 32  # per token; an MTP layer reads the states
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": 2, "extra_body": {"ignore_eos": True}},
    "choices": {"temperature": 1.0, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2},
    "schema": {"temperature": 1.0, "seed": 4, "response_format": FORMAT},
    "tool": {"temperature": 1.0, "seed": 5, "tools": [TOOL], "tool_choice": "required", "max_tokens": 300},
}
MESSAGES: Any = [{"role": "user", "content": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"}]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_latent_model(tmp_path_factory.mktemp("model"), has_mtp_layer=True)
    return [str(folder), "--served-model-name", NAME, "--block-size", "16", "--tool-call-parser", "deepseek_v31"]


@pytest.fixture(scope="module")
def nodes(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """Both nodes by role; every prompt crosses."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        common = [*flags, "--scheduler-name", "splitwise", "--scheduler-port", str(redis.port)]
        common += ["--splitwise-min-prompt", "0"]
        given = {role: [*common, "--splitwise-role", role, "--speculative-config", METHODS[role]] for role in METHODS}
        with node_pair(given) as started:
            yield started


def chat(server: ServerProcess, keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer; ids of calls are drawn."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, **{"max_tokens": 60, **keys})
    choices = answer.model_dump()["choices"]
    for choice in choices:
        for call in choice["message"]["tool_calls"] or ():
            assert call.pop("id")
    return choices


def streamed(server: ServerProcess) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    keys: dict[str, Any] = {**CHATS["greedy"], "max_tokens": 60}
    chunks = client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, **keys)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_answers_are_those_of_one_plain_node_and_blocks_have_moved(
    flags: list[str], nodes: dict[str, ServerProcess]
) -> None:
    with real_server(*flags, "--no-enable-prefix-caching") as server:
        alone = {name: chat(server, keys) for name, keys in CHATS.items()}
        assert streamed(server) == alone["greedy"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in alone["schema"] + alone["tool"]] == ["stop", "tool_calls"]
    for role, server in nodes.items():
        assert {name: chat(server, keys) for name, keys in CHATS.items()} == alone, role
        assert streamed(server) == alone["greedy"][0]["message"]["content"], role
    page = nodes["decode"].get("/metrics").text
    assert (sample(page, "fastdeploy:kv_transfer_imported_tokens_total") or 0) > 0
    assert (sample(page, "fastdeploy:spec_decode_num_draft_tokens_total") or 0) > 0


def test_nodes_say_the_bytes_of_latent_rows(nodes: dict[str, ServerProcess]) -> None:
    for server in nodes.values():
        engine = server.get("/config-info").json()["engine"]
        cache, drafting = engine["kv_cache"], engine["speculation"]["mtp"]
        latent_bytes = cache["bytes"] - drafting["kv_cache_bytes"] - cache["num_tokens"] * STATE_BYTES
        assert latent_bytes == cache["num_tokens"] * NUM_LAYERS * ROW_BYTES
        num_scratch_tokens = engine["max_num_seqs"] * cache["block_size"]
        assert drafting["kv_cache_bytes"] == (cache["num_tokens"] + num_scratch_tokens) * ROW_BYTES
        assert sample(server.get("/metrics").text, "fastdeploy:kv_cache_planned_bytes") == cache["bytes"]
