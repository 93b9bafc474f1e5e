# SPDX-License-Identifier: Apache-2.0
"""A request as its client sees it: the deltas to read, with times of the owner's clock, and how it ends."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy.core.errors import (
    AttemptsFailedError,
    FastDeployError,
    InvalidRequestError,
    NoProgressError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
)
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import RequestMetrics, SpeculateMetrics, TokenDelta
from fastdeploy.core.seeds import choice_seed
from fastdeploy.ipc.streams import DeltaStream
from fastdeploy.scheduler.owned_request import OwnedRequest
from fastdeploy.scheduler.owner_events import End


class ClientRequest(DeltaStream):
    """The stream of a request whose legs may run on several nodes.

    Attributes:
        number: of the request, among those of its owner.
        owned: its state; None before it was submitted.
    """

    def __init__(self, number: int, request: GenerationRequest, node: str, arrived_at: float) -> None:
        """Create the stream of a request that has arrived at `node`; its metrics count from then."""
        super().__init__(request.request_id, request.params.n)
        self.number, self.request = number, request
        self.owned: OwnedRequest | None = None
        self._node = node
        self._arrived_at = arrived_at
        self._first_token_at: list[float | None] = [None] * request.params.n

    def deliver(self, delta: TokenDelta, now: float) -> None:
        """Give a delta, which is changed in place, to the client."""
        delta.request_id = self.request_id
        if delta.token_ids and self._first_token_at[delta.index] is None:
            self._first_token_at[delta.index] = now
        if delta.finish_reason is not None:
            delta.metrics = self._metrics(delta, now)
        self.put(delta)
        self.wake()

    def abort(self, now: float) -> int:
        """End every open choice with the finish reason `abort`; return the number of tokens delivered."""
        owned, params = self.owned, self.request.params
        tokens = [[] for _ in range(params.n)] if owned is None else owned.tokens
        ended = [False] * params.n if owned is None else owned.ended
        assert params.seed is not None
        for index in [index for index in range(params.n) if not ended[index]]:
            delta = TokenDelta(
                self.request_id,
                index,
                finish_reason="abort",
                seed=choice_seed(params.seed, index),
                speculate_metrics=SpeculateMetrics(),
                first_index=len(tokens[index]),
            )
            self.deliver(delta, now)
        return sum(map(len, tokens))

    def _metrics(self, delta: TokenDelta, now: float) -> RequestMetrics:
        metrics, owned = replace(delta.metrics or RequestMetrics()), self.owned
        first_token_at = self._first_token_at[delta.index]
        metrics.queue_s = self._queue_s(metrics)
        metrics.first_token_s = None if first_token_at is None else first_token_at - self._arrived_at
        metrics.finish_s = now - self._arrived_at
        if owned is None:
            return metrics
        cached = metrics.num_cached_tokens if owned.num_cached_tokens is None else owned.num_cached_tokens
        metrics.num_cached_tokens = min(cached, len(self.request.prompt_token_ids))
        metrics.num_attempts = 1 + len(owned.losses)
        metrics.path = owned.path
        if owned.claimant is not None:
            metrics.node = owned.claimant.node or self._node
        return metrics

    def _queue_s(self, metrics: RequestMetrics) -> float | None:
        """Return the seconds until an engine began with the request: the only one that had it says so precisely."""
        owned = self.owned
        if owned is None or owned.started_at is None:
            return None
        in_engine = metrics.queue_s if owned.leg == 1 else None
        return owned.started_at - self._arrived_at + (in_engine or 0.0)


def error_of(end: End) -> FastDeployError | None:
    """Return what to raise at the end of a request; None if it ended with its last delta."""
    match end.kind:
        case "":
            return None
        case "invalid":
            return InvalidRequestError(end.field, end.message)
        case "full":
            return QueueFullError(end.message)
        case "waited":
            return QueueTimeoutError(end.message)
        case "timeout":
            return RequestTimeoutError(end.message)
        case "stalled":
            return NoProgressError(end.message)
        case _:
            return AttemptsFailedError(end.message)
