# SPDX-License-Identifier: Apache-2.0
"""Fields of completions that change the prompt, or the order in which requests are served."""

from __future__ import annotations

import json
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


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that writes the text between `[[` and `]]`, whose tokenizer begins each prompt with `<s>`."""
    folder = tmp_path_factory.mktemp("scripted")
    with mock_server(folder, script=True, adds_bos=True, tokens_per_step=2) as running:
        yield running


def choices_of(server: ServerProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return text and log-probabilities of each choice; those of a stream are joined."""
    if not body.get("stream"):
        return list(server.post("/v1/completions", body).json()["choices"])
    chunks = [json.loads(line[6:]) for line in server.post("/v1/completions", body).text.split("\n\n")[:-2]]
    choices = [{"text": "", "logprobs": {"tokens": [], "text_offset": []}} for _ in range(body.get("n", 1))]
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices[choice["index"]]["text"] += choice["text"]
            for name, values in choices[choice["index"]]["logprobs"].items():
                values += choice["logprobs"][name] if choice["logprobs"] else []
    return choices


HIDDEN = ("<s>", "</s>", "<|user|>")
BODY: dict[str, Any] = {"prompt": "dog [[the <|user|>end STOP of]]", "logprobs": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    "change", [{}, {"skip_special_tokens": False}, {"stop": "STOP"}, {"truncate_prompt_tokens": 9}]
)
def test_text_offset_is_the_place_in_the_text_of_the_answer(
    scripted: ServerProcess, change: dict[str, Any], echo: bool, stream: bool
) -> None:
    choices = choices_of(scripted, {**BODY, **change, "echo": echo, "stream": stream, "n": 2})
    end = "the <|user|>end STOP of" if "skip_special_tokens" in change else "the end STOP of"
    expected = (BODY["prompt"] if echo else "") + (end.partition("STOP")[0] if "stop" in change else end)
    for choice in choices:
        text, names, offsets = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert text == expected
        for name, offset in zip(names, offsets, strict=True):
            rest = text[offset:]  # ends before the stop string
            assert rest.startswith(name) or name.startswith(rest) or name in HIDDEN, (name, rest)
        begin = offsets[1 if names[0] == "<s>" else 0]
        assert begin == (text.index(names[0]) if "truncate_prompt_tokens" in change and echo else 0)
        assert max(offsets) == len(text) or "stop" in change


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
