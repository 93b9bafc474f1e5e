# SPDX-License-Identifier: Apache-2.0
"""Errors for unknown keyword arguments that name the nearest known one."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, TypeVar

from fastdeploy.core.errors import InvalidRequestError, did_you_mean

Parameters = TypeVar("Parameters", bound=type)


def suggest_keywords(cls: Parameters) -> Parameters:
    """Let a dataclass raise InvalidRequestError for an unknown keyword argument, with the nearest field."""
    initialize = cls.__init__  # type: ignore[misc]
    names = [field.name for field in fields(cls)]

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            initialize(self, *args, **kwargs)
        except TypeError:
            unknown = next((name for name in kwargs if name not in names), None)
            if unknown is None:
                raise
            message = f"unknown argument of {cls.__name__}{did_you_mean(unknown, names)}"
            raise InvalidRequestError(unknown, message) from None

    cls.__init__ = __init__  # type: ignore[misc]
    return cls
