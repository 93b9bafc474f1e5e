# SPDX-License-Identifier: Apache-2.0
"""Flags, and fields of configurations that they set: `port: Annotated[int, integer(0, 65535, help="...")] = 8000`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

from fastdeploy.core.errors import ConfigError, ErrorCollector, did_you_mean

SERVER = "server"
CLUSTER = "cluster"
SERVE_ONLY = (SERVER, CLUSTER)
"""Sections of which only `fastdeploy serve` has the flags."""
REFUSED = "is refused, leave it out"
"""What a message says of a refused flag or key before the reason, or before what to use instead."""


class FlagClass(Enum):
    """Whether a flag is honoured."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "accepted without effect"
    MAPPED = "stands for another flag"


@dataclass(frozen=True)
class Flag:
    """A flag, or a key of `speculative_config`.

    Attributes:
        kind: type of its value, a key of `convert.KINDS`.
        expected: the valid values, for messages.
        is_valid: returns whether a value of that type is valid.
        name: snake_case, on the command line `--name-with-hyphens`; empty in a field: the field's name.
        help: what it does; fields without help are not flags.
        section: the configuration that it belongs to: engine, gpu, cache, scheduler or speculative, which are arguments
            of `LLM` too, server or cluster.
        field: its field in that configuration.
        flag_class: whether it is honoured.
        reason: why it is refused or has no effect.
        neutral: values that are accepted without a word, because they request nothing.
        is_secret: its value is never shown.
        short: an additional spelling on the command line.
        takes_several: a list whose items may follow each other on the command line.
        choices: the valid values if they are a list of strings, for suggestions.
        aliases: value of another server -> the value here.
        refused_values: value of another server -> why it is refused, and what to use.
        noted_values: value of another server that is accepted -> the note of a start about it.
        target: name of the flag that a mapped flag stands for.
        refused_on_gpu: why other values than neutral ones are refused with `--device gpu`, if they are.
        keys: key of its value -> flag that it stands for, where a mapped flag stands for several.
    """

    kind: str
    expected: str = ""
    is_valid: Callable[[Any], bool] = lambda value: True
    name: str = ""
    help: str = ""
    section: str = "engine"
    field: str = ""
    flag_class: FlagClass = FlagClass.HONOURED
    reason: str = ""
    neutral: tuple[Any, ...] = ()
    is_secret: bool = False
    short: str = ""
    takes_several: bool = False
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    noted_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    target: str = ""
    refused_on_gpu: str = ""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def option(self) -> str:
        """Return its spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all its spellings on the command line."""
        return (self.option, self.short) if self.short else (self.option,)


def integer(low: int | None = None, high: int | None = None, kind: str = "int", **keys: Any) -> Flag:
    """Accept integers in [low, high]."""
    return Flag(kind, *_range("an integer", (int,), low, high), **keys)


def integer_or_auto(low: int, high: int, kind: str, **keys: Any) -> Flag:
    """Accept integers in [low, high], and `auto`."""
    expected, is_integer = _range("an integer", (int,), low, high)
    return Flag(kind, f"{expected}, or auto", lambda value: value == "auto" or is_integer(value), **keys)


def number(low: float | None = None, high: float | None = None, **keys: Any) -> Flag:
    """Accept numbers in [low, high]."""
    return Flag("float", *_range("a number", (int, float), low, high), **keys)


def choice(*choices: str, **keys: Any) -> Flag:
    """Accept these strings; messages leave out an empty one."""
    expected = f"one of {', '.join(filter(None, choices))}"
    return Flag("str", expected, lambda value: value in choices, choices=choices, **keys)


def switch(**keys: Any) -> Flag:
    """Accept true and false."""
    return Flag("bool", "true or false", lambda value: type(value) is bool, **keys)


def text(expected: str = "a string", **keys: Any) -> Flag:
    """Accept any string."""
    return Flag("str", expected, lambda value: isinstance(value, str), **keys)


def mapping(**keys: Any) -> Flag:
    """Accept a mapping, on the command line as JSON."""
    return Flag("json", "a mapping", lambda value: isinstance(value, Mapping), **keys)


def strings(expected: str = "", is_valid: Callable[[str], bool] = bool, **keys: Any) -> Flag:
    """Accept a tuple of strings that are not empty, and that `is_valid` accepts."""
    text = "strings that are not empty" + (f", of {expected}" if expected else "")
    return Flag("list", text, lambda value: isinstance(value, tuple) and all(map(is_valid, value)), **keys)


@cache
def flags_of(config: type) -> Mapping[str, Flag]:
    """Return what annotations say about a configuration's fields, in their order."""
    hints = get_type_hints(config, include_extras=True)
    found = ((name, item) for name, hint in hints.items() for item in getattr(hint, "__metadata__", ()))
    return {name: item for name, item in found if isinstance(item, Flag)}


def check_fields(config: Any, prefix: str = "") -> None:
    """Check the values of a configuration, of which None is always valid.

    Args:
        prefix: precedes the names of its fields in messages.

    Raises:
        ConfigError: values are not valid; names each field and its valid values.
    """
    problems = ErrorCollector()
    for name, flag in flags_of(config.__class__).items():
        value = getattr(config, name)
        if value is not None and not flag.is_valid(value):
            with problems.collecting():
                raise ConfigError(
                    f"{prefix}{flag.name or name}", f"expected {flag.expected}, got {_shown(flag, value)}"
                )
    problems.raise_all()


def _shown(flag: Flag, value: Any) -> str:
    """Return a wrong value as messages show it, with the nearest valid one."""
    if flag.is_secret:
        return "a value that is not shown"
    hint = did_you_mean(value.lower(), filter(None, flag.choices)) if isinstance(value, str) else ""
    return f"{value!r}{hint}"


def _range(
    noun: str, types: tuple[type, ...], low: float | None, high: float | None
) -> tuple[str, Callable[[Any], bool]]:
    """Return how messages show a range, where None is no limit, and what checks it."""
    limits = f" in [{low}, {high}]" if high is not None else "" if low is None else f" of at least {low}"

    def is_valid(value: Any) -> bool:
        return type(value) in types and (low is None or low <= value) and (high is None or value <= high)

    return noun + limits, is_valid
