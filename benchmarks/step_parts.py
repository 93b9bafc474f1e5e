# SPDX-License-Identifier: Apache-2.0
"""The operator calls of one step, each with its time, under the names of the model's parts."""

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
TIMING = "timing itself"  # what telling launches apart takes, which no other step does
Calls = list[tuple[str, float]]  # what every operator call of a step was, and its seconds, in order
Profile = dict[str, float]  # seconds by part


@contextmanager
def timed_operators(calls: Calls, on_thread_time: bool = False) -> Iterator[None]:
    """Add every operator that runs meanwhile to `calls`, launches of graphs one by one."""
    clock = time.thread_time if on_thread_time else time.perf_counter

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
    if weight is None:
        return name
    return f"Linear [{weight.out_features}, {weight.in_features}]"


def part_names(config: ModelConfig) -> dict[str, str]:
    """Return what the linear layers of a model are, by the end of their labels."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    parts = {
        "qkv": [(heads + 2 * config.num_kv_heads * config.head_dim, hidden)],
        "attention output": [(hidden, heads)],
        "gate and up": [(2 * inner, hidden), (inner, hidden)],  # the second where SwiGLU is part of the layer
        "down": [(hidden, inner)],
        "head": [(config.vocab_size, hidden)],
    }
    return {f"[{n}, {k}]": name for name, shapes in parts.items() for n, k in shapes}


def part_of(label: str, names: Mapping[str, str]) -> str:
    """Return the part that an operator's label belongs to: the label itself where `names` has none for its end."""
    return next((name for end, name in names.items() if label.endswith(end)), label)


def by_part(seconds: Iterable[tuple[str, float]], names: Mapping[str, str]) -> Profile:
    """Add up the seconds of the labels of each part."""
    merged: Profile = defaultdict(float)
    for label, spent in seconds:
        merged[part_of(label, names)] += spent
    return merged
