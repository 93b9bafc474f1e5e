# SPDX-License-Identifier: Apache-2.0
"""Requests drawn from a seed, and the answers that one node alone gives."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from tests.cluster.clients import Answer, ask, make_client

MODEL = "cluster"  # --served-model-name of all nodes
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 255
PROMPT_LENGTHS = (1, 3, 20, 64, 65, 130, 300)
OUTPUT_LENGTHS = (1, 2, 30, 60, 100, 150)


def draw_body(draw: random.Random, request_id: str) -> dict[str, Any]:
    """Return the body of a request with a seed; prompts often share their first blocks."""
    shared = [FIRST_TOKEN_ID + i % 200 for i in range(draw.choice([0, 0, 64, 128]))]
    length = draw.choice(PROMPT_LENGTHS)
    prompt = shared + [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(length)]
    body: dict[str, Any] = {
        "model": MODEL,
        "request_id": request_id,
        "prompt_token_ids": prompt,
        "max_tokens": draw.choice(OUTPUT_LENGTHS),
        "ignore_eos": True,
        "seed": draw.randint(0, 10**9),
        "n": draw.choice([1, 1, 1, 1, 2, 3]),
        "temperature": draw.choice([0, 1, 1]),
    }
    if draw.random() < 0.2:
        body["logprobs"] = draw.randint(0, 3)
    if draw.random() < 0.2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}
    return body


class Reference:
    """The answers of one node that works alone; each body is asked once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._answers: dict[str, Answer] = {}

    def answers(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        """Return the answers to these bodies, in their order."""
        return asyncio.run(self._ask_all(bodies))

    async def _ask_all(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        async with make_client() as client:
            return list(await asyncio.gather(*(self._ask(client, body) for body in bodies)))

    async def _ask(self, client: Any, body: dict[str, Any]) -> Answer:
        key = json.dumps({**body, "request_id": ""}, sort_keys=True)
        if key not in self._answers:
            answer = await ask(client, self._url, body)
            assert answer.is_complete and answer.error is None, answer.outcome()
            self._answers[key] = answer
        return self._answers[key]
