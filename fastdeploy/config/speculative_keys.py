# SPDX-License-Identifier: Apache-2.0
"""Reads the mapping of `--speculative-config`, the YAML file or `LLM(speculative_config=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy.config.drafting_checkpoint import PLANNED_METHODS, infer_method
from fastdeploy.config.flag import REFUSED, flags_of
from fastdeploy.config.speculative_config import (
    CONFIGS,
    EXTENSIONS,
    FIELD,
    METHODS,
    AnySpeculativeConfig,
    ModelBasedConfig,
    MTPConfig,
    NaiveConfig,
    SpeculativeConfig,
    UnknownMethodConfig,
)
from fastdeploy.core.errors import ConfigError, ErrorCollector, did_you_mean

METHOD_ALIASES = {"ngram_match": "ngram", "[ngram]": "ngram", "deepseek_mtp": "mtp", "ernie_mtp": "mtp"}
KEY_ALIASES = {"prompt_lookup_max": "max_ngram_size", "prompt_lookup_min": "min_ngram_size"}
KEYS = ("method", "mtp_strategy", *dict.fromkeys(key for config in CONFIGS.values() for key in flags_of(config)))
KEYS_WITHOUT_EFFECT = {
    "disable_padded_drafter_batch": "batches are never padded",
    "draft_tensor_parallel_size": "on the CPU one rank uses all cores",
    "enforce_eager": "there are no CUDA graphs on the CPU",
    "max_candidate_len": "the whole allowed set is verified",
    "verify_window": "the whole allowed set is verified",
}
REMOVED_KEYS = {"suffix_decoding_snapshot_path": f"{REFUSED}: cached outputs are in memory only"}


def parse_speculative_config(mapping: Mapping[str, Any] | None) -> AnySpeculativeConfig:
    """Build the configuration of the mapping's method; None means no speculation.

    Raises:
        ConfigError: an unknown method or key, a key of another method, or a value that is not valid.
    """
    if mapping is None:
        return NaiveConfig()
    problems = ErrorCollector()
    with problems.collecting():
        values = _resolve_keys(mapping)
    if not problems.errors or "method" in mapping:  # without it, an unknown key is probably its misspelt name
        with problems.collecting():
            method = _resolve_method(mapping)
    problems.raise_all()
    config: type[AnySpeculativeConfig] = UnknownMethodConfig if method is None else CONFIGS[method]
    if config is NaiveConfig:
        values["num_speculative_tokens"] = 0
    extension = _extract_extension(values, config) if issubclass(config, ModelBasedConfig) else {}
    for key in [key for key in values if key not in flags_of(config)]:
        owners = " or ".join(repr(other) for other, keys in CONFIGS.items() if key in flags_of(keys)) or "'mtp'"
        with problems.collecting():
            what = "name the method, too" if method is None else f"the method is {method!r}"
            raise ConfigError(f"{FIELD}.{key}", f"belongs to method {owners}, {what}")
    problems.raise_all()
    notes = [
        f"{FIELD}.{key} {mapping[key]} has no effect: {reason}"
        for key, reason in KEYS_WITHOUT_EFFECT.items()
        if mapping.get(key) is not None
    ]
    if config is UnknownMethodConfig:
        values["given"] = dict(mapping)
    return config(**values, **extension, notes=tuple(notes))


def _resolve_method(mapping: Mapping[str, Any]) -> str | None:
    """Return the method that the mapping names or, without one, that drafts with its model; None if it is on a hub."""
    given, model = mapping.get("method"), mapping.get("model")
    if given is None and not model:
        raise ConfigError(f"{FIELD}.method", f"is missing; expected one of {', '.join(METHODS)}")
    method = infer_method(model) if not given and isinstance(model, str) and model else str(given).lower()
    if method is None:
        return None
    method = METHOD_ALIASES.get(method, method)
    if method in PLANNED_METHODS:
        methods = ", ".join(METHODS)
        raise ConfigError(f"{FIELD}.method", f"{method!r} is not available yet and refused; use one of {methods}")
    if method not in METHODS:
        raise ConfigError(
            f"{FIELD}.method", f"expected one of {', '.join(METHODS)}, got {given!r}{did_you_mean(method, METHODS)}"
        )
    return method


def _resolve_keys(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by key, aliases replaced, without the method and what is not set."""
    values: dict[str, Any] = {}
    problems = ErrorCollector()
    for key, value in mapping.items():
        name = KEY_ALIASES.get(key, key)
        with problems.collecting():
            _check_key(key, name)
            if name in values:
                raise ConfigError(f"{FIELD}.{key}", f"given twice (it is another name of {name!r})")
            if name in KEYS and name != "method" and value is not None:
                values[name] = value
    problems.raise_all()
    return values


def _check_key(key: str, name: str) -> None:
    """Refuse a key, whose usual name is `name`, that was removed or is unknown."""
    if name in REMOVED_KEYS:
        raise ConfigError(f"{FIELD}.{key}", REMOVED_KEYS[name])
    if name not in KEYS and name not in KEYS_WITHOUT_EFFECT:
        hint = did_you_mean(key, (*KEYS, *KEY_ALIASES)) or f"; known keys: {', '.join(KEYS)}"
        raise ConfigError(f"{FIELD}.{key}", f"unknown key{hint}")


def _extract_extension(values: dict[str, Any], method: type[ModelBasedConfig]) -> dict[str, Any]:
    """Replace `mtp_strategy` and the keys of the method that it names by fields of `ModelBasedConfig`.

    For MTP, keys of suffix decoding without `mtp_strategy` mean with_suffix, or suffix decoding alone if there is no
    layer.
    """
    has_suffix_keys = any(key.startswith("suffix_decoding_") for key in values)
    is_implied = method is MTPConfig and "mtp_strategy" not in values and has_suffix_keys
    strategy = values.pop("mtp_strategy", "with_suffix" if is_implied else "default")
    if strategy not in EXTENSIONS:
        raise ConfigError(
            f"{FIELD}.mtp_strategy",
            f"expected one of {', '.join(EXTENSIONS)}, got {strategy!r}{did_you_mean(str(strategy), EXTENSIONS)}",
        )
    config = EXTENSIONS[strategy]
    if config is None:
        return {}
    common = {key: values[key] for key in flags_of(SpeculativeConfig) if key in values}
    own = {key: values.pop(key) for key in flags_of(config) if key in values and key not in common}
    extension = {"extension": config(**{"num_speculative_tokens": 1, **common, **own})}
    return {**extension, "needs_layer": not is_implied} if method is MTPConfig else extension
