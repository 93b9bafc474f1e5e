# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that have no effect although they look as if they had one, as lines for the log of a start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastdeploy.config.checkpoint_json import GGUF_NOTES
from fastdeploy.config.experts_config import KEYS_OF_SIZES
from fastdeploy.config.family_defaults import TRANSFORMERS
from fastdeploy.config.foreign_formats import quantization_notes
from fastdeploy.config.latent_config import ALWAYS_INTERLEAVED, LATENT_ARCHITECTURES


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
    yield from _keys_of_latent_attention(raw, architecture, where)
    for used, *others in KEYS_OF_SIZES.get(architecture, ()):
        for key in others:
            if None not in (raw.get(used), raw.get(key)) and raw[used] != raw[key]:
                yield f"{where}{key} {raw[key]} has no effect beside {used} {raw[used]}"
    yield from quantization_notes(raw, where)
    yield from raw.get(GGUF_NOTES) or ()


def _keys_of_latent_attention(raw: Mapping[str, Any], architecture: str, where: str) -> Iterator[str]:
    if architecture not in LATENT_ARCHITECTURES:
        return
    heads, num_heads = raw.get("num_key_value_heads"), raw["num_attention_heads"]
    if heads not in (None, num_heads):
        yield f"{where}num_key_value_heads {heads} has no effect: all {num_heads} heads share the latent vectors"
    if architecture == ALWAYS_INTERLEAVED and raw.get("rope_interleave") is False:
        yield f"{where}rope_interleave false has no effect: {architecture} rotates neighbouring dimensions"
