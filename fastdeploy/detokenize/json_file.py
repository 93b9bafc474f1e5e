# SPDX-License-Identifier: Apache-2.0
"""Reads JSON files of a tokenizer's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastdeploy.config.checkpoint_json import read_json_object


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; empty if the file does not exist.

    Raises:
        ConfigError: the file cannot be read or does not contain an object.
    """
    return read_json_object(file, "tokenizer") or {}
