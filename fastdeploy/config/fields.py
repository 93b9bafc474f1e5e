# SPDX-License-Identifier: Apache-2.0
"""Fields of configurations: each states its type, default, valid values and help once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from fastdeploy.core.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """What a field's metadata says about it.

    Attributes:
        kind: type of its value, a key of `convert.KINDS`.
        expected: the valid values, for messages.
        is_valid: returns whether a value is valid; the default always is.
        help: what it does, for the table of flags; empty for fields that are not flags.
        name: its name for users, if that is not the field's.
        is_secret: its value is never shown.
    """

    kind: str
    expected: str
    is_valid: Callable[[Any], bool]
    help: str = ""
    name: str = ""
    is_secret: bool = False


def integer(
    default: int | None, low: int | None = None, high: int | None = None, *, kind: str = "int", **keys: Any
) -> Any:
    """Return a field for integers in [low, high]."""

    def is_valid(value: Any) -> bool:
        return type(value) is int and _is_in_range(value, low, high)

    return _make_field(default, Option(kind, f"an integer{range_text(low, high)}", is_valid, **keys))


def number(default: float, low: float | None = None, high: float | None = None, **keys: Any) -> Any:
    """Return a field for numbers in [low, high]."""

    def is_valid(value: Any) -> bool:
        return type(value) in (int, float) and _is_in_range(value, low, high)

    return _make_field(default, Option("float", f"a number{range_text(low, high)}", is_valid, **keys))


def choice(default: str, choices: Iterable[str], **keys: Any) -> Any:
    """Return a field for one of these strings."""
    choices = tuple(choices)
    expected = f"one of {', '.join(choices)}"
    return _make_field(default, Option("str", expected, lambda value: value in choices, **keys))


def switch(default: bool | None, **keys: Any) -> Any:
    """Return a field for true or false."""
    return _make_field(default, Option("bool", "true or false", lambda value: type(value) is bool, **keys))


def text(default: Any = "", expected: str = "a string", **keys: Any) -> Any:
    """Return a field for any string."""
    return _make_field(default, Option("str", expected, lambda value: isinstance(value, str), **keys))


def strings(default: tuple[str, ...] = (), **keys: Any) -> Any:
    """Return a field for a tuple of strings."""
    return _make_field(default, Option("list", "strings", lambda value: isinstance(value, tuple), **keys))


def option_of(item: Field[Any]) -> Option | None:
    """Return what a field's metadata says, or None for a field without."""
    return item.metadata.get("option")


def check_fields(config: Any, prefix: str = "") -> None:
    """Check the values of a configuration.

    Args:
        prefix: stands before the names of its fields in messages.

    Raises:
        ConfigError: a value is not valid; names the field and the valid values.
    """
    for item in fields(config):
        option, value = option_of(item), getattr(config, item.name)
        if option is not None and value is not item.default and not option.is_valid(value):
            raise ConfigError(f"{prefix}{option.name or item.name}", f"expected {option.expected}, got {value!r}")


def range_text(low: float | None, high: float | None) -> str:
    """Return a range as it stands in messages; None is no limit."""
    if low is not None and high is not None:
        return f" in [{low}, {high}]"
    return "" if low is None else f" of at least {low}"


def _is_in_range(value: Any, low: float | None, high: float | None) -> bool:
    return (low is None or low <= value) and (high is None or value <= high)


def _make_field(default: Any, option: Option) -> Any:
    return field(default=default, repr=not option.is_secret, metadata={"option": option})
