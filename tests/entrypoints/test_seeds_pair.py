# SPDX-License-Identifier: Apache-2.0
"""The two commands of the 1P1D deployment start a pair of nodes, and either node answers like one node alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import openai
import pytest

from tests.cluster.redis_server import RedisServer
from tests.entrypoints.seeds_commands import COMMANDS
from tests.entrypoints.server_process import ServerProcess, node_pair, real_server
from tests.entrypoints.test_seeds import flags_of

PASSWORD = "scheduler_mtp"
MTP = '{"method": "mtp", "num_speculative_tokens": 1, "model": "demo"}'
LONG = "\n".join(
    f"def function_{number}(first, second):\n    return first + {number} * second\n" for number in range(12)
)
REQUESTS: tuple[dict[str, object], ...] = (
    {"prompt": LONG + "\ndef function_12(", "temperature": 0, "max_tokens": 40},
    {"prompt": LONG + "\nclass ", "temperature": 0.9, "seed": 5, "max_tokens": 40, "logprobs": 3},
    {"prompt": LONG, "temperature": 1.0, "seed": 6, "max_tokens": 24, "n": 2, "presence_penalty": 0.5},
    {"prompt": "import", "temperature": 0.7, "seed": 7, "max_tokens": 24},
    {"prompt": LONG + "\nfor name in", "temperature": 0, "max_tokens": 1},
)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """Both nodes, by role, started by their commands with another port for everything that listens."""
    with RedisServer(tmp_path_factory.mktemp("redis"), requirepass=PASSWORD) as redis:
        flags = {}
        for command in COMMANDS:
            if command.role:
                text = re.sub(r"--port \d+", "--port 0", command.text)
                text = re.sub(r"--metrics-port \d+", "", text)
                flags[command.role] = [*flags_of(text.replace("6379", str(redis.port))), "--max-model-len", "2048"]
        with node_pair(flags) as started:
            yield started


@pytest.fixture(scope="module")
def expected() -> list[dict[str, object]]:
    """The answers of one node that works alone."""
    flags = ["demo", "--quantization", "wint4", "--speculative-config", MTP, "--no-enable-prefix-caching"]
    with real_server(*flags) as server:
        return [answer(server, request) for request in REQUESTS]


def answer(server: ServerProcess, request: dict[str, object]) -> dict[str, object]:
    """Return what must not depend on the node of a completion."""
    client = openai.OpenAI(api_key="EMPTY", base_url=server.url + "/v1", max_retries=0)
    metrics = {"collect_metrics": True}
    completion = client.completions.create(model="demo", extra_body=metrics, **request)  # type: ignore[call-overload]
    body = completion.model_dump()
    fields = ("text", "index", "finish_reason", "logprobs")
    return {
        "choices": [
            {key: choice[key] for key in fields} | {"speculation": sorted(choice["speculate_metrics"] or ())}
            for choice in body["choices"]
        ],
        "usage": {key: body["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")},
    }


def streamed_text(server: ServerProcess, request: dict[str, object]) -> str:
    client = openai.OpenAI(api_key="EMPTY", base_url=server.url + "/v1", max_retries=0)
    chunks = client.completions.create(model="demo", stream=True, **request)  # type: ignore[call-overload]
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def counted(servers: dict[str, ServerProcess], name: str) -> float:
    """Return the sum of a counter over all labels and nodes."""
    pages = [server.get("/metrics").text for server in servers.values()]
    return sum(
        float(value) for page in pages for value in re.findall(rf"^fastdeploy:{name}\{{.*\}} (\S+)$", page, re.M)
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_either_node_answers_like_one_node_alone(
    nodes: dict[str, ServerProcess], expected: list[dict[str, object]], role: str
) -> None:
    assert [answer(nodes[role], request) for request in REQUESTS] == expected
    for request, alone in zip(REQUESTS[:2], expected):
        choices = alone["choices"]
        assert isinstance(choices, list)
        assert streamed_text(nodes[role], request) == choices[0]["text"]


def test_blocks_have_moved_between_the_nodes(nodes: dict[str, ServerProcess]) -> None:
    answer(nodes["decode"], REQUESTS[0])
    assert counted(nodes, "kv_transfer_bytes_total") > 0
    assert counted(nodes, "kv_transfer_failures_total") == 0


def test_nodes_see_each_other_and_show_no_password(nodes: dict[str, ServerProcess]) -> None:
    for role, server in nodes.items():
        health = server.get("/health").json()
        assert (health["role"], health["cluster"]) == (role, "ok")
        assert server.get("/config-info").json()["cluster"]["splitwise_role"] == role
        assert PASSWORD not in server.get("/config-info").text + server.stdout + server.stderr


def test_a_node_that_is_asked_to_end_does(nodes: dict[str, ServerProcess]) -> None:
    nodes["prefill"].terminate()
    assert nodes["prefill"].wait_end(120) == 0
    assert answer(nodes["decode"], REQUESTS[3])["choices"], "the other one serves alone"
