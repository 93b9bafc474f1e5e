# SPDX-License-Identifier: Apache-2.0
"""The limits of the state machines, from the flags and from what the engine says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy.config.cluster_config import LEAST_PERIOD_MS, ClusterConfig
from fastdeploy.scheduler.request_states import Limits


def limits_of(config: ClusterConfig, description: Mapping[str, Any]) -> Limits:
    """Return the limits for an engine that describes itself so."""
    min_prompt = config.splitwise_min_prompt
    return Limits(
        sync_s=max(LEAST_PERIOD_MS, config.scheduler_sync_period) / 1000,
        expire_s=max(LEAST_PERIOD_MS, config.scheduler_expire_period) / 1000,
        stall_s=config.scheduler_release_load_expire_period,
        ttl_s=config.scheduler_ttl,
        patience_s=_unless_unlimited(config.scheduler_patience),
        max_waiting_s=_unless_unlimited(config.scheduler_max_waiting_time),
        max_waiting=None if config.scheduler_max_size < 0 else config.scheduler_max_size,
        max_attempts=config.scheduler_max_attempts,
        step_tokens=description.get("max_num_batched_tokens", Limits.step_tokens),
        min_prompt=block_size_of(description) if min_prompt is None else min_prompt,
    )


def block_size_of(description: Mapping[str, Any]) -> int:
    """Return the tokens per block of an engine."""
    return int(description["kv_cache"]["block_size"])


def group_of(description: Mapping[str, Any]) -> str:
    """Return the digest of what decides the bits of an engine's texts."""
    return str(description["cluster"]["group"])


def _unless_unlimited(value: float) -> float | None:
    return None if value < 0 else value
