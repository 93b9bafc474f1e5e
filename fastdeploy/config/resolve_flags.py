# SPDX-License-Identifier: Apache-2.0
"""Resolves the values that were given for flags: their types, names of other servers, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastdeploy.config.convert import convert
from fastdeploy.config.flag import Flag, FlagClass
from fastdeploy.config.flags import FLAG_BY_NAME
from fastdeploy.config.machine import resolve_device
from fastdeploy.core.errors import ConfigError, ConfigErrors, ErrorCollector, did_you_mean

COMMAND_LINE = "command line"
LLM_ARGUMENT = "LLM argument"
REFUSED = "is refused, leave it out"
"""What a message says of a refused flag before the reason, which names what to use instead if there is something."""


def resolve_flags(
    given: Mapping[str, Any], provenance: dict[str, str], problems: ErrorCollector
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the converted values of honoured flags, and a note for each flag that has no effect.

    A flag of another server that stands for one of ours sets that one's value and provenance.

    Args:
        given: flag -> its value as it was given.
        provenance: where each value came from.
        problems: gets an error for each value that has the wrong type, is refused or contradicts another one.
    """
    values: dict[str, Any] = {}
    setters: dict[str, str] = {}  # honoured flag -> what set it, as its user typed it
    notes: list[str] = []
    is_gpu = resolve_device(str(given.get("device", ""))).startswith("gpu")
    for name, raw in given.items():
        flag, shown = FLAG_BY_NAME[name], display_name(name, provenance)
        text = _with_value(flag, shown, raw)
        with problems.collecting(), errors_name_the_origin(provenance, name):
            value = convert(flag, raw, shown)
            if flag.flag_class is FlagClass.REFUSED and value not in flag.neutral:
                raise ConfigError(text, f"{REFUSED}: {flag.reason}")
            if is_gpu and flag.refused_on_gpu and value not in flag.neutral:
                raise ConfigError(text, f"{REFUSED}: {flag.refused_on_gpu}")
            if flag.flag_class is FlagClass.NO_EFFECT and value not in flag.neutral:
                notes.append(f"{shown} {value} has no effect: {flag.reason}")
            for target, item, source in _targets(flag, shown, raw, value):
                own_value = convert(target, item, source)
                if isinstance(item, str) and item in target.noted_values:
                    notes.append(f"{source} {item} has no effect: {target.noted_values[item]}")
                if values.setdefault(target.name, own_value) != own_value:
                    raise ConfigError(text, f"contradicts {setters[target.name]}")
                setters[target.name] = text
                provenance.setdefault(target.name, provenance[name])
    return values, tuple(notes)


def _targets(flag: Flag, shown: str, raw: Any, value: Any) -> list[tuple[Flag, Any, str]]:
    """Return the honoured flags that a flag sets, with the value for each before its conversion, and where that is.

    Raises:
        ConfigError: a key of a mapping that stands for several flags is not available.
    """
    if flag.flag_class is FlagClass.HONOURED:
        return [(flag, raw, shown)]
    if flag.flag_class is not FlagClass.MAPPED or value in flag.neutral:
        return []
    if not flag.keys:
        return [(FLAG_BY_NAME[flag.target], value, shown)]
    problems = ErrorCollector()
    for key in [key for key, item in value.items() if key not in flag.keys and item not in (False, "", None)]:
        with problems.collecting():
            hint = did_you_mean(key, flag.keys)
            raise ConfigError(f"{shown}.{key}", f"is not available; available keys: {', '.join(flag.keys)}{hint}")
    problems.raise_all()
    return [(FLAG_BY_NAME[flag.keys[key]], item, f"{shown}.{key}") for key, item in value.items() if key in flag.keys]


def _with_value(flag: Flag, shown: str, value: Any) -> str:
    """Return a flag as messages show it: with its value, if that is short and no secret."""
    return f"{shown} {value}" if flag.kind in ("str", "int", "float") and not flag.is_secret else shown


def display_name(name: str, provenance: Mapping[str, str]) -> str:
    """Return a flag's name as its user typed it."""
    return FLAG_BY_NAME[name].option if provenance[name] == COMMAND_LINE else name


@contextmanager
def errors_name_the_origin(provenance: Mapping[str, str], name: str = "") -> Iterator[None]:
    """Add the file or variable that a wrong value came from to errors about `name`, else about the error's field."""
    try:
        yield
    except ConfigErrors as errors:
        raise ConfigErrors([_with_origin(error, provenance, name) for error in errors.errors]) from None
    except ConfigError as error:
        raise _with_origin(error, provenance, name) from None


def _with_origin(error: ConfigError, provenance: Mapping[str, str], name: str) -> ConfigError:
    origin = provenance.get(name or error.field.split(".")[0], COMMAND_LINE)
    if origin in (COMMAND_LINE, LLM_ARGUMENT):
        return error
    return ConfigError(error.field, f"{error.message} ({origin})")
