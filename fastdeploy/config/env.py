# SPDX-License-Identifier: Apache-2.0
"""The only reader of environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

LOG_FORMATS = ("text", "json")
API_KEY_VARIABLE = "FD_API_KEY"


@dataclass(frozen=True)
class Env:
    """Environment variables that the framework honours.

    Attributes:
        debug: FD_DEBUG=1 shows tracebacks where one line would do.
        log_dir: FD_LOG_DIR, folder for log files; empty writes to stderr only.
        log_format: FD_LOG_FORMAT, text or json.
        model_source: FD_MODEL_SOURCE, hub asked for names that are no local folder; HUGGINGFACE is the one available.
        is_torch_forced: FD_FOR_TORCH_MODEL_FORMAT=1 reads checkpoints in torch layout, whatever they say themselves.
        api_keys: FD_API_KEY, comma-separated keys that clients may use; empty asks for none.
    """

    debug: bool = False
    log_dir: str = ""
    log_format: str = "text"
    model_source: str = "HUGGINGFACE"
    is_torch_forced: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)


def read_env() -> Env:
    """Read the environment once; raise ConfigError for a value outside its range."""
    from fastdeploy.core.errors import ConfigError

    log_format = os.environ.get("FD_LOG_FORMAT", "text").lower()
    if log_format not in LOG_FORMATS:
        raise ConfigError("FD_LOG_FORMAT", f"expected one of {', '.join(LOG_FORMATS)}, got {log_format!r}")
    keys = tuple(key for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key)
    return Env(
        debug=os.environ.get("FD_DEBUG", "") == "1",
        log_dir=os.environ.get("FD_LOG_DIR", ""),
        log_format=log_format,
        model_source=os.environ.get("FD_MODEL_SOURCE", "HUGGINGFACE").upper(),
        is_torch_forced=os.environ.get("FD_FOR_TORCH_MODEL_FORMAT", "") == "1",
        api_keys=keys,
    )
