# SPDX-License-Identifier: Apache-2.0
"""A fault in the handling of one request of a batch fails that request; the others emit their plain texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fastdeploy.core.faults import POINTS, InjectedFault
from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine.engine import INTERNAL_ERROR
from tests.exactness.disturbed import REFUSED, WAYS, engine_of, is_beginning, pool, run_disturbed
from tests.exactness.engines import MODELS
from tests.exactness.requests import Text
from tests.fault_points import API_POINTS, BATCH_POINTS, CLUSTER_POINTS, armed

AT_ADMISSION = ("prepare", "admit", "compile", "output_start", "proposer_start")
OF_CONSTRAINTS = ("compile", "constraint_mask", "constraint_advance", "constraint_draft")
TOO_SHORT = ("at_once", "length")  # to be drafted for
IN_ENGINE = [point for point in POINTS if point not in (*API_POINTS, *BATCH_POINTS, *CLUSTER_POINTS)]


@dataclass
class Member:
    """A batch of requests, and a fault for one of them at a point that it reaches.

    Attributes:
        point: "propose" and "observe" are for the whole batch.
        num_skipped: how often the request passes the point before.
    """

    method: str
    requests: Sequence[GenerationRequest]
    point: str
    victim: GenerationRequest
    num_skipped: int = 0

    @classmethod
    def random(cls, seed: int, method: str = "", point: str = "", num_requests: int = 0) -> Member:
        """Return the member of a seed, with a method, point and number of requests that are random if not given."""
        random = np.random.default_rng(seed)
        method = method or str(random.choice(list(WAYS)))
        points = [*IN_ENGINE, "propose", *(["observe"] if method in MODELS else [])]
        point = point or str(random.choice(points))
        count, requests = num_requests or int(random.integers(2, 17)), pool()[0]
        batch = [requests[i] for i in random.permutation(len(requests))]
        victim = next(request for request in batch if reaches(request, point))
        batch = [victim, *(request for request in batch if request is not victim)][:count]
        if point == "compile":
            victim = batch[0] = with_new_form(victim, f"{method}{seed}")
        is_early = point in AT_ADMISSION or num_requests
        batch = [batch[i] for i in random.permutation(count)]
        return cls(method, batch, point, victim, 0 if is_early else int(random.integers(12)))


def reaches(request: GenerationRequest, point: str) -> bool:
    """Return whether a request reaches a point."""
    params = request.params
    if point in OF_CONSTRAINTS:
        return params.guided_decoding is not None and request.request_id not in TOO_SHORT
    return point != "logprobs" or params.logprobs is not None or params.prompt_logprobs is not None


def with_new_form(request: GenerationRequest, text: str) -> GenerationRequest:
    """Return a request whose grammar has not been compiled yet and matches the same texts."""
    guided = request.params.guided_decoding
    assert guided is not None
    guided = replace(guided, regex=f"{guided.regex}({text}){{0}}")
    return replace(request, params=replace(request.params, guided_decoding=guided))


def is_whole(text: Text, plain: Text, is_of_victim: bool) -> bool:
    """Return whether a text is plain decoding's; another choice may carry the prompt's logprobs of one that failed."""
    if is_of_victim:
        text, plain = replace(text, prompt_logprobs=None), replace(plain, prompt_logprobs=None)
    return text == plain


def check(member: Member, caplog: pytest.LogCaptureFixture) -> bool:
    """Run a member and assert that its fault fails its request alone; return whether it was raised."""
    plain, victim, is_of_batch = pool()[1], member.victim.request_id, member.point in BATCH_POINTS
    engine, _ = engine_of(member.method)
    caplog.clear()
    with armed(member.point, "" if is_of_batch else victim, member.num_skipped) as fault:
        texts = run_disturbed(engine, member.requests)
    names = {request.request_id for request in member.requests}
    assert texts.keys() == {key for key in plain if key[0] in names}
    failed = {key: text for key, text in texts.items() if not is_whole(text, plain[key], key[0] == victim)}
    assert caplog.text.count(f"{InjectedFault.__name__}: FD_FAULT: {member.point}") == fault.has_fired
    if not fault.has_fired or is_of_batch:
        assert not failed
        return fault.has_fired
    assert f"request {victim} failed" in caplog.text
    assert len(failed) == (member.victim.params.n if member.point in AT_ADMISSION else 1)
    for key, text in failed.items():
        assert key[0] == victim and text.error == INTERNAL_ERROR
        assert (text.finish_reason, text.stop_reason) == ("error", None)
        assert text == REFUSED if member.point in AT_ADMISSION else is_beginning(text, plain[key])
    return True


@pytest.mark.parametrize("point", IN_ENGINE)
def test_each_point_fails_one_request_of_sixteen(point: str, caplog: pytest.LogCaptureFixture) -> None:
    assert check(Member.random(1, "with_ngram", point, 16), caplog)


def test_a_grammar_that_failed_to_compile_is_compiled_again_for_the_next_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    member = Member.random(4, "with_ngram", "compile", 2)
    assert check(member, caplog)
    key = (member.victim.request_id, 0)
    assert run_disturbed(engine_of(member.method)[0], [member.victim])[key] == pool()[1][key]


@pytest.mark.parametrize("method", [method for method in WAYS if method != "naive"])
def test_a_fault_of_the_proposer_drops_the_drafts_of_a_step(method: str, caplog: pytest.LogCaptureFixture) -> None:
    assert check(Member.random(2, method, "propose", 16), caplog)
    assert "the proposer failed; this step has no drafts" in caplog.text


@pytest.mark.parametrize("method", MODELS)
def test_a_fault_of_the_drafting_model_drops_the_drafts_of_a_step(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert check(Member.random(3, method, "observe", 16), caplog)
    assert "the drafting model failed; this step has no drafts" in caplog.text


def test_a_fault_fails_its_request_alone_wherever_it_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    raised = [check(Member.random(seed), caplog) for seed in range(40)]
    assert sum(raised) > 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_fault_fails_its_request_alone_for_a_thousand_members(caplog: pytest.LogCaptureFixture) -> None:
    raised = [check(Member.random(1000 + seed), caplog) for seed in range(1000)]
    assert sum(raised) > 500
