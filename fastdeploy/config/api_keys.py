# SPDX-License-Identifier: Apache-2.0
"""API keys with names, weights and limits: the file of `--api-key-file`, and the keys of `--api-key`."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import yaml

from fastdeploy.config.flag import Flag, check_fields, integer, number, switch
from fastdeploy.config.yaml_file import StrictLoader
from fastdeploy.core.errors import ConfigError, did_you_mean

FLAG = "--api-key-file"
EXPECTED_KEY = "printable ASCII characters without spaces"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]+")
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_key(value: Any) -> bool:
    """Return whether a client could send this as its key."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


@dataclass(frozen=True)
class ApiKey:
    """A key that clients send, and what they may use with it.

    Attributes:
        name: label in metrics and log lines.
        key: the secret, which is never shown.
        weight: share of a busy server, relative to the weights of the other keys that want it.
        max_sequences: maximum number of sequences in flight; None is no limit.
        tokens_per_minute: maximum number of prompt and output tokens per minute; None is no limit.
        admin: may read the configuration and abort the requests of other keys.
    """

    name: Annotated[str, Flag("str", "1 to 64 letters, digits, dots, hyphens or underscores", _is_name)]
    key: Annotated[str, Flag("str", EXPECTED_KEY, is_key, is_secret=True)] = field(repr=False)
    weight: Annotated[float, number(0.001, 1000)] = 1.0
    max_sequences: Annotated[int | None, integer(1)] = None
    tokens_per_minute: Annotated[int | None, integer(1)] = None
    admin: Annotated[bool, switch()] = False

    def __post_init__(self) -> None:
        check_fields(self)


FIELDS = tuple(item.name for item in fields(ApiKey))


def read_api_key_file(path: str) -> tuple[ApiKey, ...]:
    """Read a YAML list of entries with the fields of `ApiKey`, of which `name` and `key` are required.

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong; names the file, the entry and the field. No message
            shows anything that may be a key.
    """
    content = _read_yaml(path)
    if not isinstance(content, list) or not content:
        raise _error(path, "expected a list of entries, each with a name and a key")
    keys = tuple(_parse_entry(path, position, entry) for position, entry in enumerate(content, start=1))
    for name in ("name", "key"):
        _check_unique(path, name, [getattr(key, name) for key in keys])
    return keys


def file_notes(path: str, flag: str = FLAG, content: str = "its keys") -> tuple[str, ...]:
    """Return a note for start-up if others than the owner may read or write a flag's file of secrets."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if not mode & _OPEN_TO_OTHERS:
        return ()
    return (f"{flag} {path} is accessible to other users (mode {mode:04o}); `chmod 600` keeps {content} secret",)


def add_plain_keys(keys: tuple[ApiKey, ...], plain: Sequence[str]) -> tuple[ApiKey, ...]:
    """Return the keys of the file and those without a name, which are named `key-1`, `key-2`, ...

    Raises:
        ConfigError: a key is in the file as well, or the file has an entry of such a name.
    """
    by_name, by_key = {key.name: key for key in keys}, {key.key: key for key in keys}
    named = []
    for position, secret in enumerate(dict.fromkeys(plain), start=1):
        name = f"key-{position}"
        if secret in by_key:
            raise ConfigError("api_key", f"key {position} is in {FLAG} as well, with the name {by_key[secret].name!r}")
        if name in by_name:
            raise ConfigError("api_key", f"key {position} is named {name!r}, which is a name in {FLAG} as well")
        named.append(ApiKey(name, secret))
    return (*keys, *named)


def _read_yaml(path: str) -> Any:
    """Return the content; messages show positions only, because the text around a mistake may be a key."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), StrictLoader)
    except OSError as error:
        raise ConfigError(FLAG, f"cannot read {path!r}: {error.strerror}") from None
    except ConfigError as error:
        raise _error(path, f"{error.field}: {error.message}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _error(path, f"is not valid YAML{where}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise _error(path, "is not valid YAML in UTF-8") from None


def _parse_entry(path: str, position: int, entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise _error(path, f"entry {position}: expected a mapping with name and key, got a value that is not shown")
    for name in entry:
        if name not in FIELDS:
            hint = did_you_mean(str(name), FIELDS) or f"; known fields: {', '.join(FIELDS)}"
            raise _error(path, f"entry {position}, {name}: unknown field{hint}")
    given = {name: value for name, value in entry.items() if value is not None}
    for name in ("name", "key"):
        if name not in given:
            raise _error(path, f"entry {position}, {name}: is missing")
    try:
        return ApiKey(**given)
    except ConfigError as error:
        raise _error(path, f"entry {position}, {error.field}: {error.message}") from None


def _check_unique(path: str, name: str, values: Sequence[str]) -> None:
    entries: dict[str, int] = {}
    for position, value in enumerate(values, start=1):
        if (other := entries.setdefault(value, position)) != position:
            raise _error(path, f"entry {position}, {name}: is the {name} of entry {other} as well")


def _error(path: str, message: str) -> ConfigError:
    return ConfigError(FLAG, f"{path}: {message}")
