# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON files of a tokenizer's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """Return the mapping that a file holds; empty if there is no such file.

    Raises:
        ConfigError: it cannot be read, or holds no mapping.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("tokenizer", f"cannot read {str(file)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("tokenizer", f"{str(file)!r} does not hold a mapping")
    return content
