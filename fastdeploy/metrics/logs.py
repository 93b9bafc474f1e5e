# SPDX-License-Identifier: Apache-2.0
"""Logging of API processes and the engine process: to stderr and to files in FD_LOG_DIR, as text or JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

from fastdeploy.config.env import Env
from fastdeploy.core.errors import ConfigError

SERVER_LOG = "api_server.log"
ENGINE_LOG = "engine.log"
AGENT_LOG = "agent.log"
ENGINE_PREFIX = "[fastdeploy]"  # of the engine's own lines, as opposed to the output of libraries
TERMINAL_LEVELS = ("DEBUG", "WARNING", "ERROR", "CRITICAL")  # of the engine; other lines are in its log file only
_STACKS = re.compile(r'((Current )?[Tt]hread 0x[0-9a-f]+ |  File ".*", line \d+ in )')  # as faulthandler writes them


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; a message that is a JSON object contributes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its newline."""
        message = record.getMessage()
        line: dict[str, object] = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        fields = _as_mapping(message)
        line.update(fields if fields is not None else {"message": message})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _as_mapping(message: str) -> dict[str, object] | None:
    if not message.startswith("{"):
        return None
    try:
        value = json.loads(message)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def set_up_logging(env: Env) -> None:
    """Send the log of `fastdeploy.*` to stderr and, with FD_LOG_DIR, to a file there.

    Raises:
        ConfigError: the folder cannot be created.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if env.log_dir:
        handlers.append(logging.FileHandler(log_folder(env) / SERVER_LOG))
    _install(env, handlers, "%(asctime)s %(levelname)s %(message)s")


def set_up_engine_logging(env: Env) -> None:
    """Send the engine's log to its stderr, whose lines the parent process handles with `engine_line`."""
    _install(env, [logging.StreamHandler(sys.stderr)], f"{ENGINE_PREFIX} %(levelname)s %(name)s: %(message)s")


def engine_line(text: str, is_json: bool) -> tuple[str, bool]:
    """Convert a line of the engine process for the log file.

    Args:
        text: the line without its newline.
        is_json: whether FD_LOG_FORMAT is json; then output of libraries is converted to JSON, too.

    Returns:
        The line for the log file, and whether the terminal shows it.
    """
    is_stack = _STACKS.match(text) is not None
    if not is_json:
        is_warning = text.startswith(tuple(f"{ENGINE_PREFIX} {level}" for level in TERMINAL_LEVELS))
        return text, is_warning or is_stack
    fields = _as_mapping(text)
    if fields is not None:
        return text, fields.get("level") in TERMINAL_LEVELS
    now = logging.Formatter().formatTime(logging.makeLogRecord({}))
    return json.dumps({"time": now, "level": "INFO", "logger": "engine.output", "message": text}), is_stack


def _install(env: Env, handlers: list[logging.Handler], text_format: str) -> None:
    formatter = JsonFormatter() if env.log_format == "json" else logging.Formatter(text_format)
    for handler in handlers:
        handler.setFormatter(formatter)
    for name in ("fastdeploy", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.setLevel(env.log_level)
        logger.propagate = False
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its messages about start and shutdown repeat ours
    logging.getLogger("fastdeploy.request").setLevel(logging.NOTSET if env.log_requests else logging.WARNING)


def log_folder(env: Env) -> Path:
    """Return FD_LOG_DIR; create it if necessary.

    Raises:
        ConfigError: it cannot be created.
    """
    folder = Path(env.log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("FD_LOG_DIR", f"cannot create {env.log_dir!r}: {error.strerror}") from None
    return folder
