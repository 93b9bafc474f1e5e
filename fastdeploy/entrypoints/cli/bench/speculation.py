# SPDX-License-Identifier: Apache-2.0
"""What speculation contributed to a benchmark, from the counters of the server's `/metrics` before and after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.entrypoints.cli.http_client import HttpClient, ServerError

PREFIX = "spec_decode_"
_SAMPLE = re.compile(r"^(?:fastdeploy|vllm):spec_decode_num_(\w+)_total(\{.*\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'\bposition="(\d+)"')


@dataclass
class SpeculationCounters:
    """Counters of a server since its start, summed over its engines.

    Attributes:
        totals: name, such as `draft_tokens`, -> value.
        accepted_at: position in a draft -> number of drafts whose token there was accepted.
    """

    totals: dict[str, float] = field(default_factory=dict)
    accepted_at: dict[int, float] = field(default_factory=dict)


def parse_counters(page: str) -> SpeculationCounters:
    """Return the counters of a page of metrics, of this server or of vLLM."""
    counters = SpeculationCounters()
    for name, labels, value in _SAMPLE.findall(page):
        position = _POSITION.search(labels)
        if position is None:
            counters.totals[name] = counters.totals.get(name, 0.0) + float(value)
        elif name == "accepted_tokens_per_pos":
            index = int(position[1])
            counters.accepted_at[index] = counters.accepted_at.get(index, 0.0) + float(value)
    return counters


async def read_counters(client: HttpClient) -> SpeculationCounters:
    """Return the counters of a server; without any if it has no `/metrics`.

    Raises:
        UnreachableError: there is no response.
    """
    try:
        return parse_counters(await client.get_text("/metrics"))
    except ServerError:
        return SpeculationCounters()


def speculation_metrics(before: SpeculationCounters, after: SpeculationCounters) -> dict[str, Any]:
    """Return what happened between two readings, under the names of `vllm bench serve`; empty if nothing was drafted.

    The acceptance rate is in percent, rates by position are fractions of the drafts. `spec_decode_tokens_per_step` is
    the mean acceptance length of docs/glossary.md, which counts steps without drafts; vLLM's servers do not report it.
    """

    def difference(name: str) -> float:
        return after.totals.get(name, 0.0) - before.totals.get(name, 0.0)

    num_drafts, num_draft_tokens = difference("drafts"), difference("draft_tokens")
    if num_drafts <= 0 or num_draft_tokens <= 0:
        return {}
    num_accepted, num_steps = difference("accepted_tokens"), difference("steps")
    accepted_at = [count - before.accepted_at.get(i, 0.0) for i, count in sorted(after.accepted_at.items())]
    return {
        PREFIX + "acceptance_rate": 100 * num_accepted / num_draft_tokens,
        PREFIX + "acceptance_length": 1 + num_accepted / num_drafts,
        PREFIX + "num_drafts": int(num_drafts),
        PREFIX + "draft_tokens": int(num_draft_tokens),
        PREFIX + "accepted_tokens": int(num_accepted),
        PREFIX + "per_position_acceptance_rates": [count / num_drafts for count in accepted_at],
        **({PREFIX + "tokens_per_step": difference("emitted_tokens") / num_steps} if num_steps > 0 else {}),
    }


def print_speculation(metrics: Mapping[str, Any]) -> None:
    """Print the result of `speculation_metrics` with its units; nothing if it is not in `metrics`."""
    if PREFIX + "num_drafts" not in metrics:
        return
    values = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
    print("speculation")
    accepted = f"{values['accepted_tokens']} of {values['draft_tokens']} draft tokens"
    _print_row("acceptance rate", f"{values['acceptance_rate']:.1f} %", accepted)
    _print_row(
        "acceptance length", f"{values['acceptance_length']:.2f} tokens", "per step with a draft, bonus included"
    )
    if "tokens_per_step" in values:
        _print_row("tokens per step", f"{values['tokens_per_step']:.2f} tokens", "per decoding step of a request")
    for position, rate in enumerate(values["per_position_acceptance_rates"]):
        _print_row(f"accepted at position {position}", f"{100 * rate:.1f} %", "of all drafts")


def _print_row(name: str, value: str, meaning: str) -> None:
    print(f"  {name:<28} {value:>12}  {meaning}")
