# SPDX-License-Identifier: Apache-2.0
"""Signals whose handlers raise wait until the engine is in order: Ctrl-C at any place leaves nothing in it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.entrypoints import deferred_signals, offline_results, shared_engine
from fastdeploy.entrypoints import llm as llm_module
from fastdeploy.entrypoints.deferred_signals import SIGNALS
from tests.entrypoints.small_llm import assert_empty, load_small_model

FILES = {module.__file__ for module in (deferred_signals, llm_module, offline_results, shared_engine)}
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, speculative={"method": "off"})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_small_model(tmp_path_factory.mktemp("small"))


class Alarm(Exception):
    """What the handlers of these tests raise."""


@contextmanager
def handling(number: signal.Signals, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def raise_alarm(number: int, frame: FrameType | None) -> None:
    raise Alarm(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_is_called_after_the_block_and_then_at_once_again(number: signal.Signals) -> None:
    reached = []
    with handling(number, raise_alarm):
        with pytest.raises(Alarm), deferred_signals.deferred_signals():
            signal.raise_signal(number)
            signal.raise_signal(number)
            reached.append("end of the block")
        assert reached and signal.getsignal(number) is raise_alarm
        with pytest.raises(Alarm):
            signal.raise_signal(number)


def test_blocks_may_be_nested_and_handlers_that_do_not_raise_are_called_for_each_signal() -> None:
    calls: list[int] = []
    with handling(signal.SIGINT, lambda number, frame: calls.append(number)), deferred_signals.deferred_signals():
        with deferred_signals.deferred_signals():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert calls == []
    assert calls == [signal.SIGINT] * 2


def test_signals_without_a_handler_and_other_threads_are_left_alone() -> None:
    found = []

    def look() -> None:
        with deferred_signals.deferred_signals():
            found.append(signal.getsignal(signal.SIGINT))

    with handling(signal.SIGALRM, signal.SIG_IGN), deferred_signals.deferred_signals():  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Raise SIGINT before a line that is executed in one of `FILES`, counted from 0; yield the count of lines."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            count[0] += 1
            if count[0] - 1 == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def complete(llm: LLM) -> None:
    llm.generate(["ab", "abc"], PARAMS, use_tqdm=False)


def drain(llm: LLM) -> None:
    list(llm.generate(["ab", "abc"], PARAMS, stream=True))


def begin_and_close(llm: LLM) -> None:
    updates = llm.generate(["ab", "abc"], PARAMS, stream=True)
    next(updates)  # type: ignore[call-overload]
    updates.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("use", [complete, drain, begin_and_close])
def test_an_interrupt_at_any_line_of_a_call_leaves_no_request(llm: LLM, use: Callable[[LLM], None]) -> None:
    def run(line: int) -> int:
        with interrupted_at(line) as count:
            use(llm)
        return count[0]

    num_lines = run(-1)
    assert num_lines > 100
    for line in range(num_lines):
        with pytest.raises(KeyboardInterrupt):
            run(line)
        assert llm.llm_engine.get_num_unfinished_requests() == 0, line
        llm.engine.check_integrity()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_empty(llm)
