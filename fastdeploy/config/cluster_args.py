# SPDX-License-Identifier: Apache-2.0
"""Builds the configuration of a node among others from flags, and adapts that of its engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdeploy.config.api_keys import file_notes
from fastdeploy.config.cluster_config import AVAILABLE_CONNECTORS, LEAST_PERIOD_MS, ClusterConfig
from fastdeploy.config.engine_config import EngineConfig, SchedulerConfig
from fastdeploy.config.env import SCHEDULER_PASSWORD_VARIABLE
from fastdeploy.config.redis_address import parse_address
from fastdeploy.config.redis_url import credentials
from fastdeploy.core.errors import ConfigError

PASSWORD_FILE_FLAG = "--scheduler-password-file"
_PERIODS = ("scheduler_sync_period", "scheduler_expire_period")
_ALSO_ALONE = ("scheduler_name", "splitwise_role")
_ONLY_SPLIT = ("splitwise_min_prompt", "cache_transfer_protocol", "kv_transfer_memory")


def build_cluster_config(given: Mapping[str, Any], env_password: str) -> tuple[ClusterConfig, str]:
    """Build the configuration from the converted values of its flags that were given.

    Args:
        env_password: password from the environment; empty without one.

    Returns:
        the configuration, and where its password came from if not from its flag.

    Raises:
        ConfigError: a value is wrong, contradicts another one, or names a file that cannot be read.
    """
    _refuse_contradictions(given)
    periods: dict[str, Any] = {name: _at_least_100(given[name]) for name in _PERIODS if name in given}
    config = ClusterConfig(**{**given, **periods})
    parse_address(config)
    if not config.is_clustered or config.scheduler_password or credentials(config.scheduler_url)[1]:
        return config, ""
    if config.scheduler_password_file:
        password = _read_password(config.scheduler_password_file)
        return replace(config, scheduler_password=password), PASSWORD_FILE_FLAG
    return replace(config, scheduler_password=env_password), SCHEDULER_PASSWORD_VARIABLE if env_password else ""


def cluster_notes(config: ClusterConfig, values: Mapping[str, Any], shown: Mapping[str, str]) -> Iterator[str]:
    """Yield notes for start-up about flags without effect, or with another one than their values say.

    Args:
        values: what was given, by flag name.
        shown: name of each of these flags as its user typed it.
    """
    without_effect = [] if config.is_split else [name for name in _ONLY_SPLIT if name in shown]
    if without_effect:
        yield _no_effect([shown[name] for name in without_effect], "splitwise")
    if not config.is_clustered:
        others = [name for name in values if name not in (*_ALSO_ALONE, *_ONLY_SPLIT)]
        if others:
            yield _no_effect([shown[name] for name in others], "global or splitwise")
        return
    short = [shown[name] for name in _PERIODS if name in values and values[name] < LEAST_PERIOD_MS]
    if short:
        yield f"{' and '.join(short)}: less than {LEAST_PERIOD_MS} milliseconds counts as {LEAST_PERIOD_MS}"
    missing = [name for name in config.requested_connectors if name not in AVAILABLE_CONNECTORS]
    if config.is_split and missing:
        names = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        used = " and ".join(config.connectors)
        yield f"{shown['cache_transfer_protocol']}: {names} not available yet, so KV blocks are transferred by {used}"
    if config.scheduler_password_file:
        yield from file_notes(config.scheduler_password_file, PASSWORD_FILE_FLAG, "the password")


def engine_notes(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes about arguments of `LLM` that only servers, or nodes of a cluster, use."""
    if "kv_transfer_memory" in given:
        yield _no_effect(["kv_transfer_memory"], "splitwise")
    if given.get("disable_log_stats") is False:
        yield "disable_log_stats false has no effect: LLM logs no statistics; they are in LLM.get_metrics()"


def keep_chunked_prefill(values: dict[str, Any], shown: Mapping[str, str]) -> Iterator[str]:
    """Switch chunked prefill on if a context can be longer than a step; yield a note that says so.

    Any node must be able to continue any text, whose context is computed like a prompt where its blocks cannot be had.
    """
    num_tokens = values.get("max_num_batched_tokens", SchedulerConfig.max_num_batched_tokens)
    max_model_len = values.get("max_model_len", EngineConfig.max_model_len)
    may_exceed = max_model_len == "auto" or num_tokens < max_model_len
    if values.get("enable_chunked_prefill") is False and may_exceed:
        values["enable_chunked_prefill"] = True
        yield (
            f"{shown['enable_chunked_prefill']} false has no effect: a node of a cluster computes contexts of "
            f"{max_model_len} tokens in steps of {num_tokens}"
        )


def _refuse_contradictions(given: Mapping[str, Any]) -> None:
    url = given.get("scheduler_url", "")
    username, password = credentials(url)
    of_url = {"scheduler_host": url, "scheduler_port": url, "scheduler_username": username}
    of_url |= {"scheduler_password": password, "scheduler_password_file": password}
    for name, value in of_url.items():
        if value and given.get(name):
            raise ConfigError(name, "cannot be combined with --scheduler-url, which replaces it")
    if given.get("scheduler_password") and given.get("scheduler_password_file"):
        raise ConfigError("scheduler_password", f"cannot be combined with {PASSWORD_FILE_FLAG}")


def _at_least_100(period_ms: int) -> int:
    """Return a period in the valid range; FastDeploy's default of 5 ms is not, and what is no period stays."""
    return LEAST_PERIOD_MS if 1 <= period_ms < LEAST_PERIOD_MS else period_ms


def _no_effect(shown: list[str], schedulers: str) -> str:
    have, they = ("has", "it needs") if len(shown) == 1 else ("have", "they need")
    return f"{', '.join(shown)} {have} no effect: {they} --scheduler-name {schedulers}"


def _read_password(path: str) -> str:
    """Return the first line of a file; no message shows anything that may be the password."""
    try:
        password = Path(path).read_text(encoding="utf-8").split("\n", 1)[0].rstrip("\r")
    except OSError as error:
        raise ConfigError(PASSWORD_FILE_FLAG, f"cannot read {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(PASSWORD_FILE_FLAG, f"{path!r} is not in UTF-8") from None
    if not password:
        raise ConfigError(PASSWORD_FILE_FLAG, f"the first line of {path!r} is empty")
    return password
