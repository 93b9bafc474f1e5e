# SPDX-License-Identifier: Apache-2.0
"""Finds where a request ends and makes the token deltas of each step.

The tokens of a step are checked for stops in order. Tokens after a stop are dropped before they reach the ledger, the
caches or the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from fastdeploy.core.constraint import TokenConstraint
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.faults import fault_point
from fastdeploy.core.outputs import ErrorInfo, RequestMetrics, SpeculateMetrics, TokenDelta
from fastdeploy.core.request import Request, SpeculationStats
from fastdeploy.core.step import RequestResult, ScheduledRequest


class StopStringScanner(Protocol):
    """Searches the text of one request for its stop strings: see detokenize.stop_strings."""

    def push(self, token_id: int) -> str | None:
        """Append a token; return the stop string that it completes, None before min_tokens or if there is none."""


ScannerFactory = Callable[[Request], StopStringScanner]


class OutputProcessor:
    """Finds the end of each request and converts results to `TokenDelta`s."""

    def __init__(self, eos_token_ids: list[int], make_scanner: ScannerFactory, clock: Callable[[], float]) -> None:
        """Create a processor for one model.

        Args:
            eos_token_ids: the model's end tokens.
            make_scanner: makes the scanner of a request with stop strings.
            clock: seconds, monotonic.
        """
        self._eos_token_ids = frozenset(eos_token_ids)
        self._make_scanner = make_scanner
        self._scanners: dict[Request, StopStringScanner] = {}
        self._end_ids: dict[Request, frozenset[int]] = {}
        self._clock = clock

    def start(self, request: Request) -> None:
        """Add a new request."""
        params = request.params
        scanner = self._make_scanner(request) if params.stop else None
        eos_token_ids = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        end_ids = eos_token_ids.union(params.stop_token_ids)
        fault_point("output_start", request.request_id)  # what is stored before an exception would never be removed
        self._end_ids[request] = end_ids
        if scanner is not None:
            self._scanners[request] = scanner

    def resume(self, request: Request) -> TokenDelta | None:
        """Read the resumed tokens of a new request; return its last delta, without tokens, if they end it already.

        Raises:
            InvalidRequestError: the output ends before the last of these tokens.
        """
        resumed = request.output_token_ids.tolist()
        delta = TokenDelta(request.request_id, request.index, resumed, seed=request.seed, first_index=len(resumed))
        self._find_stop(delta, request, first=1)
        if delta.finish_reason is None:
            return None
        if len(delta.token_ids) < len(resumed):
            expected = f"at most {len(delta.token_ids)} tokens for choice {request.index}, which end it"
            raise InvalidRequestError("resumed", f"expected {expected}, got {len(resumed)}")
        delta.token_ids = []
        return self.end(delta, request, delta.finish_reason)

    def finish(self, request: Request) -> None:
        """Remove a request."""
        del self._end_ids[request]
        self._scanners.pop(request, None)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless state is kept for exactly the live `requests`."""
        live = set(requests)
        assert self._end_ids.keys() == live
        assert self._scanners.keys() == {request for request in live if request.params.stop}

    def truncate_at_stop(self, scheduled: ScheduledRequest, result: RequestResult) -> TokenDelta:
        """Return the delta of one step of a request: its tokens up to the first stop, including the token that stops.

        Call this before the ledger takes the tokens, and `complete` after that.
        """
        request, token_ids = scheduled.request, result.token_ids
        fault_point("stop_scan", request.request_id)
        delta = TokenDelta(request.request_id, request.index, token_ids, seed=request.seed)
        delta.first_index = request.num_output_tokens
        if not self._cannot_stop(request, token_ids):
            self._find_stop(delta, request, first=request.num_output_tokens + 1)
        num_tokens = len(delta.token_ids)
        if result.num_accepted:
            delta.draft_sources = scheduled.draft.source_of_each()[: min(result.num_accepted, num_tokens)]
        if result.logprobs is not None:
            delta.logprobs = result.logprobs[:num_tokens]
        return delta

    def _cannot_stop(self, request: Request, token_ids: list[int]) -> bool:
        """Return True if none of these tokens can end the request, as in most steps; False if they must be checked."""
        return (
            self._end_ids[request].isdisjoint(token_ids)
            and request.num_tokens + len(token_ids) < request.max_total_tokens
            and request not in self._scanners
            and request.constraint is None
        )

    def _find_stop(self, delta: TokenDelta, request: Request, first: int) -> None:
        """Advance the request's scanner and constraint up to the first token that stops; drop the tokens after it.

        Args:
            first: number of output tokens with the first token of `delta`.
        """
        params, constraint, scanner = request.params, request.constraint, self._scanners.get(request)
        for num_output, token_id in enumerate(delta.token_ids, first):
            stop_string = scanner.push(token_id) if scanner else None
            constraint_end = _advance(request, constraint, token_id) if constraint else None
            if stop_string is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop_string
            elif num_output > params.min_tokens and token_id in self._end_ids[request]:
                delta.finish_reason = "stop"
                delta.stop_reason = token_id if token_id in params.stop_token_ids else None
            elif constraint_end is not None:
                delta.finish_reason, delta.is_complete = constraint_end, constraint_end == "stop"
            elif request.num_prompt_tokens + num_output >= request.max_total_tokens:
                delta.finish_reason = "length"
            if delta.finish_reason is not None:
                delta.token_ids = delta.token_ids[: num_output - first + 1]
                return

    def end_of_prefill(self, request: Request) -> TokenDelta:
        """Return the only delta of a request without output, after the ledger has taken the last rows of its prompt."""
        delta = TokenDelta(request.request_id, request.index, finish_reason="length")
        self.complete(delta, request)
        return delta

    def complete(self, delta: TokenDelta, request: Request) -> None:
        """Complete a delta after the ledger has taken its tokens; only a request without output has none."""
        if request.num_output_tokens - request.num_resumed_tokens == len(delta.token_ids):
            request.num_first_tokens = request.num_output_tokens
            if delta.token_ids:
                request.metrics.first_token_s = self._clock() - request.arrival_s
            if request.params.prompt_logprobs is not None:
                delta.prompt_logprobs = request.prompt_logprobs.report()
        if delta.finish_reason is not None:
            self.end(delta, request, delta.finish_reason)

    def end(
        self, delta: TokenDelta, request: Request, finish_reason: str, error: ErrorInfo | None = None
    ) -> TokenDelta:
        """Make `delta` the request's last one."""
        request.metrics.finish_s = self._clock() - request.arrival_s
        delta.finish_reason = finish_reason
        delta.error = error
        delta.seed = request.seed
        delta.metrics = RequestMetrics(**vars(request.metrics))
        delta.speculate_metrics = speculate_metrics(request.decoding_stats())
        return delta


def _advance(request: Request, constraint: TokenConstraint, token_id: int) -> str | None:
    fault_point("constraint_advance", request.request_id)
    return constraint.accept_token(token_id)


def speculate_metrics(stats: SpeculationStats) -> SpeculateMetrics:
    """Compute the metrics of a request from its counts (definitions: docs/glossary.md)."""
    drafted, accepted = stats.drafted_per_position(), stats.accepted_per_position()
    num_drafted, num_accepted = sum(drafted), sum(accepted)
    return SpeculateMetrics(
        accepted_tokens=num_accepted,
        rejected_tokens=num_drafted - num_accepted,
        accept_ratio=num_accepted / num_drafted if num_drafted else 0.0,
        average_accept_length=stats.num_emitted / stats.num_steps if stats.num_steps else 0.0,
        accepted_tokens_per_head=accepted,
        accept_ratio_per_head=[a / d for a, d in zip(accepted, drafted)],
        acceptance_histogram=stats.accepted,
        num_steps=stats.num_steps,
        drafted_tokens=num_drafted,
        source=dict(stats.drafted_per_source),
    )
