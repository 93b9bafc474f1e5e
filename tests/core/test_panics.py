# SPDX-License-Identifier: Apache-2.0
"""A panic of a library written in Rust becomes an Exception; what ends the process stays as it is."""

from __future__ import annotations

import pytest

from fastdeploy.core.panics import RustPanicError, convert_panics


class PanicException(BaseException):
    """Stands for the class of PyO3, which derives from BaseException, too."""


@convert_panics
def fail(error: BaseException) -> None:
    """Raise `error`."""
    raise error


def test_a_panic_becomes_an_exception_with_the_panic_as_its_cause() -> None:
    panic = PanicException("index out of bounds")
    with pytest.raises(RustPanicError, match=r"^fail: index out of bounds$") as caught:
        fail(panic)
    assert isinstance(caught.value, Exception) and caught.value.__cause__ is panic


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ValueError("text")])
def test_other_exceptions_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert caught.value is error
