# SPDX-License-Identifier: Apache-2.0
"""Requests, keys and processes do not affect each other; real engine, demonstration model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.hub.model_path import resolve_model_path
from tests.entrypoints.server_process import ServerProcess, real_server
from tests.entrypoints.test_lifecycle import StreamInThread, metric, until

BFLOAT16_MAX, BFLOAT16_100 = 0x7F7F, 0x42C8
POISON = 77  # token id whose values are not finite
FLAGS = ("--max-model-len", "256", "--num-gpu-blocks-override", "80")
BODY: dict[str, Any] = {"prompt": list(range(100, 130)), "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def poison_embedding(source: Path, target: Path) -> None:
    """Copy the demonstration model with finite weights that overflow for one token; the head is an intact copy.

    Only the embedding of that token has a first element. The first layer's values of all other tokens are therefore
    their product with 0, and those of this token infinite.
    """
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = read_safetensors(target / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    kind, shape, rows = tensors[name]
    tensors["lm_head.weight"] = (kind, shape, rows)
    embedding = np.frombuffer(rows, np.uint16).reshape(shape).copy()
    embedding[:, 0] = 0
    embedding[POISON, 0] = BFLOAT16_100
    tensors[name] = (kind, shape, embedding.tobytes())
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.v_proj.weight"))
    kind, shape, rows = tensors[name]
    projection = np.frombuffer(rows, np.uint16).reshape(shape).copy()
    projection[:, 0] = BFLOAT16_MAX
    tensors[name] = (kind, shape, projection.tobytes())
    write_safetensors(target / "model.safetensors", tensors)


Tensors = dict[str, tuple[str, list[int], bytes]]


def read_safetensors(file: Path) -> Tensors:
    raw = file.read_bytes()
    [length] = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    return {name: (at["dtype"], at["shape"], data[slice(*at["data_offsets"])]) for name, at in header.items()}


def write_safetensors(file: Path, tensors: Tensors) -> None:
    header, data = {}, b""
    for name, (kind, shape, values) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model cannot compute prompts that contain the poison."""
    model = tmp_path_factory.mktemp("poisoned") / "model"
    poison_embedding(Path(resolve_model_path("demo")), model)
    with real_server(str(model), *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def keyed() -> Iterator[ServerProcess]:
    """A server with two API keys."""
    with real_server("demo", *FLAGS, "--api-key", "alice", "--api-key", "bob") as server:
        yield server


def text_of(server: ServerProcess, **change: Any) -> str:
    response = server.post("/v1/completions", {**BODY, **change})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_request_with_nan_logits_fails_alone(poisoned: ServerProcess) -> None:
    prompts = [list(range(100 + 7 * i, 130 + 7 * i)) for i in range(8)]
    alone = [text_of(poisoned, prompt=prompt) for prompt in prompts]
    bad = [*prompts[0][:20], POISON, *prompts[0][20:]]

    def run(i: int) -> tuple[int, dict[str, Any]]:
        response = poisoned.post("/v1/completions", {**BODY, "prompt": bad if i % 2 else prompts[i // 2]})
        return response.status_code, response.json()

    for _ in range(2):  # the second time in blocks whose values were NaN
        with ThreadPoolExecutor(16) as threads:
            responses = list(threads.map(run, range(16)))
        assert [response["choices"][0]["text"] for _, response in responses[::2]] == alone
        for status, response in responses[1::2]:
            assert (status, response["error"]["type"], response["error"]["code"]) == (500, "internal_error", "numerics")
    assert metric(poisoned, 'request_success_total{finish_reason="error"}') == 16
    assert metric(poisoned, "available_gpu_block_num") == metric(poisoned, "max_gpu_block_num")


def test_failing_request_ends_its_stream_with_a_typed_error(poisoned: ServerProcess) -> None:
    response = poisoned.post("/v1/completions", {**BODY, "prompt": [100, POISON], "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "numerics")


def cached_tokens(server: ServerProcess, key: str, **change: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    response = server.post("/v1/completions", {**BODY, "max_tokens": 2, **change}, headers=headers)
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_prefixes_are_shared_within_one_key_only(keyed: ServerProcess) -> None:
    prompt = [200 + i % 90 for i in range(150)]
    assert cached_tokens(keyed, "alice", prompt=prompt) == 0
    assert cached_tokens(keyed, "alice", prompt=prompt) == 128
    assert cached_tokens(keyed, "bob", prompt=prompt) == 0
    assert cached_tokens(keyed, "bob", prompt=prompt) == 128


def test_cache_salt_separates_requests_of_one_key_and_never_joins_two_keys(keyed: ServerProcess) -> None:
    prompt = [300 + i % 90 for i in range(150)]
    assert cached_tokens(keyed, "alice", prompt=prompt, cache_salt="tenant") == 0
    assert cached_tokens(keyed, "alice", prompt=prompt) == 0
    assert cached_tokens(keyed, "alice", prompt=prompt, cache_salt="tenant") == 128
    assert cached_tokens(keyed, "bob", prompt=prompt, cache_salt="tenant") == 0


def accepted_drafts(server: ServerProcess, key: str) -> int:
    sampled = {"temperature": 1.5, "seed": 3, "max_tokens": 120, "collect_metrics": True}
    response = server.post("/v1/completions", {**BODY, **sampled}, headers={"Authorization": f"Bearer {key}"})
    return int(response.json()["choices"][0]["speculate_metrics"]["accepted_tokens"])


def test_outputs_of_one_key_are_drafted_for_that_key_only() -> None:
    speculation = ("--speculative-config", '{"method": "suffix", "adaptive": false}')
    with real_server("demo", *FLAGS, *speculation, "--api-key", "alice", "--api-key", "bob") as server:
        unheard = accepted_drafts(server, "alice")
        assert accepted_drafts(server, "alice") > unheard + 40
        assert accepted_drafts(server, "bob") == unheard


def test_sixteen_streams_complete_after_sigterm(capsys: pytest.CaptureFixture[str]) -> None:
    with real_server("demo", *FLAGS) as server:
        expected = [text_of(server, prompt=[150 + i, 151, 152], max_tokens=200) for i in range(16)]
        streams = [
            StreamInThread(server, **{**BODY, "prompt": [150 + i, 151, 152], "max_tokens": 200}) for i in range(16)
        ]
        begin = time.monotonic()
        server.terminate()
        found = [stream.events() for stream in streams]
        streams_s = time.monotonic() - begin
        assert server.wait_end() == 0
        exit_s = time.monotonic() - begin
    assert ["".join(event["choices"][0]["text"] for event in events) for events in found] == expected
    assert all(events[-1]["choices"][0]["finish_reason"] == "length" for events in found)
    with capsys.disabled():
        print(f"\nSIGTERM: last stream complete after {streams_s:.2f} s, exit after {exit_s:.2f} s")


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_engine_is_reported_to_every_client(workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    with real_server("demo", *FLAGS, "--max-model-len", "2048", "--workers", str(workers)) as server:
        [engine] = [p for p in server.engine_pids() if b"engine_process" in Path(f"/proc/{p}/cmdline").read_bytes()]
        slow = {**BODY, "max_tokens": 2000}
        with ThreadPoolExecutor(4) as threads:
            whole = [threads.submit(server.post, "/v1/completions", slow) for _ in range(4)]
            streams = [StreamInThread(server, **slow) for _ in range(4)]
            until(lambda: metric(server, "num_requests_running") == 8, "all run")
            os.kill(engine, signal.SIGKILL)
            begin = time.monotonic()
            for response in whole:
                assert response.result().status_code == 503
                assert response.result().json()["error"]["type"] == "service_unavailable_error"
            for stream in streams:
                assert stream.events()[-1]["error"]["type"] == "service_unavailable_error"
            told_s = time.monotonic() - begin
        assert server.wait_end() == 1
        exit_s = time.monotonic() - begin
    assert "fastdeploy: error: the engine process ended with status -9; the last lines of its log:" in server.stderr
    with capsys.disabled():
        print(f"\nkill -9 of the engine, {workers} workers: told after {told_s:.2f} s, exit after {exit_s:.2f} s")
