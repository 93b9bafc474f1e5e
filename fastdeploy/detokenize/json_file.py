# SPDX-License-Identifier: Apache-2.0
"""Reads JSON files of a tokenizer's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; empty if the file does not exist.

    Raises:
        ConfigError: the file cannot be read or does not contain an object.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("tokenizer", f"cannot read {str(file)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("tokenizer", f"{str(file)!r} does not contain a JSON object")
    return content
