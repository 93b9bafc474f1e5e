# SPDX-License-Identifier: Apache-2.0
"""All flags. The same names in snake_case are the keys of a YAML file and the keyword arguments of `LLM`.

Most honoured flags are fields of a configuration. `foreign_flags` adds those that have no effect or are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.fields import option_of
from fastdeploy.config.flag import SERVER, Flag, FlagClass
from fastdeploy.config.foreign_flags import read_foreign_flags
from fastdeploy.config.server_config import ServerConfig

__all__ = ["FLAGS", "FLAG_BY_NAME", "Flag", "FlagClass"]

_QUANTIZATION_HELP = (
    "none, wint8, wint4 (integer weights), w8a8 or w4a8 (integer activations as well), quantized at load; or a format "
    'per part, such as \'{"attention": "wint8", "mlp": "wint4", "head": "none"}\' (default: none)'
)


def _flags_of(config: type, section: str) -> Iterator[Flag]:
    """Yield the flags of a configuration's fields."""
    for item in fields(config):
        option = option_of(item)
        if option is not None and option.help:
            help = f"{option.help}{_default_text(item.default)}"
            yield Flag(option.name or item.name, option.kind, help, section, item.name, is_secret=option.is_secret)


def _default_text(default: Any) -> str:
    """Return how a default is shown; fields without one, or with an empty one, say it in their help."""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    if isinstance(default, (int, float, str)) and default != "":
        return f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    return f" (default: {', '.join(default)})" if isinstance(default, tuple) and default else ""


def _older_spelling(name: str, kind: str, help: str) -> Flag:
    return Flag(name, kind, f"older spelling of {help}", section="speculative")


HONOURED_FLAGS: tuple[Flag, ...] = (
    *_flags_of(EngineConfig, "engine"),
    Flag("quantization", "str_or_json", _QUANTIZATION_HELP, field="quantization"),
    *_flags_of(SchedulerConfig, "scheduler"),
    *_flags_of(CacheConfig, "cache"),
    Flag(
        "speculative_config",
        "json",
        'such as \'{"method": "ngram", "num_speculative_tokens": 5}\' (default: no speculation)',
        section="speculative",
    ),
    _older_spelling("speculative_model", "str", "the key model of speculative_config, or of method ngram as [ngram]"),
    _older_spelling("num_speculative_tokens", "int", "the key of speculative_config"),
    _older_spelling("ngram_prompt_lookup_max", "int", "the key prompt_lookup_max of speculative_config"),
    _older_spelling("ngram_prompt_lookup_min", "int", "the key prompt_lookup_min of speculative_config"),
    _older_spelling(
        "speculative_draft_tensor_parallel_size", "int", "the key draft_tensor_parallel_size of speculative_config"
    ),
    *_flags_of(ServerConfig, SERVER),
)
FLAGS = (*HONOURED_FLAGS, *read_foreign_flags())
FLAG_BY_NAME = {flag.name: flag for flag in FLAGS}
