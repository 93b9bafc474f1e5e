# SPDX-License-Identifier: Apache-2.0
"""Histograms and a log line for each finished request."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fastdeploy.core.generation_request import GenerationRequest, without_marks
from fastdeploy.core.outputs import RequestMetrics, SpeculateMetrics
from fastdeploy.metrics.client_metrics import ClientMetrics
from fastdeploy.metrics.engine_collector import PREFIX

logger = logging.getLogger("fastdeploy.request")

_SHORT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_LONG_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass(frozen=True)
class RequestRecord:
    """One finished choice of a request. Times are in seconds; None if the choice ended earlier.

    Attributes:
        index: of the choice in the response.
        client: name of the API key; empty without keys.
        queue_s: arrival to first step.
        prefill_s: first step to first token.
        ttft_s: arrival to first token.
        tpot_s: mean time per token after the first.
        e2e_s: arrival to end.
        acceptance: accepted / drafted tokens; None without drafts.
        average_accept_length: emitted tokens / decoding steps; None without drafts.
        preemptions: number of times that it was preempted.
        node, path, attempts: as in `RequestMetrics`; `path` is empty on a server that works alone.
    """

    request_id: str
    index: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    client: str
    queue_s: float | None
    prefill_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    acceptance: float | None
    average_accept_length: float | None
    preemptions: int = 0
    node: str = ""
    path: str = ""
    attempts: int = 1

    def to_json(self) -> str:
        """Return the record as a JSON document; without a cluster it has no fields of one."""
        fields = asdict(self)
        if not self.path:
            for name in ("node", "path", "attempts"):
                del fields[name]
        return json.dumps(fields)


def make_record(
    request: GenerationRequest,
    index: int,
    num_completion_tokens: int,
    finish_reason: str,
    metrics: RequestMetrics,
    speculation: SpeculateMetrics | None,
) -> RequestRecord:
    """Return the record of a finished choice, the one of this index in the response."""
    queue, ttft = metrics.queue_s, metrics.first_token_s
    prefill = None if queue is None or ttft is None else max(0.0, ttft - queue)
    tpot = None
    if ttft is not None and num_completion_tokens > 1:
        tpot = (metrics.finish_s - ttft) / (num_completion_tokens - 1)
    drafted = speculation.drafted_tokens if speculation is not None else 0
    return RequestRecord(
        request_id=without_marks(request.request_id),
        index=index,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=metrics.num_cached_tokens,
        completion_tokens=num_completion_tokens,
        finish_reason=finish_reason,
        client=request.client_name,
        queue_s=queue,
        prefill_s=prefill,
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=metrics.finish_s,
        acceptance=speculation.accept_ratio if speculation is not None and drafted else None,
        average_accept_length=speculation.average_accept_length if speculation is not None and drafted else None,
        preemptions=metrics.num_preemptions,
        node=metrics.node,
        path=metrics.path,
        attempts=metrics.num_attempts,
    )


class RequestRecorder:
    """Observes the histograms and writes the log line of every finished request."""

    def __init__(
        self, registry: CollectorRegistry, json_lines: bool = False, clients: ClientMetrics | None = None
    ) -> None:
        """Register the metrics; with `json_lines`, log lines are JSON documents; `clients` observes by API key."""
        self._json_lines = json_lines
        self._clients = clients

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self._ttft = histogram("time_to_first_token_seconds", "Time from arrival to the first token", _SHORT_S)
        self._tpot = histogram("time_per_output_token_seconds", "Mean time per output token after the first", _SHORT_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Time from arrival to the end", _LONG_S)
        self._queue = histogram("request_queue_time_seconds", "Time from arrival to the first step", _LONG_S)
        self._prefill = histogram(
            "request_prefill_time_seconds", "Time from the first step to the first token", _LONG_S
        )
        self._inference = histogram("request_inference_time_seconds", "Time from the first step to the end", _LONG_S)
        self._decode = histogram("request_decode_time_seconds", "Time from the first token to the end", _LONG_S)
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens per request", _TOKENS)
        self._generation_tokens = histogram("request_generation_tokens", "Output tokens per choice", _TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of the requests that set it", _TOKENS)
        self._requests = Counter(PREFIX + "requests_number", "Requests received", registry=registry)
        self._latest_ttft = _latest(PREFIX + "first_token_latency", "TTFT of the latest request, seconds", registry)
        self._latest_e2e = _latest(
            PREFIX + "infer_latency", "End-to-end latency of the latest request, seconds", registry
        )

    def started(self, max_tokens: int | None) -> None:
        """Count a received request; `max_tokens` is None if the request does not set it."""
        self._requests.inc()
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def record(self, record: RequestRecord) -> None:
        """Observe and log a finished choice."""
        self.observe(record)
        logger.info("%s", record.to_json() if self._json_lines else _line(record))

    def observe(self, record: RequestRecord) -> None:
        """Observe a finished choice in the histograms."""
        self._e2e.observe(record.e2e_s)
        self._latest_e2e.set(record.e2e_s)
        self._prompt_tokens.observe(record.prompt_tokens)
        self._generation_tokens.observe(record.completion_tokens)
        if record.queue_s is not None:
            self._queue.observe(record.queue_s)
            self._inference.observe(max(0.0, record.e2e_s - record.queue_s))
            if self._clients is not None:
                self._clients.observe_queue(record.client, record.queue_s)
        if record.prefill_s is not None:
            self._prefill.observe(record.prefill_s)
        if record.tpot_s is not None:
            self._tpot.observe(record.tpot_s)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
            self._latest_ttft.set(record.ttft_s)
            self._decode.observe(max(0.0, record.e2e_s - record.ttft_s))


def _latest(name: str, text: str, registry: CollectorRegistry) -> Gauge:
    return Gauge(name, text, registry=registry, multiprocess_mode="mostrecent")


def _line(record: RequestRecord) -> str:
    parts = [
        f"{record.request_id}[{record.index}] {record.finish_reason}",
        *((f"client {record.client}",) if record.client else ()),
        f"prompt {record.prompt_tokens} ({record.cached_tokens} cached)",
        f"output {record.completion_tokens}",
        f"queued {_ms(record.queue_s)}",
        f"prefill {_ms(record.prefill_s)}",
        f"TTFT {_ms(record.ttft_s)}",
        f"TPOT {_ms(record.tpot_s)}",
        f"total {_ms(record.e2e_s)}",
    ]
    if record.acceptance is not None:
        parts.append(
            f"acceptance rate {record.acceptance:.2f}, mean acceptance length {record.average_accept_length:.2f}"
        )
    if record.preemptions:
        parts.append(f"preemptions {record.preemptions}")
    if record.path:
        parts.append(f"node {record.node}, path {record.path}, attempts {record.attempts}")
    return ", ".join(parts)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
