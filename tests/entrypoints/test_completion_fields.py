# SPDX-License-Identifier: Apache-2.0
"""Fields of completions that change the prompt, or the order in which requests are served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fastdeploy.detokenize.fill_in import MARKERS
from tests.entrypoints.server_process import ServerProcess, mock_server, real_server

FILL: dict[str, Any] = {"prompt": "the quick", "suffix": "the end", "max_tokens": 3, "return_token_ids": True}


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose tokenizer has fill-in-the-middle tokens."""
    with mock_server(tmp_path_factory.mktemp("fim"), special_tokens=MARKERS[0]) as running:
        yield running


def test_suffix_gives_a_fill_in_the_middle_prompt_and_echo_repeats_the_client_s_prompt(filling: ServerProcess) -> None:
    choice = filling.post("/v1/completions", {**FILL, "echo": True}).json()["choices"][0]
    before, between, end = MARKERS[0]
    assert choice["prompt_tokens"] == f"{before}the quick{between}the end{end}"
    assert choice["text"].startswith("the quick")
    assert filling.post("/v1/completions", {**FILL, "suffix": ""}).json()["choices"][0]["prompt_tokens"] == "the quick"


@pytest.mark.parametrize(
    ("change", "param"), [({"prompt": [5, 6]}, "suffix"), ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens")]
)
def test_suffix_needs_a_whole_prompt_of_text(filling: ServerProcess, change: dict[str, Any], param: str) -> None:
    response = filling.post("/v1/completions", {**FILL, **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_several_prompts_share_a_suffix(filling: ServerProcess) -> None:
    choices = filling.post("/v1/completions", {**FILL, "prompt": ["a", "b"]}).json()["choices"]
    before, between, end = MARKERS[0]
    assert [choice["prompt_tokens"] for choice in choices] == [f"{before}{x}{between}the end{end}" for x in "ab"]


def wait_for_num_waiting(server: ServerProcess, count: int) -> None:
    for _ in range(5000):
        if server.get("/load").json()["num_waiting"] == count:
            return
    raise AssertionError(f"{count} requests never waited")


def test_lower_priority_is_served_first() -> None:
    ended: list[str] = []

    def complete(server: ServerProcess, name: str, priority: int) -> None:
        body = {"prompt": name, "max_tokens": 20, "priority": priority, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200
        ended.append(name)

    with real_server("demo", "--max-num-seqs", "1") as running, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "first", "stream": True, "ignore_eos": True, "priority": -9, "n": 8}
        with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as first:
            lines = first.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            tasks = [pool.submit(complete, running, "late", 5)]
            wait_for_num_waiting(running, 8)  # seven choices of the first and this one
            tasks.append(pool.submit(complete, running, "early", -5))
            wait_for_num_waiting(running, 9)
        for task in tasks:
            task.result(60)
    assert ended == ["early", "late"]
