# SPDX-License-Identifier: Apache-2.0
"""A panic of a library written in Rust is an ordinary exception, which fails a request and does not end a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.panics import RustPanicError, convert_panics
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.structured_output.grammar import GrammarMemory, GrammarState

GRAMMAR_CALLS: dict[str, Callable[[GrammarState], Any]] = {
    "error": lambda state: state.error,
    "is_accepting": lambda state: state.is_accepting,
    "is_terminated": lambda state: state.is_terminated,
    "advance": lambda state: state.advance(1),
    "fill_bitmask": lambda state: state.fill_bitmask(np.zeros(1, np.int32)),
    "forced_tokens": lambda state: state.forced_tokens(),
}
TOKENIZER_CALLS: dict[str, Callable[[Tokenizer], Any]] = {
    "encode": lambda tokenizer: tokenizer.encode("a"),
    "decode": lambda tokenizer: tokenizer.decode([5]),
    "decode many": lambda tokenizer: tokenizer.decode([5] * 100_000),
}


class PanicException(BaseException):
    """Stands for the class of PyO3, which derives from BaseException, too."""


class PanickingObject:
    """Stands for a matcher or a tokenizer whose every method panics."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def panic(*args: Any, **kwargs: Any) -> Any:
            raise PanicException("called `Option::unwrap()` on a `None` value")

        return panic


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


@pytest.mark.parametrize("name", GRAMMAR_CALLS)
def test_a_panic_of_a_grammar_is_an_exception_of_the_call(name: str) -> None:
    state = GrammarState(PanickingObject(), GrammarMemory())  # type: ignore[arg-type]
    with pytest.raises(RustPanicError, match="Option::unwrap"):
        GRAMMAR_CALLS[name](state)


@pytest.mark.parametrize("name", TOKENIZER_CALLS)
def test_a_panic_of_the_tokenizer_is_an_exception_of_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    monkeypatch.setattr(tokenizer, "_backend", PanickingObject())
    error = InvalidRequestError if name == "encode" else RustPanicError  # a text to encode is the client's
    with pytest.raises(error, match="Option::unwrap"):
        TOKENIZER_CALLS[name](tokenizer)
