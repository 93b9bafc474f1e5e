# SPDX-License-Identifier: Apache-2.0
"""The only reader of environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
API_KEY_VARIABLE = "FD_API_KEY"
VARIABLES = {
    "FD_API_KEY": "keys that clients must send, comma-separated; `--api-key` replaces them",
    "FD_BUILD_PATHS": "when the operators are built: all paths, or native, the machine's best one and the portable one",
    "FD_CPU_ISA": "path of the operators: avx512_bf16, avx512, avx2 or portable (default: the fastest one there is)",
    "FD_DEBUG": "1 shows tracebacks where one line would do",
    "FD_FOR_TORCH_MODEL_FORMAT": "1 reads checkpoints in torch layout, whatever they say themselves",
    "FD_LOG_DIR": "folder for log files",
    "FD_LOG_FORMAT": "text or json (default: text)",
    "FD_LOG_LEVEL": "DEBUG, INFO, WARNING or ERROR (default: INFO)",
    "FD_LOG_REQUESTS": "0 leaves out the line per request",
    "FD_MODEL_SOURCE": "hub asked for models that are no folder: HUGGINGFACE, AISTUDIO, MODELSCOPE",
    "FD_NUM_THREADS": "threads of the operators (default: the cores that the process may use)",
    "FD_PADDLENLP_PYTHON": "interpreter with PaddleNLP, for tokenizers that nothing else reads",
}
"""What this module, the operators and setup.py read; other variables that begin with FD_ are named at start-up."""
SECRET_WORDS = ("KEY", "PASSWORD", "SECRET", "TOKEN")


@dataclass(frozen=True)
class Env:
    """Environment variables that the framework honours.

    Attributes:
        debug: FD_DEBUG=1 shows tracebacks where one line would do.
        log_dir: FD_LOG_DIR, folder for log files; empty writes to stderr only.
        log_format: FD_LOG_FORMAT, text or json.
        log_level: FD_LOG_LEVEL, DEBUG, INFO, WARNING or ERROR.
        log_requests: FD_LOG_REQUESTS=0 leaves out the line per request.
        model_source: FD_MODEL_SOURCE, hub asked for names that are no local folder (config.hub.HUBS).
        is_torch_forced: FD_FOR_TORCH_MODEL_FORMAT=1 reads checkpoints in torch layout, whatever they say themselves.
        paddlenlp_python: FD_PADDLENLP_PYTHON, interpreter of an environment with PaddleNLP, for tokenizers that only
            PaddleNLP reads; empty for none.
        cache_dir: fastdeploy in XDG_CACHE_HOME (default: ~/.cache), for what is made once and kept.
        api_keys: FD_API_KEY, comma-separated keys that clients may use; empty asks for none.
        openai_api_key: OPENAI_API_KEY, the key that this package's own clients send.
        no_color: NO_COLOR is set and not empty: no command writes in colour.
        unknown: names of FD_* variables that are set but not in VARIABLES.
    """

    debug: bool = False
    log_dir: str = ""
    log_format: str = "text"
    log_level: str = "INFO"
    log_requests: bool = True
    model_source: str = "HUGGINGFACE"
    is_torch_forced: bool = False
    paddlenlp_python: str = ""
    cache_dir: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    openai_api_key: str = field(default="", repr=False)
    no_color: bool = False
    unknown: tuple[str, ...] = ()


def read_env() -> Env:
    """Read the environment once; raise ConfigError for a value outside its range."""
    from fastdeploy.core.errors import ConfigError

    log_format = os.environ.get("FD_LOG_FORMAT", "text").lower()
    if log_format not in LOG_FORMATS:
        raise ConfigError("FD_LOG_FORMAT", f"expected one of {', '.join(LOG_FORMATS)}, got {log_format!r}")
    log_level = os.environ.get("FD_LOG_LEVEL", "INFO").upper()
    if log_level not in LOG_LEVELS:
        raise ConfigError("FD_LOG_LEVEL", f"expected one of {', '.join(LOG_LEVELS)}, got {log_level!r}")
    keys = tuple(key for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key)
    return Env(
        debug=os.environ.get("FD_DEBUG", "") == "1",
        log_dir=os.environ.get("FD_LOG_DIR", ""),
        log_format=log_format,
        log_level=log_level,
        log_requests=os.environ.get("FD_LOG_REQUESTS", "1") != "0",
        model_source=os.environ.get("FD_MODEL_SOURCE", "HUGGINGFACE").upper(),
        is_torch_forced=os.environ.get("FD_FOR_TORCH_MODEL_FORMAT", "") == "1",
        paddlenlp_python=os.environ.get("FD_PADDLENLP_PYTHON", ""),
        cache_dir=os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fastdeploy"),
        api_keys=keys,
        openai_api_key=os.environ.get("OPENAI_API_KEY", ""),
        no_color=bool(os.environ.get("NO_COLOR")),
        unknown=tuple(sorted(name for name in os.environ if name.startswith("FD_") and name not in VARIABLES)),
    )


def shown_variables() -> dict[str, str]:
    """Return the FD_* variables that are set, as they may be shown: what may be a secret is masked."""
    return {
        name: "***" if any(word in name for word in SECRET_WORDS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith("FD_")
    }
