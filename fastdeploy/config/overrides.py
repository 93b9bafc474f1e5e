# SPDX-License-Identifier: Apache-2.0
"""Values of flags that replace those of config.json and generation_config.json, before these are checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.config.checkpoint_json import GENERATION_KEYS, MODEL_KEYS, ROPE_KEYS, check_values
from fastdeploy.config.flag import REFUSED
from fastdeploy.config.generation_defaults import GenerationDefaults, parse_generation_defaults
from fastdeploy.core.errors import ConfigError, ConfigErrors, ErrorCollector, did_you_mean

HF, GENERATION = "hf_overrides", "override_generation_config"
_ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
_ROPE_VALUES = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_PADDLENLP_SCALING = ("rope_scaling_type", "rope_scaling_factor")
_HF_KEYS = ("max_position_embeddings", *_ROPE_OBJECTS, *_ROPE_VALUES)
_GENERATION_KEYS = (*GenerationDefaults.__dataclass_fields__, "eos_token_id")


@dataclass(frozen=True)
class CheckpointOverrides:
    """What flags say about a checkpoint.

    Attributes:
        config: keys of config.json.
        generation: keys of generation_config.json.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_keys(HF, self.config, _HF_KEYS, "set others in the checkpoint's config.json")
        _check_keys(GENERATION, self.generation, _GENERATION_KEYS, "send other values with each request")
        with _errors_name(HF):
            _check_rope(self.config)
        with _errors_name(GENERATION):
            check_values(self.generation, GENERATION_KEYS, "")
            parse_generation_defaults(self.generation, "")

    def apply_to_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with the overrides; a setting of RoPE replaces the file's wherever that stands.

        An object for RoPE replaces the whole object of the file, whose base and rotated part stay unless it has others.
        """
        merged, given = {**raw, **self.config}, self.config
        objects = (raw[key] for key in _ROPE_OBJECTS if isinstance(raw.get(key), Mapping))
        replaced: Mapping[str, Any] = next(filter(None, objects), {})
        if any(key in given for key in _ROPE_OBJECTS):
            stays = {key: replaced[key] for key in _ROPE_VALUES[:2] if key in replaced}
            names = {name for name in _ROPE_VALUES for key in _ROPE_OBJECTS if name in (given.get(key) or ())}
            gone = {*_ROPE_OBJECTS, *_PADDLENLP_SCALING, *names}
            return {key: value for key, value in merged.items() if key not in gone} | stays | dict(given)
        for key in _ROPE_OBJECTS:
            if isinstance(merged.get(key), Mapping):
                merged[key] = {name: value for name, value in merged[key].items() if name not in given}
        return merged

    def apply_to_generation(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return generation_config.json with the overrides; a temperature also replaces the file's greedy choice."""
        merged = {**raw, **self.generation}
        decides_sampling = self.generation.keys() & {"temperature", "do_sample"}
        for key in ("do_sample", "decode_strategy") if decides_sampling else ():
            if key not in self.generation:
                merged.pop(key, None)
        return merged

    @contextmanager
    def errors_name_the_flag(self) -> Iterator[None]:
        """Make errors about an overridden key of config.json name the flag, which is where the value came from."""
        try:
            yield
        except ConfigError as error:
            key = error.field.split(".")[0]
            is_rope = key in _ROPE_OBJECTS and any(name in self.config for name in _ROPE_OBJECTS)
            if key not in self.config and not is_rope:
                raise
            raise ConfigError(f"{HF}.{error.field}", error.message) from None


def _check_keys(flag: str, given: Mapping[str, Any], known: tuple[str, ...], others: str) -> None:
    problems = ErrorCollector()
    for key in (key for key in given if key not in known):
        with problems.collecting():
            problem = f"{REFUSED}; available keys: {', '.join(known)}; {others}"
            raise ConfigError(f"{flag}.{key}", f"{problem}{did_you_mean(str(key), known)}")
    problems.raise_all()


def _check_rope(given: Mapping[str, Any]) -> None:
    check_values(given, MODEL_KEYS, "")
    objects = {key: value for key in _ROPE_OBJECTS if (value := given.get(key)) is not None}
    for key, value in objects.items():
        if not isinstance(value, Mapping):
            raise ConfigError(key, f"expected an object, got {type(value).__name__}")
        _check_keys(key, value, tuple(ROPE_KEYS), "settings for each kind of layer are not supported")
        check_values(value, ROPE_KEYS, "", key)
    if len(objects) == len(_ROPE_OBJECTS):
        raise ConfigError("rope_parameters", "cannot be combined with rope_scaling, which replaces it")


@contextmanager
def _errors_name(flag: str) -> Iterator[None]:
    try:
        yield
    except ConfigErrors as errors:
        raise ConfigErrors([ConfigError(f"{flag}.{error.field}", error.message) for error in errors.errors]) from None
    except ConfigError as error:
        raise ConfigError(f"{flag}.{error.field}", error.message) from None


NO_OVERRIDES = CheckpointOverrides()
