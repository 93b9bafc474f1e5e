# SPDX-License-Identifier: Apache-2.0
"""Logging of all processes and of `LLM`: to stderr and to files in FD_LOG_DIR, as text or JSON.

Both formats begin with the time, in every process. Levels have one meaning everywhere, which
docs/guide/observability.md says.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fastdeploy.config.env import Env
from fastdeploy.core.errors import ConfigError
from fastdeploy.metrics.stats_log import STATS_LOGGER

SERVER_LOG = "api_server.log"
ENGINE_LOG = "engine.log"
AGENT_LOG = "agent.log"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TERMINAL_LEVELS = ("DEBUG", "WARNING", "ERROR", "CRITICAL")  # of the engine, as its statistics; the rest is in its file
ENGINE_OUTPUT = "engine.output"  # logger that stands for what libraries of the engine process print
_OWN_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) ([\w.]+): ")  # of TEXT_FORMAT
_PADDLE_FORMAT = "[%(asctime)-15s] [%(levelname)8s] %(filename)s:%(lineno)s - %(message)s"  # set up by its import
_STACKS = re.compile(r'((Current )?[Tt]hread 0x[0-9a-f]+ |  File ".*", line \d+ in )')  # as faulthandler writes them


class TextFormatter(logging.Formatter):
    """Formats a record as text whose lines after the first one, such as those of a traceback, are indented."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines without the last newline."""
        return super().format(record).replace("\n", "\n  ")


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
    _install(env, handlers)


def set_up_engine_logging(env: Env) -> None:
    """Send the engine's log to its stderr, whose lines the parent process handles with `engine_line`."""
    _install(env, [logging.StreamHandler(sys.stderr)])


def set_up_script_logging(env: Env) -> None:
    """Send the log of a script with `LLM` to stderr, unless the script has set up logging; Paddle's own does not count.

    A handler of the logger `fastdeploy` or of the root logger means that the script has. A level that it has given the
    logger `fastdeploy` stays in any case.
    """
    logger = logging.getLogger("fastdeploy")
    if logger.handlers or not all(_is_of_paddle(handler) for handler in logging.getLogger().handlers):
        return
    level = logger.level
    _install(env, [logging.StreamHandler(sys.stderr)], names=("fastdeploy",))
    if level != logging.NOTSET:
        logger.setLevel(level)


def _is_of_paddle(handler: logging.Handler) -> bool:
    return handler.formatter is not None and handler.formatter._fmt == _PADDLE_FORMAT


def engine_line(text: str, is_json: bool, output_logger: str = ENGINE_OUTPUT) -> tuple[str, bool]:
    """Convert a line of the engine or agent process for its log file.

    Args:
        text: the line without its newline.
        is_json: whether FD_LOG_FORMAT is json.
        output_logger: logger that lines of libraries get, which have neither a time nor a level.

    Returns:
        The line for the log file, and whether the terminal shows it.
    """
    is_stack = _STACKS.match(text) is not None
    if not is_json:
        own = _OWN_LINE.match(text)
        if own is not None or not text or text[0].isspace():  # the line continues the one before it
            return text, is_stack or (own is not None and _is_shown(own[1], own[2]))
    elif (fields := _as_mapping(text)) is not None:
        return text, _is_shown(fields.get("level"), fields.get("logger"))
    record = logging.makeLogRecord({"name": output_logger, "levelname": "INFO", "msg": text})
    return _make_formatter(is_json).format(record), is_stack


def _is_shown(level: object, logger: object) -> bool:
    return level in TERMINAL_LEVELS or logger == STATS_LOGGER


def _make_formatter(is_json: bool) -> logging.Formatter:
    return JsonFormatter() if is_json else TextFormatter()


def _install(env: Env, handlers: list[logging.Handler], names: Sequence[str] = ("fastdeploy", "uvicorn")) -> None:
    """Give the handlers to loggers; those of `fastdeploy.*` have its handlers."""
    formatter = _make_formatter(env.log_format == "json")
    for handler in handlers:
        handler.setFormatter(formatter)
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.setLevel(env.log_level)
        logger.propagate = False
    if "uvicorn" in names:
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
