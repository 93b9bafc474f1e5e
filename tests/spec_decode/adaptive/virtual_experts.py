# SPDX-License-Identifier: Apache-2.0
"""Experts of an engine in virtual time: every row is routed, and reading each distinct expert takes time."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

NUM_TOKENS = 256  # of a request; later tokens are routed like the first ones


@dataclass(frozen=True)
class Experts:
    """The experts of a model.

    Attributes:
        num_layers: number of sparse layers.
        num_experts, num_chosen: experts of a layer, and experts per row.
        expert_s: seconds of reading one expert.
        overlap: correlation of the scores of neighbouring tokens of a request; with 0 they are independent.
        popularity: standard deviation of what an expert's scores have in common, relative to the rest.
    """

    num_layers: int
    num_experts: int
    num_chosen: int
    expert_s: float
    overlap: float = 0.0
    popularity: float = 0.0


class Router:
    """Routes the rows of steps.

    Attributes:
        load: [num_layers, 2] int32, of the last step, as fastdeploy.ops.experts.ExpertLoad has it.
    """

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self.load = np.zeros((experts.num_layers, 2), np.int32)

    def route(self, rows: Iterable[tuple[str, int, int]]) -> float:
        """Set the load of a step; return the seconds of reading its experts.

        Args:
            rows: for each request its id, the position of its first row, and the number of its rows.
        """
        chosen = [
            choose_experts(self.experts, request_id)[np.arange(first, first + count) % NUM_TOKENS]
            for request_id, first, count in rows
        ]
        counts = np.concatenate(chosen).sum(axis=0)
        self.load[:, 0], self.load[:, 1] = (counts > 0).sum(axis=1), counts.max(axis=1)
        return self.experts.expert_s * int(self.load[:, 0].sum())


@cache
def choose_experts(experts: Experts, request_id: str) -> NDArray:
    """Return [NUM_TOKENS, num_layers, num_experts] int8: 1 for the experts of each token of a request, else 0."""
    shape = (NUM_TOKENS, experts.num_layers, experts.num_experts)
    scores = np.random.default_rng(zlib.crc32(request_id.encode())).standard_normal(shape, np.float32)
    for i in range(1, NUM_TOKENS):
        scores[i] = experts.overlap * scores[i - 1] + (1 - experts.overlap**2) ** 0.5 * scores[i]
    scores += experts.popularity * np.random.default_rng(0).standard_normal(shape[1:], np.float32)
    best = np.argpartition(-scores, experts.num_chosen, axis=-1)[..., : experts.num_chosen]
    chosen = np.zeros(shape, np.int8)
    np.put_along_axis(chosen, best, 1, axis=-1)
    return chosen
