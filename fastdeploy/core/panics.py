# SPDX-License-Identifier: Apache-2.0
"""Panics of libraries written in Rust, which are not an `Exception` and would pass every handler of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
PANIC = "PanicException"  # every library that PyO3 binds has such a class of its own, which cannot be imported


class RustPanicError(RuntimeError):
    """A library written in Rust has panicked; the panic is the cause."""


def convert_panics(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that calls such a library raise RustPanicError where the library panics."""

    @wraps(function)
    def converting(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise RustPanicError(f"{function.__qualname__}: {error}") from error

    return converting
