# SPDX-License-Identifier: Apache-2.0
"""What the manager does with forms: trials in turn, remembered results, memory; the trials here are scripted."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError, QueueFullError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.structured_output.constraint import OutputConstraint
from fastdeploy.structured_output.form_compiler import MAX_CACHED_FORMS, MAX_HELD_BYTES
from fastdeploy.structured_output.manager import StructuredOutputManager
from fastdeploy.structured_output.source import make_source
from fastdeploy.structured_output.trial_process import TrialError, TrialProcess, TrialTimeoutError, Verdict
from fastdeploy.structured_output.vocabulary import Vocabulary
from tests.detokenize.tokenizers_for_tests import make_tokenizer

WAIT_S = 60


class Trials:
    """Answers for the trials of regular expressions, by their text; those in `blocked` wait for `unblock`."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.answers: dict[str, Verdict | Exception] = {}
        self.blocked: set[str] = set()
        self.unblock = threading.Semaphore(0)

    def run(self, vocabulary: Vocabulary, spec: GuidedDecodingParams) -> Verdict:
        text = spec.regex or ""
        self.tried.append(text)
        if text in self.blocked:
            assert self.unblock.acquire(timeout=WAIT_S)
        answer = self.answers.get(text, Verdict(source=make_source(spec, {})))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait_for(self, count: int) -> None:
        """Wait until this many forms have been tried or are being tried."""
        deadline_s = time.monotonic() + WAIT_S
        while len(self.tried) < count:
            assert time.monotonic() < deadline_s, self.tried
            time.sleep(0.001)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    scripted = Trials()
    monkeypatch.setattr(TrialProcess, "run", lambda self, vocabulary, spec: scripted.run(vocabulary, spec))
    yield scripted
    scripted.unblock.release(1000)


@pytest.fixture
def manager(trials: Trials) -> StructuredOutputManager:
    tokenizer = make_tokenizer("byte_level")
    return StructuredOutputManager(tokenizer, tokenizer.vocab_size, [1], None)


def request(regex: str, client_id: str = "a", **spec: Any) -> GenerationRequest:
    guided = GuidedDecodingParams(regex=regex, **spec)
    return GenerationRequest(regex, [1], SamplingParams(guided_decoding=guided), client_id=client_id)


def prepare(manager: StructuredOutputManager, regex: str, client_id: str = "a") -> Future[None]:
    waiter = manager.prepare(request(regex, client_id))
    assert waiter is not None
    return waiter


def constraint(manager: StructuredOutputManager, regex: str, client_id: str = "a") -> OutputConstraint:
    (automaton,) = manager.make_constraints(request(regex, client_id))
    assert automaton is not None
    return automaton


def refusal(manager: StructuredOutputManager, regex: str, **spec: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        manager.make_constraints(request(regex, **spec))
    return caught.value


def test_many_forms_of_one_client_delay_a_form_of_another_by_one_trial(
    manager: StructuredOutputManager, trials: Trials
) -> None:
    names = [f"a{i}" for i in range(20)]
    trials.blocked = set(names)
    waiters = [prepare(manager, name) for name in names]
    trials.wait_for(2)  # one in each process
    other = prepare(manager, "b", client_id="b")
    trials.unblock.release(2)
    other.result(WAIT_S)
    assert set(trials.tried[:2]) == {"a0", "a1"}
    assert "b" in trials.tried[2:4]
    assert not waiters[-1].done()


def test_a_form_of_aborted_requests_is_not_tried(manager: StructuredOutputManager, trials: Trials) -> None:
    trials.blocked = {"a0", "a1"}
    running = [prepare(manager, "a0"), prepare(manager, "a1")]
    trials.wait_for(2)
    aborted, kept = prepare(manager, "aborted"), prepare(manager, "kept")
    both = [prepare(manager, "both"), prepare(manager, "both", client_id="b")]
    del aborted, both[0]
    trials.unblock.release(2)
    for waiter in (*running, kept, *both):
        waiter.result(WAIT_S)
    assert sorted(trials.tried) == ["a0", "a1", "both", "kept"]


def test_a_failure_is_remembered_by_form_and_raised_as_a_new_error_with_the_field_of_each_request(
    manager: StructuredOutputManager, trials: Trials
) -> None:
    trials.answers["bad"] = Verdict(path=".part", message="takes too long")
    first, second = refusal(manager, "bad"), refusal(manager, "bad", source="response_format")
    assert str(first) == "guided_regex.part: takes too long"
    assert str(second) == "response_format.part: takes too long"
    assert first is not second
    assert trials.tried == ["bad"]


def test_what_the_library_refuses_after_the_trial_is_remembered_too(
    manager: StructuredOutputManager, trials: Trials
) -> None:
    assert "unclosed group" in refusal(manager, "(").message
    assert "unclosed group" in refusal(manager, "(").message
    assert trials.tried == ["("]


@pytest.mark.parametrize(
    ("failure", "expected"), [(TrialError("died"), TrialError), (TrialTimeoutError("busy"), QueueFullError)]
)
def test_a_failure_that_says_nothing_about_the_form_is_not_remembered(
    manager: StructuredOutputManager, trials: Trials, failure: Exception, expected: type[Exception]
) -> None:
    trials.answers["x"] = failure
    waiter = prepare(manager, "x")
    waiter.result(WAIT_S)
    with pytest.raises(expected):  # without another trial, which would delay the steps of the engine
        manager.make_constraints(request("x"))
    del trials.answers["x"], waiter
    assert constraint(manager, "x")
    assert trials.tried == ["x", "x"]


def test_more_waiting_forms_than_the_limit_are_refused_for_their_client_only(
    manager: StructuredOutputManager, trials: Trials
) -> None:
    trials.blocked = {"a0", "a1"}
    waiters = [prepare(manager, name) for name in ("a0", "a1")]
    trials.wait_for(2)
    waiters += [prepare(manager, f"b{i}") for i in range(64)]
    with pytest.raises(QueueFullError):
        prepare(manager, "one more")
    waiters.append(prepare(manager, "b", client_id="b"))
    trials.unblock.release(2)
    for waiter in waiters:
        waiter.result(WAIT_S)


def test_a_form_stays_until_its_request_has_its_constraint(manager: StructuredOutputManager, trials: Trials) -> None:
    waiter = prepare(manager, "first")
    waiter.result(WAIT_S)
    for i in range(2 * MAX_CACHED_FORMS):
        constraint(manager, f"x{i}")
    constraint(manager, "first")
    assert trials.tried.count("first") == 1


def test_forms_of_a_client_with_many_do_not_displace_those_of_another(
    manager: StructuredOutputManager, trials: Trials
) -> None:
    constraint(manager, "mine", client_id="b")
    for i in range(2 * MAX_CACHED_FORMS):
        constraint(manager, f"x{i}")
    constraint(manager, "mine", client_id="b")
    constraint(manager, "x0")
    assert trials.tried.count("mine") == 1
    assert trials.tried.count("x0") == 2


def test_grammars_of_a_clients_requests_hold_a_limited_amount_of_memory(
    manager: StructuredOutputManager, trials: Trials
) -> None:
    for i in range(6):
        verdict = Verdict(source=make_source(GuidedDecodingParams(regex=f"x{i}"), {}), num_bytes=MAX_HELD_BYTES // 3)
        trials.answers[f"x{i}"] = verdict
    held = [constraint(manager, f"x{i}") for i in range(3)]
    for automaton in held:
        automaton.accept_token(make_tokenizer("byte_level").encode("x", add_special_tokens=False)[0])
    with pytest.raises(QueueFullError, match="hold 1024 MiB"):
        constraint(manager, "x3")
    assert constraint(manager, "x4", client_id="b")
    held.clear()
    gc.collect()
    assert constraint(manager, "x5")  # what is only in the cache makes room


def test_processes_and_threads_end_with_the_manager(manager: StructuredOutputManager, trials: Trials) -> None:
    waiters = [prepare(manager, name) for name in ("a0", "a1", "a2")]
    for waiter in waiters:
        waiter.result(WAIT_S)
    assert manager._compiler is not None
    threads = list(manager._compiler._threads)
    manager._compiler.close()
    assert not any(thread.is_alive() for thread in threads)
