# SPDX-License-Identifier: Apache-2.0
"""Where a request's text ends, and what is reported of each step.

Stops are judged token by token in order, inside one step: tokens behind the stop are dropped before the ledger, the
caches or any statistic sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastdeploy.core.outputs import ErrorInfo, RequestMetrics, SpeculateMetrics, TokenDelta
from fastdeploy.core.request import Request, SpeculationTally
from fastdeploy.core.step import RequestResult


class StopStringScanner(Protocol):
    """Watches one request's text for its stop strings: see detokenize.stop_strings."""

    def push(self, token_id: int) -> str | None:
        """Return the stop string that this token completes, if any; none before min_tokens."""


ScannerFactory = Callable[[Request], StopStringScanner]


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens of a step that count, and why they are the last, if they are: fields as in `TokenDelta`."""

    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_complete: bool = False


class OutputProcessor:
    """Finds the end of each request and turns results into `TokenDelta`s."""

    def __init__(self, eos_token_ids: list[int], make_scanner: ScannerFactory, clock: Callable[[], float]) -> None:
        """Make a processor for one model.

        Args:
            eos_token_ids: the model's end tokens.
            make_scanner: gives a request with stop strings its scanner.
            clock: seconds, monotonic.
        """
        self._eos = frozenset(eos_token_ids)
        self._make_scanner = make_scanner
        self._scanners: dict[tuple[str, int], StopStringScanner] = {}
        self._clock = clock

    def start(self, request: Request) -> None:
        """Prepare for a new request."""
        if request.params.stop:
            self._scanners[request.key] = self._make_scanner(request)

    def finish(self, request: Request) -> None:
        """Forget a request."""
        self._scanners.pop(request.key, None)

    def cut(self, request: Request, token_ids: list[int]) -> Emission:
        """Return the tokens up to the first stop, the stop's own token included."""
        params, constraint = request.params, request.constraint
        scanner = self._scanners.get(request.key) if params.stop else None
        first = request.num_output_tokens + 1
        for num_output, token_id in enumerate(token_ids, first):
            kept = slice(num_output - first + 1)
            stop_string = scanner.push(token_id) if scanner else None
            ending = constraint.push(token_id) if constraint else None
            if stop_string is not None:
                return Emission(token_ids[kept], "stop", stop_string)
            if num_output > params.min_tokens:
                if token_id in params.stop_token_ids:
                    return Emission(token_ids[kept], "stop", token_id)
                if token_id in self._eos and not params.ignore_eos:
                    return Emission(token_ids[kept], "stop")
            if ending is not None:
                return Emission(token_ids[kept], ending, is_complete=ending == "stop")
            if request.num_prompt_tokens + num_output >= request.max_total_tokens:
                return Emission(token_ids[kept], "length")
        return Emission(token_ids)

    def delta(self, request: Request, result: RequestResult, emission: Emission, drafted_by: list[str]) -> TokenDelta:
        """Report one step of one request; call after the ledger has taken the tokens.

        Args:
            drafted_by: the proposer of each accepted draft.
        """
        count = len(emission.token_ids)
        if count and request.metrics.first_token_s is None:
            request.metrics.first_token_s = self._clock() - request.arrival_s
        delta = TokenDelta(
            request_id=request.request_id,
            index=request.index,
            token_ids=emission.token_ids,
            drafted_by=drafted_by[:count],
            logprobs=None if result.logprobs is None else result.logprobs[:count],
            is_complete=emission.is_complete,
            seed=request.seed,
        )
        if count and request.params.prompt_logprobs is not None and request.num_output_tokens == count:
            delta.prompt_logprobs = [None, *request.prompt_logprobs]
        if emission.finish_reason is not None:
            self.end(delta, request, emission.finish_reason, emission.stop_reason)
        return delta

    def end(
        self,
        delta: TokenDelta,
        request: Request,
        finish_reason: str,
        stop_reason: int | str | None = None,
        error: ErrorInfo | None = None,
    ) -> TokenDelta:
        """Make `delta` the request's last one."""
        request.metrics.finish_s = self._clock() - request.arrival_s
        delta.finish_reason = finish_reason
        delta.stop_reason = stop_reason
        delta.error = error
        delta.seed = request.seed
        delta.metrics = RequestMetrics(**vars(request.metrics))
        delta.speculate_metrics = speculate_metrics(request.tally)
        return delta


def speculate_metrics(tally: SpeculationTally) -> SpeculateMetrics:
    """Compute a request's metrics from its counts (definitions: docs/glossary.md)."""
    drafted_at, accepted_at = tally.drafted_at(), tally.accepted_at()
    drafted, accepted = sum(drafted_at), sum(accepted_at)
    return SpeculateMetrics(
        accepted_tokens=accepted,
        rejected_tokens=drafted - accepted,
        accept_ratio=accepted / drafted if drafted else 0.0,
        average_accept_length=tally.num_emitted / tally.num_steps if tally.num_steps else 0.0,
        accepted_tokens_per_head=accepted_at,
        accept_ratio_per_head=[a / d for a, d in zip(accepted_at, drafted_at)],
        num_steps=tally.num_steps,
        drafted_tokens=drafted,
        source=dict(tally.drafted_per_source),
    )
