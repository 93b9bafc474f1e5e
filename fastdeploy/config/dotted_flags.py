# SPDX-License-Identifier: Apache-2.0
"""Keys of a JSON flag as flags of their own, as vLLM takes them: `--speculative-config.method ngram`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastdeploy.config.flag import Flag
from fastdeploy.core.errors import ConfigError


def join_dotted(tokens: Sequence[str], flags: Iterable[Flag]) -> list[str]:
    """Return a command line in which the keys of each JSON flag are one value.

    A key may have dots, for a mapping within the mapping. Its value is JSON, else a string.

    Raises:
        ConfigError: a value is missing, a key is given twice, or its flag also as a whole.
    """
    names = {name: flag for flag in flags if flag.kind in ("json", "str_or_json") for name in flag.spellings}
    others: list[str] = []
    mappings: dict[str, dict[str, Any]] = {}
    rest = iter(tokens)
    for token in rest:
        name, dot, key = token.partition(".")
        if not dot or name not in names:
            others.append(token)
            continue
        key, _, text = key.partition("=") if "=" in key else (key, "", _next_value(rest, token))
        _set(mappings.setdefault(names[name].option, {}), key.split("."), _parse(text), token)
    for flag in names.values():
        if flag.option in mappings and any(token.split("=")[0] in flag.spellings for token in others):
            raise ConfigError(flag.option, "is given as a whole and by its keys")
    return others + [f"{option}={json.dumps(mapping)}" for option, mapping in mappings.items()]


def _next_value(rest: Iterator[str], token: str) -> str:
    value = next(rest, None)
    if value is None:
        raise ConfigError(token, "expected one argument")
    return value


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set(mapping: dict[str, Any], keys: Sequence[str], value: Any, token: str) -> None:
    *outer, last = keys
    for key in outer:
        mapping = mapping.setdefault(key, {})
        if not isinstance(mapping, dict):
            raise ConfigError(token, "is given twice")
    if last in mapping:
        raise ConfigError(token, "is given twice")
    mapping[last] = value
