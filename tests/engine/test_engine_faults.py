# SPDX-License-Identifier: Apache-2.0
"""An exception in the handling of one request ends that request with an internal error, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig
from fastdeploy.config.speculative_config import NgramConfig
from fastdeploy.core.constraint import TokenArray, TokenConstraint
from fastdeploy.core.errors import RequestFailedError
from fastdeploy.core.outputs import ErrorInfo, TokenDelta
from fastdeploy.core.request import GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from tests.doubles import ManualClock, OracleProposer, make_engine, plain_text
from tests.fault_points import armed

PARAMS = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
TEXT = plain_text([1, 2, 3], 1, PARAMS)


class FreeConstraint(TokenConstraint):
    """Allows everything."""

    error = ""

    def num_valid_tokens(self, draft: Sequence[int]) -> int:
        return len(draft)

    def forced_tokens(self, limit: int) -> list[int]:
        return []

    def fill_bitmasks(self, draft: Sequence[int], bitmasks: TokenArray) -> list[bool]:
        return [False] * (1 + len(draft))

    def accept_token(self, token_id: int) -> str | None:
        return None


def fail(*args: Any) -> Any:
    raise TypeError("a fault")


def generation(name: str, timeout_s: float | None = None, n: int = 1) -> GenerationRequest:
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True, n=n)
    return GenerationRequest(name, [1, 2, 3], params, timeout_s=timeout_s)


def engine_with_drafts(corruption: float = 0.3, clock: ManualClock | None = None) -> Engine:
    texts = {(name, 0): TEXT for name in ("bad", "good", "later")}
    return make_engine(OracleProposer(texts, corruption), num_speculative_tokens=3, clock=clock)


def find(engine: Engine, name: str) -> Request:
    return next(r for r in (*engine.scheduler.waiting, *engine.scheduler.running) if r.request_id == name)


def finish(engine: Engine) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    while engine.has_unfinished():
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def check_bad_failed_alone(
    engine: Engine, deltas: dict[str, list[TokenDelta]], caplog: pytest.LogCaptureFixture
) -> None:
    """Assert that `bad` ended with an internal error and `good` normally, and that new requests run."""
    end = deltas["bad"][-1]
    assert end.finish_reason == "error" and end.stop_reason is None
    assert end.error is not None and (end.error.type, end.error.message) == ("internal_error", "internal error")
    assert end.metrics is not None and end.speculate_metrics is not None
    assert [token for delta in deltas["good"] for token in delta.token_ids] == TEXT
    assert "request bad failed" in caplog.text
    assert "InjectedFault: FD_FAULT" in caplog.text and "Traceback" in caplog.text
    assert engine.stats().num_finished == {"error": 1, "length": 1}
    engine.check_integrity()
    engine.add_request(generation("later"))
    assert [token for delta in finish(engine)["later"] for token in delta.token_ids] == TEXT
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("num_skipped", [0, 2])
@pytest.mark.parametrize("point", ["stop_scan", "constraint_advance", "commit", "delta", "constraint_draft", "finish"])
def test_a_fault_fails_its_own_request(point: str, num_skipped: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with_drafts()
    for name in ("bad", "good"):
        engine.add_request(generation(name))
        find(engine, name).constraint = FreeConstraint()
    with armed(point, "bad", num_skipped):
        check_bad_failed_alone(engine, finish(engine), caplog)


def fail_for_bad(call: Callable[[Request], None]) -> Callable[[Request], None]:
    """Return a function that raises if it is called for the request `bad`, and else calls `call`."""
    return lambda request: fail() if request.request_id == "bad" else call(request)


def test_a_component_that_keeps_state_of_an_ended_request_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_drafts()
    monkeypatch.setattr(engine.proposer, "finish", fail_for_bad(engine.proposer.finish))
    engine.add_request(generation("bad"))
    with pytest.raises(AssertionError):
        finish(engine)


def test_an_exception_at_abort_or_timeout_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    engine = engine_with_drafts(clock=clock)
    for name in ("bad", "good"):
        engine.add_request(generation(name, timeout_s=5.0))
        engine.step()
    monkeypatch.setattr(engine.outputs, "end", fail)
    (aborted,) = engine.abort("good")
    clock.now = 5.0
    (expired,) = engine.step()
    for delta in (aborted, expired):
        assert delta.error is not None and delta.error.type == "internal_error"
    assert not engine.has_unfinished()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("point", "num_skipped"), [("prepare", 0), ("admit", 0), ("output_start", 1), ("proposer_start", 1)]
)
def test_a_fault_at_admission_refuses_the_request_and_leaves_no_state(
    point: str, num_skipped: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with_drafts()
    engine.add_request(generation("good"))
    with armed(point, "bad", num_skipped), pytest.raises(RequestFailedError, match="internal error"):
        engine.prepare(generation("bad", n=3))
        engine.add_request(generation("bad", n=3))
    assert "request bad failed" in caplog.text and "InjectedFault: FD_FAULT" in caplog.text
    engine.check_integrity()
    assert engine.abort("bad") == []
    assert [token for delta in finish(engine)["good"] for token in delta.token_ids] == TEXT


def test_a_request_whose_buffer_cannot_be_allocated_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(NaiveProposer())
    engine.admission.max_model_len = 1 << 50  # tokens, which do not fit into the address space
    engine.add_request(generation("good"))
    engine.add_request(GenerationRequest("bad", [1, 2, 3], SamplingParams()))
    deltas = finish(engine)
    assert [delta.error for delta in deltas["bad"]] == [ErrorInfo("internal_error", "internal error")]
    assert "MemoryError" in caplog.text
    assert [token for delta in deltas["good"] for token in delta.token_ids] == TEXT
    engine.check_integrity()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_no_error_of_a_request(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with_drafts()
    for place in ("outputs.truncate_at_stop", "proposer.propose", "admission.admit"):
        component, _, name = place.partition(".")
        monkeypatch.setattr(getattr(engine, component), name, Mock(side_effect=error))
        with pytest.raises(error):
            engine.add_request(generation("good"))
            finish(engine)
        monkeypatch.undo()
        engine.abort("good")


def test_a_proposer_that_cannot_restart_a_request_fails_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with_drafts()
    monkeypatch.setattr(engine.proposer, "restart", fail_for_bad(engine.proposer.restart))
    for name in ("bad", "good"):
        engine.add_request(generation(name))
    with armed("propose"):
        check_bad_failed_alone(engine, finish(engine), caplog)


@pytest.mark.parametrize("accept_policy", ["normal", "reject_all"])
def test_a_constraint_whose_masks_raise_fails_its_own_request(
    accept_policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    speculative = NgramConfig(num_speculative_tokens=3, adaptive=False, accept_policy=accept_policy)
    engine = Engine.from_config(
        EngineConfig(model="demo", max_model_len=64, cache=CacheConfig(num_blocks=8), speculative=speculative)
    )

    def start(name: str) -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=1, repetition_penalty=1.1)
        engine.add_request(GenerationRequest(name, [5, 6, 7, 5, 6, 7, 5, 6], params))

    start("alone")
    alone = [token for delta in finish(engine)["alone"] for token in delta.token_ids]
    for name in ("bad", "good"):
        start(name)
    find(engine, "bad").constraint = FreeConstraint()
    with armed("constraint_mask", "bad", num_skipped=4):
        deltas = finish(engine)
    texts = {name: [token for delta in of_name for token in delta.token_ids] for name, of_name in deltas.items()}
    assert texts["good"] == alone
    assert 4 <= len(texts["bad"]) < 20 and texts["bad"] == alone[: len(texts["bad"])]
    assert deltas["bad"][-1].error is not None and deltas["bad"][-1].error.type == "internal_error"
    assert "InjectedFault: FD_FAULT: constraint_mask" in caplog.text
    engine.check_integrity()
