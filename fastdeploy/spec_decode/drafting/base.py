# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of the runner of a drafting model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from fastdeploy.core.request import NO_DRAFT, Request
from fastdeploy.core.step import StepPlan
from fastdeploy.ops.block_moves import BlockRegion
from fastdeploy.worker.model_runner import RunnerConfig


class Drafter(ABC):
    """Runs a drafting model for many requests together.

    The methods about blocks do nothing unless the model has caches under the target's block ids.

    Attributes:
        config: sizes of the drafting model.
        num_stages: number of models or layers that draft in turn and have caches.
    """

    config: RunnerConfig
    num_stages: int

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what the model is, and the bytes that it adds to the target's, without its key/value caches."""

    @abstractmethod
    def begin_step(self, plan: StepPlan) -> bool:
        """Take note of a step of the target that is about to run; return whether `end_step` has work to do."""

    @abstractmethod
    def reset(self) -> None:
        """Draft again from the next step on, because a call raised."""

    @abstractmethod
    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return up to counts[i] tokens to follow the last one of requests[i].

        The target must have computed all tokens of a request except the last.
        """

    def draft_timed(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Draft for requests that no step has computed, to measure the time."""
        return self.draft(requests, counts)

    def end_step(self) -> None:  # noqa: B027  # most drafting models have nothing to do
        """Continue after the step."""

    def block_regions(self) -> dict[str, list[BlockRegion]]:
        """Describe the blocks of the caches, `drafting`, and of the target's states that the model reads, `states`."""
        return {}

    def fill(self, request: Request, end: int) -> None:  # noqa: B027
        """Compute the positions before `end` of a request that has been computed by the target up to there."""

    def num_filled(self, block_id: int) -> list[int]:
        """Return the number of leading slots of a block that each stage has filled."""
        return []

    def set_filled(self, block_id: int, num_filled: Sequence[int]) -> None:  # noqa: B027
        """Record what the caches of the stages hold of a block that was imported."""


def sampled_tokens(drafted: Iterable[int]) -> list[int]:
    """Return a draft, which ends where no token could be sampled (-1)."""
    return list(takewhile(lambda token: token >= 0, drafted))


def no_drafts(requests: Sequence[Request]) -> list[list[int]]:
    """Return an empty draft for each request."""
    return [NO_DRAFT.token_ids] * len(requests)
