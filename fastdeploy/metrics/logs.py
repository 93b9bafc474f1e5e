# SPDX-License-Identifier: Apache-2.0
"""Where log lines go: stderr, and files in FD_LOG_DIR; the API's and the engine's alike, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from fastdeploy.config.env import Env
from fastdeploy.core.errors import ConfigError

SERVER_LOG = "api_server.log"
ENGINE_LOG = "engine.log"
ENGINE_MARK = "[fastdeploy]"  # begins the engine's own lines, beside what its libraries print
TERMINAL_LEVELS = ("WARNING", "ERROR", "CRITICAL")  # of the engine; the rest is for its log file


class JsonFormatter(logging.Formatter):
    """One JSON document per line; a message that is one already becomes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
        ConfigError: the folder cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if env.log_dir:
        handlers.append(logging.FileHandler(log_folder(env) / SERVER_LOG))
    _install(env, handlers, "%(asctime)s %(levelname)s %(message)s")


def set_up_engine_logging(env: Env) -> None:
    """Send the engine's log to its output, which `engine_line` reads on the other side."""
    _install(env, [logging.StreamHandler(sys.stderr)], f"{ENGINE_MARK} %(levelname)s %(name)s: %(message)s")


def engine_line(text: str, is_json: bool) -> tuple[str, bool]:
    """Return what becomes of a line that the engine process wrote.

    Args:
        is_json: FD_LOG_FORMAT=json; then what libraries print becomes a document as well.

    Returns:
        The line for its log file, and whether the terminal shows it too.
    """
    if not is_json:
        return text, text.startswith(tuple(f"{ENGINE_MARK} {level}" for level in TERMINAL_LEVELS))
    fields = _as_mapping(text)
    if fields is not None:
        return text, fields.get("level") in TERMINAL_LEVELS
    now = logging.Formatter().formatTime(logging.makeLogRecord({}))
    return json.dumps({"time": now, "level": "INFO", "logger": "engine.output", "message": text}), False


def _install(env: Env, handlers: list[logging.Handler], text_format: str) -> None:
    formatter = JsonFormatter() if env.log_format == "json" else logging.Formatter(text_format)
    for handler in handlers:
        handler.setFormatter(formatter)
    for name in ("fastdeploy", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.setLevel(env.log_level)
        logger.propagate = False
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its lines of start and end repeat ours
    logging.getLogger("fastdeploy.request").setLevel(logging.NOTSET if env.log_requests else logging.WARNING)


def log_folder(env: Env) -> Path:
    """Return FD_LOG_DIR, made if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    folder = Path(env.log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("FD_LOG_DIR", f"cannot make {env.log_dir!r}: {error.strerror}") from None
    return folder
