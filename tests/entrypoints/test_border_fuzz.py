# SPDX-License-Identifier: Apache-2.0
"""Random bodies made of known fields and odd values: the server answers each of them, and never by its own fault."""

from __future__ import annotations

import random
from typing import Any

import httpx
import msgspec

from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from tests.entrypoints.server_process import ServerProcess

NUM_REQUESTS = 500
NUMBERS = [0, 1, -1, 2, 20, 21, 2**31, 2**63, 2**64, -(2**63), 2**70, 0.0, 0.5, -1.5, 1e308, 1e-300]
TEXTS = ["", "a", "the", "\x00", "é🙂", "</s>", "x" * 500]
KEYS = ["type", "role", "content", "text", "method", "include_usage", "5", "999"]
PATHS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "the"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "hi"}]}),
}


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    kinds = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(TEXTS),
        lambda: [rng.randrange(400) for _ in range(rng.randrange(4))],
        lambda: {str(rng.randrange(500)): rng.choice([1, -5.5, 200, None, "x"])},
    ]
    if depth < 3:
        kinds.append(lambda: [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))])
        kinds.append(lambda: {rng.choice(KEYS): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))})
    return rng.choice(kinds)()


def test_no_body_is_answered_by_an_error_of_our_own(server: ServerProcess) -> None:
    rng = random.Random(20)
    statuses = set()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(NUM_REQUESTS):
            path = rng.choice(list(PATHS))
            model, valid = PATHS[path]
            body = {**valid, "max_tokens": 3}
            for _ in range(rng.choice([1, 1, 2])):
                body[rng.choice(msgspec.structs.fields(model)).name] = odd_value(rng)
            answer = client.post(path, json=body)
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], body
    assert statuses == {200, 400, 404}
    assert server.get("/load").json()["num_requests"] == 0
    assert "Traceback" not in server.stderr
