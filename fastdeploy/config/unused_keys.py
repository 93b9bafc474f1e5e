# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that have no effect although they look as if they had one, as lines for the log of a start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastdeploy.config.checkpoint_json import GGUF_NOTES
from fastdeploy.config.experts_config import KEYS_OF_SIZES
from fastdeploy.config.family_defaults import TRANSFORMERS
from fastdeploy.config.foreign_formats import quantization_notes


def unused_keys(raw: Mapping[str, Any], architecture: str, theta: float, where: str) -> Iterator[str]:
    """Yield a line for each key, or pair of keys that contradict each other.

    Args:
        raw: the whole config.json, whose values have been checked.
        theta: the base of the rotary embedding that is used.
        where: the file, as messages begin with it.
    """
    window = raw.get("sliding_window")
    if window is not None and not TRANSFORMERS[architecture].has_sliding_window:
        yield f"{where}sliding_window {window} has no effect: {architecture} has no sliding windows"
    replaced = raw.get("rope_parameters") if raw.get("rope_scaling") else None
    other = replaced.get("rope_theta") if isinstance(replaced, Mapping) else None
    if other is not None and other != theta:
        yield f"{where}rope_scaling replaces rope_parameters, whose rope_theta {other} has no effect: {theta} is used"
    for used, *others in KEYS_OF_SIZES.get(architecture, ()):
        for key in others:
            if None not in (raw.get(used), raw.get(key)) and raw[used] != raw[key]:
                yield f"{where}{key} {raw[key]} has no effect beside {used} {raw[used]}"
    yield from quantization_notes(raw, where)
    yield from raw.get(GGUF_NOTES) or ()
