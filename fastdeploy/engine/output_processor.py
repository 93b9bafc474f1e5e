# SPDX-License-Identifier: Apache-2.0
"""Where a request's text ends, and what is reported of each step.

Stops are judged token by token in order, inside one step: tokens behind the stop are dropped before the ledger, the
caches or any statistic sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from fastdeploy.core.outputs import ErrorInfo, RequestMetrics, SpeculateMetrics, TokenDelta
from fastdeploy.core.request import Request, SpeculationTally
from fastdeploy.core.step import RequestResult, ScheduledRequest


class StopStringScanner(Protocol):
    """Watches one request's text for its stop strings: see detokenize.stop_strings."""

    def push(self, token_id: int) -> str | None:
        """Return the stop string that this token completes, if any; none before min_tokens."""


ScannerFactory = Callable[[Request], StopStringScanner]


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
        self._scanners: dict[Request, StopStringScanner] = {}
        self._end_ids: dict[Request, frozenset[int]] = {}
        self._clock = clock

    def start(self, request: Request) -> None:
        """Prepare for a new request."""
        params = request.params
        if params.stop:
            self._scanners[request] = self._make_scanner(request)
        self._end_ids[request] = frozenset([*params.stop_token_ids, *(() if params.ignore_eos else self._eos)])

    def finish(self, request: Request) -> None:
        """Forget a request."""
        del self._end_ids[request]
        self._scanners.pop(request, None)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless state is kept for exactly the live `requests`."""
        live = set(requests)
        assert self._end_ids.keys() == live
        assert self._scanners.keys() == {request for request in live if request.params.stop}

    def cut(self, scheduled: ScheduledRequest, result: RequestResult) -> TokenDelta:
        """Report one step of one request: its tokens up to the first stop, the stop's own token included.

        Call before the ledger takes the tokens, and `complete` after that.
        """
        request, token_ids = scheduled.request, result.token_ids
        delta = TokenDelta(request.request_id, request.index, token_ids, seed=request.seed)
        if not self._goes_on(request, token_ids):
            self._cut(delta, request)
        count = len(delta.token_ids)
        if result.num_accepted:
            delta.drafted_by = scheduled.draft.source_of_each()[: min(result.num_accepted, count)]
        if result.logprobs is not None:
            delta.logprobs = result.logprobs[:count]
        return delta

    def _goes_on(self, request: Request, token_ids: list[int]) -> bool:
        """True where nothing can end the text at one of these tokens; most steps."""
        return (
            self._end_ids[request].isdisjoint(token_ids)
            and request.num_tokens + len(token_ids) < request.max_total_tokens
            and request not in self._scanners
            and request.constraint is None
        )

    def _cut(self, delta: TokenDelta, request: Request) -> None:
        """Walk the tokens to the first one that ends the text; drop what is behind it."""
        params, constraint, scanner = request.params, request.constraint, self._scanners.get(request)
        first = request.num_output_tokens + 1
        for num_output, token_id in enumerate(delta.token_ids, first):
            stop_string = scanner.push(token_id) if scanner else None
            ending = constraint.accept_token(token_id) if constraint else None
            if stop_string is not None:
                delta.finish_reason, delta.stop_reason = "stop", stop_string
            elif num_output > params.min_tokens and token_id in self._end_ids[request]:
                delta.finish_reason = "stop"
                delta.stop_reason = token_id if token_id in params.stop_token_ids else None
            elif ending is not None:
                delta.finish_reason, delta.is_complete = ending, ending == "stop"
            elif request.num_prompt_tokens + num_output >= request.max_total_tokens:
                delta.finish_reason = "length"
            if delta.finish_reason is not None:
                delta.token_ids = delta.token_ids[: num_output - first + 1]
                return

    def complete(self, delta: TokenDelta, request: Request) -> None:
        """Add what the ledger knows once it has taken the tokens of `delta`, one at least."""
        if request.num_output_tokens == len(delta.token_ids):
            request.num_first_tokens = len(delta.token_ids)
            request.metrics.first_token_s = self._clock() - request.arrival_s
            if request.params.prompt_logprobs is not None:
                delta.prompt_logprobs = [None, *request.prompt_logprobs]
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
        delta.speculate_metrics = speculate_metrics(request.all_steps())
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
