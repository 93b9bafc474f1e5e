# SPDX-License-Identifier: Apache-2.0
"""A panic inside llguidance is an ordinary exception of the call, which fails the request and not the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastdeploy.core.panics import RustPanicError
from fastdeploy.structured_output.grammar import GrammarMemory, GrammarState

CALLS: dict[str, Callable[[GrammarState], Any]] = {
    "error": lambda state: state.error,
    "is_accepting": lambda state: state.is_accepting,
    "is_terminated": lambda state: state.is_terminated,
    "advance": lambda state: state.advance(1),
    "fill_bitmask": lambda state: state.fill_bitmask(np.zeros(1, np.int32)),
    "forced_tokens": lambda state: state.forced_tokens(),
}


class PanicException(BaseException):
    """Stands for the class of PyO3."""


class PanickingMatcher:
    """A matcher of llguidance whose every method panics."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def panic(*args: Any) -> Any:
            raise PanicException("called `Option::unwrap()` on a `None` value")

        return panic


@pytest.mark.parametrize("name", CALLS)
def test_a_panic_is_an_exception_of_the_call(name: str) -> None:
    state = GrammarState(PanickingMatcher(), GrammarMemory())  # type: ignore[arg-type]
    with pytest.raises(RustPanicError, match="Option::unwrap"):
        CALLS[name](state)
