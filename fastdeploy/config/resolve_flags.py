# SPDX-License-Identifier: Apache-2.0
"""Resolves the values that were given for flags: their types, names of other servers, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastdeploy.config.convert import convert
from fastdeploy.config.flag import REFUSED, Flag, FlagClass
from fastdeploy.config.flags import FLAG_BY_NAME, FLAGS
from fastdeploy.config.machine import resolve_device
from fastdeploy.core.errors import ConfigError, ConfigErrors, ErrorCollector, did_you_mean

COMMAND_LINE = "command line"
LLM_ARGUMENT = "LLM argument"
_OF_CHECKPOINTS = ("model", "tokenizer", "dtype", "quantization", "chat_template")
"""Flags whose names also stand for what the files of a checkpoint say, if the flag was not given."""
_OLDER_NAMES = [flag.name for flag in FLAGS if flag.section == "speculative" and flag.field]
_FLAG_IN_TEXT = re.compile(r"""(?<![\w'"`./-])([a-z]+(?:_[a-z]+)+)(?![\w'"`/=]|\.\w)""")


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
            raise ConfigError(f"{shown}.{key}", f"{REFUSED}; available keys: {', '.join(flag.keys)}{hint}")
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
    """Add where a wrong value came from to errors about `name`, else about the error's field.

    That is the file or variable, or the spelling of flags on the command line (`ConfigError.typed`).
    """
    try:
        yield
    except ConfigErrors as errors:
        named = ConfigErrors([_with_origin(error, provenance, name) for error in errors.errors])
        raise named.with_traceback(errors.__traceback__) from None
    except ConfigError as error:
        raise _with_origin(error, provenance, name).with_traceback(error.__traceback__) from None


def _with_origin(error: ConfigError, provenance: Mapping[str, str], name: str) -> ConfigError:
    if error.typed:
        return error
    origin = provenance.get(name or error.field.split(".")[0], COMMAND_LINE)
    if origin == LLM_ARGUMENT:
        return error
    message = error.message if origin == COMMAND_LINE else f"{error.message} ({origin})"
    return ConfigError(error.field, message, typed=_typed(error.field, message, provenance))


def _typed(field: str, message: str, provenance: Mapping[str, str]) -> str:
    """Return an error's line with our flags as they are typed, except those that a file or a variable has set."""
    name, dot, key = field.partition(".")

    def as_typed(found: re.Match[str]) -> str:
        word = found[1]  # `num_speculative_tokens` is more often a key of --speculative-config than a flag
        return word if word in _OLDER_NAMES and word not in provenance else _typed_name(word, provenance)

    return f"{_typed_name(name, provenance)}{dot}{key}: {_FLAG_IN_TEXT.sub(as_typed, message)}"


def _typed_name(name: str, provenance: Mapping[str, str]) -> str:
    """Return a flag's spelling on the command line; other names stay."""
    flag, origin = FLAG_BY_NAME.get(name), provenance.get(name)
    if flag is None or flag.flag_class is not FlagClass.HONOURED or origin not in (None, COMMAND_LINE):
        return name
    return name if origin is None and name in _OF_CHECKPOINTS else flag.option
