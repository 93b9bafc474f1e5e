# SPDX-License-Identifier: Apache-2.0
"""How requests are admitted and how they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.errors import InvalidRequestError, QueueFullError
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.seeds import choice_seed
from fastdeploy.core.step import RequestResult, ScheduledRequest
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from tests.doubles import EOS, VOCAB, ManualClock, OracleProposer, SlotModelRunner, make_engine, plain_text, run


def generation(
    name: str = "a", prompt: list[int] | None = None, timeout_s: float | None = None, **params: Any
) -> GenerationRequest:
    sampling = SamplingParams(**{"seed": 1, "ignore_eos": True, "max_tokens": 8, **params})
    return GenerationRequest(name, [1, 2, 3] if prompt is None else prompt, sampling, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (generation(prompt=[]), "prompt"),
        (generation(prompt=[1] * 64), "prompt"),
        (generation(prompt=[VOCAB]), "prompt"),
        (generation(prompt=[-1]), "prompt"),
        (generation(stop_token_ids=[VOCAB]), "stop_token_ids"),
        (generation(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (generation(bad_words_token_ids=[[1, VOCAB]]), "bad_words_token_ids"),
        (generation(stop=["x"]), "stop"),
    ],
)
def test_invalid_request_is_refused_and_leaves_no_state(request_: GenerationRequest, field: str) -> None:
    engine = make_engine(NaiveProposer())
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(request_)
    assert caught.value.field == field
    assert not engine.has_unfinished()
    assert engine.step() == []


def test_request_id_in_flight_is_refused() -> None:
    engine = make_engine(NaiveProposer())
    engine.add_request(generation("a"))
    with pytest.raises(InvalidRequestError, match="in flight"):
        engine.add_request(generation("a"))


def test_requests_are_refused_if_the_waiting_queue_is_full() -> None:
    engine = make_engine(NaiveProposer(), scheduler=SchedulerConfig(max_waiting_requests=2))
    engine.add_request(generation("a", n=2))
    with pytest.raises(QueueFullError):
        engine.add_request(generation("b"))


def test_expired_request_ends_with_a_timeout_and_frees_its_blocks() -> None:
    clock = ManualClock()
    engine = make_engine(NaiveProposer(), clock=clock)
    engine.add_request(generation("expires", timeout_s=5.0, max_tokens=50))
    engine.add_request(generation("other"))
    engine.step()
    clock.now = 5.0
    (delta,) = [d for d in engine.step() if d.request_id == "expires"]
    assert (delta.finish_reason, delta.error and delta.error.type) == ("error", "timeout")
    engine.check_integrity()
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().num_finished == {"error": 1, "length": 1}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize(
    ("arrived_s", "since_s"),
    [(None, 100.0), (60.0, 60.0), (100.5, 100.0)],
    ids=["unknown", "earlier", "later than now"],
)
def test_times_of_a_request_count_from_its_arrival_and_its_deadline_from_its_admission(
    arrived_s: float | None, since_s: float
) -> None:
    clock = ManualClock()
    clock.now = 100.0
    engine = make_engine(NaiveProposer(), clock=clock)
    engine.add_request(replace(generation("a", max_tokens=50, timeout_s=5.0), arrived_s=arrived_s))
    clock.now = 101.0
    (delta,) = engine.step()
    assert delta.finish_reason is None
    clock.now = 105.0
    (last,) = engine.step()
    metrics = last.metrics
    assert last.error is not None and last.error.type == "timeout" and metrics is not None
    assert (metrics.queue_s, metrics.first_token_s, metrics.finish_s) == (101 - since_s, 101 - since_s, 105 - since_s)


def test_abort_ends_every_choice_at_once() -> None:
    engine = make_engine(NaiveProposer())
    engine.add_request(generation("a", n=3))
    engine.step()
    assert [d.finish_reason for d in engine.abort("a")] == ["abort"] * 3
    assert engine.abort("a") == []
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_each_choice_has_its_own_seed() -> None:
    request = generation("a", n=3, max_tokens=20)
    texts = run(make_engine(NaiveProposer()), [request])
    for index in range(3):
        assert texts["a", index] == plain_text([1, 2, 3], choice_seed(1, index), request.params)


def test_choices_share_the_blocks_of_their_prompt() -> None:
    prompt = [1, 2, 3, 4, 5, 6] * 4
    engine = make_engine(NaiveProposer(), scheduler=SchedulerConfig(max_num_batched_tokens=10))
    texts = run(engine, [generation("a", prompt, n=4)])
    for index in range(4):
        assert texts["a", index] == plain_text(prompt, choice_seed(1, index), generation("a").params)
    assert engine.stats().num_prefix_hit_tokens == 3 * 20  # all full blocks but the one of the last token


class BadRowRunner(SlotModelRunner):
    """Cannot sample the token at output position 5 of the request `bad`."""

    def _verify(self, scheduled: ScheduledRequest) -> RequestResult:
        result, request = super()._verify(scheduled), scheduled.request
        num_good = 5 - request.num_output_tokens
        if request.request_id == "bad" and num_good < len(result.token_ids):
            return RequestResult(result.token_ids[:num_good], num_good, error="the logits of a row hold NaN")
        return result


@pytest.mark.parametrize(
    ("num_drafts", "num_steps", "num_accepted"), [(0, 4, 0), (1, 2, 2), (2, 2, 3), (3, 1, 3), (5, 1, 4), (8, 1, 4)]
)
def test_row_that_cannot_be_sampled_fails_its_own_request_after_the_tokens_before_it(
    num_drafts: int, num_steps: int, num_accepted: int
) -> None:
    good = generation("good")
    text = plain_text([1, 2, 3], 1, good.params)
    proposer = OracleProposer({("good", 0): text, ("bad", 0): text}, corruption=0.0) if num_drafts else NaiveProposer()
    engine = make_engine(proposer, num_speculative_tokens=num_drafts)
    engine.runner = BadRowRunner(64, 4)
    engine.add_request(generation("bad"))
    engine.add_request(good)
    deltas: dict[str, list[TokenDelta]] = {"bad": [], "good": []}
    while engine.has_unfinished():
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    end = deltas["bad"][-1]
    assert (end.token_ids, end.error and end.error.type) == ([], "numerics")
    assert [token for delta in deltas["bad"] for token in delta.token_ids] == text[:5]
    assert [token for delta in deltas["good"] for token in delta.token_ids] == text
    metrics = end.speculate_metrics
    assert metrics is not None
    assert (metrics.num_steps, metrics.accepted_tokens) == (num_steps, num_accepted)
    engine.check_integrity()


@pytest.mark.parametrize("num_drafts", [0, 3, 8])
def test_a_stop_before_a_row_that_cannot_be_sampled_ends_the_request_without_an_error(num_drafts: int) -> None:
    text = plain_text([1, 2, 3], 1, generation().params)
    assert text[4] not in text[:4]
    proposer = OracleProposer({("bad", 0): text}, corruption=0.0) if num_drafts else NaiveProposer()
    engine = make_engine(proposer, num_speculative_tokens=num_drafts)
    engine.runner = BadRowRunner(64, 4)
    request = generation("bad", stop_token_ids=[text[4]])
    engine.add_request(request)
    deltas = []
    while engine.has_unfinished():
        deltas += engine.step()
    assert [token for delta in deltas for token in delta.token_ids] == text[:5]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason, deltas[-1].error) == ("stop", text[4], None)
    engine.check_integrity()


def test_steps_with_and_without_drafts_are_counted_for_unfinished_and_finished_requests() -> None:
    requests = [generation(name, max_tokens=max_tokens) for name, max_tokens in (("a", 9), ("b", 20), ("c", 14))]
    texts = {(r.request_id, 0): plain_text([1, 2, 3], 1, r.params) for r in requests}
    engine = make_engine(OracleProposer(texts, corruption=0.6), num_speculative_tokens=3)
    for request in requests:
        engine.add_request(request)
    counts: dict[str, list[int]] = {}  # by request: the number of tokens of each step
    while engine.has_unfinished():
        for delta in engine.step():
            counts.setdefault(delta.request_id, []).append(len(delta.token_ids))
            if delta.speculate_metrics is not None:
                assert delta.speculate_metrics.num_steps == len(counts[delta.request_id]) - 1
        stats = engine.stats()
        assert stats.num_generated_tokens == sum(map(sum, counts.values()))
        assert stats.num_steps == sum(len(steps) - 1 for steps in counts.values())
        assert stats.num_emitted_tokens == sum(sum(steps[1:]) for steps in counts.values())
    emitted = [count for steps in counts.values() for count in steps[1:]]
    assert min(emitted) == 1 < max(emitted)
    assert 0 < stats.num_drafts < stats.num_steps


def test_tokens_after_a_stop_are_neither_emitted_nor_counted() -> None:
    params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
    text = plain_text([1, 2, 3], 1, params)
    stop = next(t for t in text[3:] if t not in text[:3] and t != EOS)
    num_accepted = text.index(stop)
    engine = make_engine(OracleProposer({("a", 0): text}, corruption=0.0), num_speculative_tokens=16)
    request = GenerationRequest("a", [1, 2, 3], SamplingParams(seed=1, ignore_eos=True, stop_token_ids=[stop]))
    engine.add_request(request)
    deltas = [d for _ in range(3) for d in engine.step()]
    assert [t for d in deltas for t in d.token_ids] == text[: num_accepted + 1]
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    metrics = last.speculate_metrics
    assert metrics is not None
    assert (metrics.num_steps, metrics.accepted_tokens) == (1, num_accepted)  # the prefill emitted the first token
    assert metrics.drafted_tokens == 16
    assert engine.stats().num_generated_tokens == num_accepted + 1


def test_full_context_ends_with_length() -> None:
    engine = make_engine(NaiveProposer(), max_model_len=8)
    engine.add_request(generation("a", max_tokens=None))
    deltas = []
    while engine.has_unfinished():
        deltas += engine.step()
    assert sum(len(d.token_ids) for d in deltas) == 5
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].metrics is not None and deltas[-1].metrics.queue_s == 0.0
