# SPDX-License-Identifier: Apache-2.0
"""Errors for unknown keyword arguments that name the nearest known one, or what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from fastdeploy.core.errors import InvalidRequestError, did_you_mean

Parameters = TypeVar("Parameters", bound=type)
Absent = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Argument of another library -> why it is refused, and the values that are accepted because they request nothing."""


def suggest_keywords(absent: Absent) -> Callable[[Parameters], Parameters]:
    """Return a decorator that lets a dataclass raise InvalidRequestError for an unknown keyword argument.

    The message names the nearest field, or for an argument of `absent` the reason. None and the values that request
    nothing are accepted for these.
    """

    def decorate(cls: Parameters) -> Parameters:
        initialize = cls.__init__  # type: ignore[misc]
        names = {field.name for field in fields(cls)}

        @functools.wraps(initialize)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                return initialize(self, *args, **kwargs)
            except TypeError:
                unknown = [name for name in kwargs if name not in names]
                if not unknown:
                    raise
            for name in unknown:
                _check_unknown(cls, name, kwargs.pop(name), names, absent)
            return initialize(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def _check_unknown(cls: type, name: str, value: Any, known: set[str], absent: Absent) -> None:
    if name not in absent:
        raise InvalidRequestError(name, f"unknown argument of {cls.__name__}{did_you_mean(name, sorted(known))}")
    reason, neutral = absent[name]
    if value is not None and value not in neutral:
        raise InvalidRequestError(name, reason)
