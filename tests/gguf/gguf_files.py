# SPDX-License-Identifier: Apache-2.0
"""The tiny GGUF files of tests/golden/gguf, which scripts/make_gguf_files.py writes, and their references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "gguf"
NAMES = sorted(path.stem for path in FOLDER.glob("*.gguf"))
WITH_REFERENCE = sorted(path.stem for path in FOLDER.glob("*.npz"))


def gguf_path(name: str) -> Path:
    """Return a file by its name without ending."""
    return FOLDER / f"{name}.gguf"


def reference(name: str) -> dict[str, Any]:
    """Return what transformers computed: tokens, rows, logprobs, and the config.json of its model."""
    with np.load(FOLDER / f"{name}.npz") as values:
        found: dict[str, Any] = dict(values)
    found["config"] = json.loads(str(found["config"]))
    return found
