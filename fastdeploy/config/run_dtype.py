# SPDX-License-Identifier: Apache-2.0
"""The dtype of a run, from a request and from what a checkpoint says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastdeploy.core.errors import ConfigError

DType = Literal["bfloat16", "float32"]
DTYPE_BYTES: Mapping[DType, int] = {"bfloat16": 2, "float32": 4}
_DTYPE_NAMES: Mapping[str, DType] = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
}
_RUN_AS = {"float16": "bfloat16", "half": "bfloat16", "float64": "float32", "double": "float32", "float": "float32"}


def choose_dtype(requested: str, raw: Mapping[str, Any], stored: str) -> DType:
    """Return the type of weights and activations.

    Args:
        requested: a value of `--dtype`; `auto` for that of config.json, else that of the files.
        raw: the whole config.json.
        stored: dtype of the weights in their files.

    Raises:
        ConfigError: it is not supported.
    """
    if requested == "auto":
        named = str(raw.get("dtype") or raw.get("torch_dtype") or "auto").removeprefix("torch.")
        checkpoint = stored if named == "auto" else named
        requested = _RUN_AS.get(checkpoint, checkpoint)
    if requested not in _DTYPE_NAMES:
        raise ConfigError("dtype", f"'{requested}' is not supported (supported: auto, bfloat16, float32)")
    return _DTYPE_NAMES[requested]
