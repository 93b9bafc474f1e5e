# SPDX-License-Identifier: Apache-2.0
"""Sends requests to a server at the times of a Poisson process and keeps when each piece of each answer came."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.entrypoints.cli.http_client import HttpClient, ServerError, UnreachableError


@dataclass
class Result:
    """One request. Times in seconds.

    Attributes:
        ttft_s: sending to the first event that carries text.
        gaps_s: between events that carry text; one event may carry several tokens.
        e2e_s: sending to the end.
        error: why there is no whole answer; empty for a good one.
    """

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Return seconds from the start at which requests are sent: all at once for an infinite rate, else Poisson."""
    if math.isinf(rate):
        return [0.0] * count
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


async def run_load(
    client: HttpClient,
    path: str,
    bodies: Sequence[dict[str, Any]],
    times: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[], object],
) -> tuple[list[Result], float]:
    """Send every body at its time, at most `max_concurrency` at once; return the results and the seconds it took."""
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    begin = time.perf_counter()

    async def one(body: dict[str, Any], at_s: float) -> Result:
        await asyncio.sleep(begin + at_s - time.perf_counter())
        async with places:
            result = await _measure(client, path, body)
        on_done()
        return result

    results = await asyncio.gather(*(one(body, at_s) for body, at_s in zip(bodies, times, strict=True)))
    return list(results), time.perf_counter() - begin


async def _measure(client: HttpClient, path: str, body: dict[str, Any]) -> Result:
    result = Result()
    begin = last = time.perf_counter()
    usage: dict[str, Any] | None = None
    try:
        async for event in client.stream(path, body):
            usage = event.get("usage") or usage
            if not any(_has_text(choice) for choice in event.get("choices", ())):
                continue
            now = time.perf_counter()
            if last == begin:
                result.ttft_s = now - begin
            else:
                result.gaps_s.append(now - last)
            last = now
    except (ServerError, UnreachableError) as error:
        result.error = str(error)
        return result
    result.e2e_s = time.perf_counter() - begin
    if usage is None:
        result.error = "the server sent no usage, so its tokens cannot be counted"
    else:
        result.input_tokens, result.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return result


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta", {})
    return bool(choice.get("text") or any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")))
