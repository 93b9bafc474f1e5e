# SPDX-License-Identifier: Apache-2.0
"""Several calls of one `LLM` at once: streams beside other calls, threads, calls that are left, failed steps."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from fastdeploy import LLM, InvalidRequestError, RequestOutput, SamplingParams
from fastdeploy.core.errors import DeviceError, DeviceFailedError, EngineDeadError, RequestFailedError
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.metrics.reader import Histogram
from tests.entrypoints.small_llm import assert_empty, load_small_model, replaced

PROMPTS = ("abc", "hello there", [9, 8, 7, 6], "abcabcabcabcabcabc")
Stream = Iterator[RequestOutput]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load_small_model(tmp_path_factory.mktemp("small"))


def params(seed: int = 1, **values: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 20, "ignore_eos": True, **values})


def complete(llm: LLM, prompt: Any, seed: int = 1, **values: Any) -> list[int]:
    (output,) = llm.generate(prompt, params(seed, **values), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    return output.outputs[0].token_ids


def stream(llm: LLM, prompt: Any, seed: int = 1, **values: Any) -> Stream:
    updates = llm.generate(prompt, params(seed, **values), stream=True)
    assert isinstance(updates, Iterator)
    return updates


def last(updates: Stream) -> list[int]:
    (*_, final) = updates
    assert final.finished
    return final.outputs[0].token_ids


def step_then(llm: LLM, action: Callable[[], object], after: int = 0) -> Any:
    """Replace the engine's step by one that calls `action`, in each step after the first ones."""
    step, numbers = llm.engine.step, itertools.count()

    def stepped() -> list[TokenDelta]:
        if next(numbers) >= after:
            action()
        return step()

    return replaced(llm.engine, "step", stepped)


def test_a_stream_beside_a_complete_call_loses_no_token(llm: LLM) -> None:
    alone = [complete(llm, prompt) for prompt in PROMPTS[:2]]
    updates = stream(llm, PROMPTS[0])
    first = next(updates)
    assert complete(llm, PROMPTS[1]) == alone[1]
    assert last(updates) == alone[0] and first.outputs[0].token_ids == alone[0]


def test_streams_by_turns_have_the_tokens_of_each_alone(llm: LLM) -> None:
    alone = [complete(llm, prompt) for prompt in PROMPTS]
    finals: list[RequestOutput | None] = [None] * len(PROMPTS)
    streams = [stream(llm, prompt) for prompt in PROMPTS]
    for turn in itertools.zip_longest(*streams):
        finals = [update or before for update, before in zip(turn, finals)]
    assert [final and final.outputs[0].token_ids for final in finals] == alone
    assert_empty(llm)


def test_a_result_changes_only_when_its_stream_is_asked_for_more(llm: LLM) -> None:
    updates = stream(llm, "abc", max_tokens=5)
    output = next(updates)
    before = list(output.outputs[0].token_ids)
    complete(llm, "hello there")
    assert (output.outputs[0].token_ids, output.finished) == (before, False)
    assert [update.finished for update in updates] == [True]


def test_requests_are_checked_at_the_call_and_begun_at_the_first_next(llm: LLM) -> None:
    for wrong in ({"prompt": [10**6]}, {"prompt": "a", "structured_outputs": {"regex": "("}}):
        with pytest.raises(InvalidRequestError):
            stream(llm, **wrong)
    updates = stream(llm, "abc")
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    next(updates)
    assert llm.llm_engine.get_num_unfinished_requests() == 1
    assert llm.llm_engine.has_unfinished_requests()
    del updates
    assert_empty(llm)


@pytest.mark.parametrize("way", ["closed", "dropped", "never begun", "dropped in a cycle", "dropped in another thread"])
def test_a_stream_that_is_left_leaves_nothing_in_the_engine(llm: LLM, way: str) -> None:
    streams = [stream(llm, ["abc", "hello"])]
    if way != "never begun":
        for _ in streams[0]:
            break
        assert llm.llm_engine.get_num_unfinished_requests() == 2
    if way == "closed":
        streams[0].close()  # type: ignore[attr-defined]
    elif way == "dropped in a cycle":
        streams.append(streams)  # type: ignore[arg-type]
        del streams
        gc.collect()
    elif way == "dropped in another thread":
        thread = threading.Thread(target=streams.clear)
        thread.start()
        thread.join()
    else:
        streams.clear()
    assert not llm.engine.has_unfinished()
    assert_empty(llm)


def test_a_stream_may_be_dropped_within_the_step_of_another_call(llm: LLM) -> None:
    alone = complete(llm, "hello")
    streams = [stream(llm, "abc", max_tokens=40)]
    next(streams[0])
    with step_then(llm, streams.clear, after=1):
        assert complete(llm, "hello") == alone
    assert streams == []
    assert_empty(llm)


def test_a_stream_that_is_dropped_while_metrics_are_read_is_aborted_after_that(llm: LLM) -> None:
    streams = [stream(llm, "abc", max_tokens=40)]
    next(streams[0])
    read = llm.engine.proposer.suffix_cache_stats

    def drop() -> SuffixCacheStats | None:
        streams.clear()
        return read()

    with replaced(llm.engine.proposer, "suffix_cache_stats", drop):
        llm.get_metrics()
    assert streams == [] and not llm.engine.has_unfinished()
    assert_empty(llm)


def test_an_exception_while_requests_are_added_leaves_none(llm: LLM) -> None:
    held = stream(llm, "abc", max_tokens=40)
    next(held)
    add, numbers = llm.engine.add_request, itertools.count()

    def add_some(request: Any) -> list[TokenDelta]:
        deltas = add(request)
        if next(numbers) == 1:
            raise KeyboardInterrupt
        return deltas

    with replaced(llm.engine, "add_request", add_some), pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], params(), use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 1
    assert last(held) == complete(llm, "abc", max_tokens=40)
    assert_empty(llm)


def test_ctrl_c_while_requests_are_added_leaves_none_when_it_is_handled(llm: LLM) -> None:
    add = llm.engine.add_request

    def add_and_interrupt(request: Any) -> list[TokenDelta]:
        signal.raise_signal(signal.SIGINT)
        return add(request)

    with replaced(llm.engine, "add_request", add_and_interrupt):
        for is_stream in (False, True):
            try:
                list(llm.generate(["a", "b"], params(), use_tqdm=False, stream=is_stream))
            except KeyboardInterrupt:
                assert_empty(llm)
            else:
                pytest.fail("no interrupt")


def test_ends_that_adding_a_request_returns_are_its_results(llm: LLM) -> None:
    add = llm.engine.add_request

    def add_and_end(request: Any) -> list[TokenDelta]:
        return add(request) + llm.engine.abort(request.request_id)

    with replaced(llm.engine, "add_request", add_and_end):
        (output,) = llm.generate("abc", params(), use_tqdm=False)
    assert isinstance(output, RequestOutput) and output.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("where", ["before the step", "after the step"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_of_a_step_reaches_every_call_with_requests(
    llm: LLM, kind: type[BaseException], where: str
) -> None:
    alone = complete(llm, "hello")
    held, ended, idle = stream(llm, "abc"), stream(llm, "ab", max_tokens=1), stream(llm, "hello")
    next(held)
    next(ended)
    step = llm.engine.step

    def fail() -> list[TokenDelta]:
        if where == "after the step":
            step()
        raise kind("a fault")

    with replaced(llm.engine, "step", fail), pytest.raises(kind, match="a fault"):
        complete(llm, "hello")
    assert list(ended) == []  # it had ended before
    reached, message = (kind, "a fault") if kind is ValueError else (RequestFailedError, "a step was interrupted")
    with pytest.raises(reached, match=message) as raised:
        next(held)
    assert (raised.value.__cause__ is None) == (kind is ValueError)
    assert list(held) == []
    assert last(idle) == alone  # it had not begun
    assert_empty(llm)


def test_an_engine_that_cannot_be_used_after_a_failed_step_says_so(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    broken, lost = map(load_small_model, folders)

    def leak() -> None:
        broken.engine.scheduler.kv_cache_manager.pool.allocate(1)
        raise ValueError("a fault")

    def lose() -> None:
        raise DeviceError("no such device")

    for llm, fault, kind in ((broken, leak, ValueError), (lost, lose, DeviceFailedError)):
        held = stream(llm, "abc")
        next(held)
        for updates in (stream(llm, "hello"), held):
            with step_then(llm, fault), pytest.raises(kind):
                next(updates)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"^the engine has failed and cannot be used again; create a new"):
                complete(llm, "abc")
        assert llm.llm_engine.get_num_unfinished_requests() == 0
        assert llm.get_metrics()


def test_requests_that_are_aborted_end_and_no_idle_engine_is_stepped(llm: LLM) -> None:
    updates = stream(llm, "abc", max_tokens=40)
    request_id = next(updates).request_id
    llm.llm_engine.abort_request([request_id, "unknown"])
    (final,) = updates
    assert (final.finished, final.outputs[0].finish_reason) == (True, "abort")
    updates = stream(llm, "abc", max_tokens=40)
    llm.engine.abort(next(updates).request_id)
    with pytest.raises(RequestFailedError, match="told to abort"):
        next(updates)
    assert_empty(llm)


def test_what_llm_engine_lacks_is_an_error_that_names_what_it_has(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"llm_engine.step does not exist: llm_engine has get_num_unfinished"):
        llm.llm_engine.step()
    assert not hasattr(llm.llm_engine, "model_config")


def test_threads_have_the_results_of_each_call_alone_in_common_steps(llm: LLM) -> None:
    prompts = [PROMPTS[i % 4] for i in range(12)]
    alone = [complete(llm, prompt, i) for i, prompt in enumerate(prompts)]
    sizes = []
    with step_then(llm, lambda: sizes.append(len(llm.engine.scheduler.running))), ThreadPoolExecutor(4) as threads:
        together = list(threads.map(partial(complete, llm), prompts, range(12)))
    assert together == alone
    assert max(sizes) > 1
    assert_empty(llm)


def test_a_thread_that_waits_gets_its_turn_after_the_step_of_another(llm: LLM) -> None:
    end_s = time.monotonic() + 10

    def wait_for_another_thread() -> None:
        while len(llm._shared._in_flight) == 2 and not llm._shared._turn.locked() and time.monotonic() < end_s:
            time.sleep(0)

    def num_updates(prompt: str) -> int:
        return sum(1 for _ in stream(llm, prompt, max_tokens=40, speculative={"method": "off"}))

    with step_then(llm, wait_for_another_thread), ThreadPoolExecutor(2) as threads:
        assert min(threads.map(num_updates, ["abc", "hello"])) >= 38, "some updates have the tokens of several steps"


def test_a_stream_may_be_read_from_other_threads_one_after_the_other(llm: LLM) -> None:
    alone = complete(llm, "abc"), complete(llm, "hello")

    async def drain(updates: Stream) -> list[int]:
        token_ids: list[int] = []
        while (update := await asyncio.to_thread(next, updates, None)) is not None:
            token_ids = update.outputs[0].token_ids
        return token_ids

    async def both() -> list[list[int]]:
        return await asyncio.gather(drain(stream(llm, "abc")), drain(stream(llm, "hello")))

    assert tuple(asyncio.run(both())) == alone


def test_a_progress_bar_counts_the_tokens_of_its_own_call(llm: LLM) -> None:
    shown = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            shown.append(float(s.split()[0]) * self.format_dict["elapsed"])

    updates = stream(llm, ["abc"] * 8, max_tokens=40)
    next(updates)
    llm.generate("hello", params(max_tokens=30), use_tqdm=partial(Bar, file=io.StringIO()))
    assert shown == [pytest.approx(30, rel=0.5)]  # the time is read twice
    del updates


def test_a_request_that_ends_while_nobody_reads_its_stream_is_counted_then(llm: LLM) -> None:
    def num_ended() -> int:
        named = {metric.name: metric for metric in llm.get_metrics()}
        ended = named["fastdeploy:request_generation_tokens"]
        assert isinstance(ended, Histogram)
        return ended.count

    before = num_ended()
    updates = stream(llm, "abc", max_tokens=5)
    next(updates)
    complete(llm, "hello", max_tokens=30)
    assert num_ended() == before + 2
    assert len(last(updates)) == 5
    assert num_ended() == before + 2
