# SPDX-License-Identifier: Apache-2.0
"""Where log lines go: stderr, and a file in FD_LOG_DIR."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from fastdeploy.config.env import Env
from fastdeploy.core.errors import ConfigError

SERVER_LOG = "api_server.log"
ENGINE_LOG = "engine.log"


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
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    formatter = JsonFormatter() if env.log_format == "json" else text
    logger = logging.getLogger("fastdeploy")
    logger.handlers.clear()
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


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
