# SPDX-License-Identifier: Apache-2.0
"""The times and the acceptance of a request in vLLM's form, at the top of an answer."""

from __future__ import annotations

from fastdeploy.core.outputs import RequestMetrics, SpeculateMetrics, TokenDelta
from fastdeploy.entrypoints.openai.responses import PerRequestMetrics, SpeculativeDecodingMetrics
from fastdeploy.entrypoints.openai.server import ApiServer

S_TO_MS = 1000.0


def per_request_metrics(server: ApiServer, last: TokenDelta, num_tokens: int) -> PerRequestMetrics | None:
    """Return the metrics that the server's flags ask for; None without such a flag.

    Args:
        last: the end of the request's only choice.
        num_tokens: number of its output tokens.
    """
    has_acceptance = server.config.per_request_spec_decode_metrics == "summary"
    if last.metrics is None or not (server.config.enable_per_request_metrics or has_acceptance):
        return None
    metrics = PerRequestMetrics()
    if server.config.enable_per_request_metrics:
        _add_times(metrics, last.metrics, num_tokens)
    if has_acceptance and last.speculate_metrics is not None:
        num_spec_tokens = server.description().get("speculation", {}).get("num_speculative_tokens", 0)
        metrics.speculative_decoding = _acceptance(last.speculate_metrics, num_spec_tokens)
    return metrics


def _add_times(metrics: PerRequestMetrics, times: RequestMetrics, num_tokens: int) -> None:
    queue_s, first_token_s = times.queue_s, times.first_token_s
    if queue_s is not None:
        metrics.queue_time_ms = queue_s * S_TO_MS
    if first_token_s is None:
        return
    generation_s = times.finish_s - first_token_s
    metrics.time_to_first_token_ms = first_token_s * S_TO_MS
    metrics.generation_time_ms = generation_s * S_TO_MS
    if num_tokens > 1:
        metrics.mean_itl_ms = generation_s / (num_tokens - 1) * S_TO_MS
    if queue_s is not None and times.finish_s > queue_s:
        metrics.tokens_per_second = num_tokens / (times.finish_s - queue_s)


def _acceptance(counts: SpeculateMetrics, num_spec_tokens: int) -> SpeculativeDecodingMetrics | None:
    """Return the acceptance; None if no step had drafts."""
    num_steps = sum(counts.acceptance_histogram)
    if not num_steps:
        return None
    num_spec_tokens = max(num_spec_tokens, len(counts.acceptance_histogram) - 1)
    missing = num_spec_tokens + 1 - len(counts.acceptance_histogram)
    return SpeculativeDecodingMetrics(
        mean_acceptance_length=1 + counts.accepted_tokens / num_steps,
        draft_acceptance_rate=counts.accepted_tokens / counts.drafted_tokens,
        acceptance_histogram=counts.acceptance_histogram + [0] * missing,
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=counts.accepted_tokens,
        num_draft_tokens=counts.drafted_tokens,
        num_spec_tokens=num_spec_tokens,
    )
