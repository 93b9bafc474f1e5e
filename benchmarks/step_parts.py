# SPDX-License-Identifier: Apache-2.0
"""Which parts of a model does a step spend its time in? Times each operator of a step and adds up those of a part."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from benchmarks.launches import Replay
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.ops import registry
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.linear import PackedLinear

REST = "engine and Python"
TIMING = "timing itself"  # timing the launches of a graph one by one, which no other step does
Calls = list[tuple[str, float]]  # (label, seconds) of each operator call of a step, in order
Profile = dict[str, float]  # part -> seconds


def time_parts(step: Callable[[], object], config: ModelConfig, clock: Callable[[], float]) -> Profile:
    """Run a step; return the seconds of each of its parts."""
    calls: Calls = []
    begin = clock()
    with timed_operators(calls, clock):
        step()
    seconds = clock() - begin
    calls.append((REST, seconds - sum(spent for _, spent in calls)))
    return by_part(calls, part_names(config))


@contextmanager
def timed_operators(calls: Calls, clock: Callable[[], float]) -> Iterator[None]:
    """Add each operator call of this block to `calls`; launches of a captured graph are timed one by one."""
    on_thread_time = clock is time.thread_time

    def replay(self: OpGraph, num_rows: int, num_seqs: int) -> None:
        begin = clock()
        seconds = Replay(self, num_rows, num_seqs).time_kernels(on_thread_time)
        calls.extend(zip(_labels(self), seconds, strict=True))
        calls.append((TIMING, clock() - begin - sum(seconds)))

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            result = function(*args, **kwargs)
            calls.append((_label(name, args), clock() - begin))
            return result

        return call

    entries = registry.entries().values()
    runs = [entry.run for entry in entries]
    for entry in entries:
        entry.run = timed(entry.name, entry.run)
    try:
        with patch.object(OpGraph, "replay", replay):
            yield
    finally:
        for entry, run in zip(entries, runs):
            entry.run = run


@lru_cache(maxsize=8)
def _labels(graph: OpGraph) -> list[str]:
    return graph.describe()


def _label(name: str, args: tuple[Any, ...]) -> str:
    weight = next((arg for arg in args if isinstance(arg, PackedLinear)), None)
    return name if weight is None else f"Linear [{weight.out_features}, {weight.in_features}]"


def part_names(config: ModelConfig) -> dict[str, str]:
    """Return the name of each linear layer of a model by its shape, with which the operator's label ends."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    parts = {
        "qkv": [(heads + 2 * config.num_kv_heads * config.head_dim, hidden)],
        "attention output": [(hidden, heads)],
        "gate and up": [(2 * inner, hidden), (inner, hidden)],  # the second if SwiGLU is part of the operator
        "down": [(hidden, inner)],
        "head": [(config.vocab_size, hidden)],
    }
    return {f"[{n}, {k}]": name for name, shapes in parts.items() for n, k in shapes}


def by_part(seconds: Iterable[tuple[str, float]], names: Mapping[str, str]) -> Profile:
    """Add up the seconds of each part; an operator that is no linear layer is a part of its own."""
    merged: Profile = defaultdict(float)
    for label, spent in seconds:
        merged[next((name for end, name in names.items() if label.endswith(end)), label)] += spent
    return merged
