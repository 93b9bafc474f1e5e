# SPDX-License-Identifier: Apache-2.0
"""A log line about the whole engine every ten seconds while it has requests, for `fastdeploy serve`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fastdeploy.core.stats import EngineStats

INTERVAL_S = 10.0
STATS_LOGGER = "fastdeploy.stats"

logger = logging.getLogger(STATS_LOGGER)


@dataclass(frozen=True)
class StatsRecord:
    """What a line says.

    Attributes:
        prompt_tokens_per_s: prompt tokens computed per second, those that a cache had not included.
        output_tokens_per_s: tokens emitted per second.
        num_running, num_waiting: requests in the batch, and those that wait for a place, now.
        kv_cache_usage: fraction of KV blocks in use now.
        prefix_cache_hit_rate: fraction of looked-up prompt tokens that were in the prefix cache; None without any.
        acceptance: accepted / drafted tokens; None without drafts.
    """

    prompt_tokens_per_s: float
    output_tokens_per_s: float
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float | None
    acceptance: float | None


class StatsLog:
    """Logs a line whenever the engine has had requests for ten more seconds; idle time does not count.

    Rates are those since the line before, per second with requests.
    """

    def __init__(self, json_lines: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """Log from the first request on; with `json_lines`, lines are JSON documents."""
        self._json_lines = json_lines
        self._clock = clock
        self._before = EngineStats()
        self._num_emitted = 0
        self._counted_until_s: float | None = None  # None while the engine has no requests
        self._busy_s = 0.0

    def begin(self) -> None:
        """Count time from now on, unless it is being counted: the engine has got a request."""
        if self._counted_until_s is None:
            self._counted_until_s = self._clock()

    def count(self, num_tokens: int) -> None:
        """Count emitted tokens."""
        self._num_emitted += num_tokens

    def update(self, stats: EngineStats) -> None:
        """Take in the present counters; log a line if it is time."""
        if self._counted_until_s is None:
            return
        now_s = self._clock()
        self._busy_s += now_s - self._counted_until_s
        self._counted_until_s = now_s if stats.num_running or stats.num_waiting else None
        if self._busy_s >= INTERVAL_S:
            record = self._make_record(stats)
            logger.info("%s", json.dumps(asdict(record)) if self._json_lines else _line(record))
            self._before, self._num_emitted, self._busy_s = stats, 0, 0.0

    def _make_record(self, stats: EngineStats) -> StatsRecord:
        before = self._before
        return StatsRecord(
            prompt_tokens_per_s=(stats.num_prefilled_tokens - before.num_prefilled_tokens) / self._busy_s,
            output_tokens_per_s=self._num_emitted / self._busy_s,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            prefix_cache_hit_rate=_ratio(
                stats.num_prefix_hit_tokens - before.num_prefix_hit_tokens,
                stats.num_prefix_lookup_tokens - before.num_prefix_lookup_tokens,
            ),
            acceptance=_ratio(
                stats.num_accepted_tokens - before.num_accepted_tokens,
                stats.num_draft_tokens - before.num_draft_tokens,
            ),
        )


def _ratio(part: int, whole: int) -> float | None:
    """Return part / whole; None if there is no whole. A request that is handed over takes its counts along."""
    return max(0, part) / whole if whole > 0 else None


def _line(record: StatsRecord) -> str:
    parts = [
        f"prompt {record.prompt_tokens_per_s:.1f} tokens/s",
        f"output {record.output_tokens_per_s:.1f} tokens/s",
        f"running {record.num_running}",
        f"waiting {record.num_waiting}",
        f"KV cache usage {record.kv_cache_usage:.1%}",
    ]
    if record.prefix_cache_hit_rate is not None:
        parts.append(f"prefix cache hits {record.prefix_cache_hit_rate:.1%}")
    if record.acceptance is not None:
        parts.append(f"acceptance rate {record.acceptance:.2f}")
    return ", ".join(parts)
