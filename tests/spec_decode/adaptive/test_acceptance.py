# SPDX-License-Identifier: Apache-2.0
"""Acceptance is estimated per source and depth, and scaled per request."""

from __future__ import annotations

import pytest

from fastdeploy.core.request import Draft, GenerationRequest, Request, RequestStatus
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.spec_decode.adaptive.acceptance import INITIAL_RATE, MAX_DEPTH, AcceptanceModel

TEXT, WRONG = [1, 2, 3, 4, 5], [9, 9, 9, 9, 9]


def draft(tokens: list[int], match_len: int = 0, source: str = "ngram") -> Draft:
    return Draft(tokens, source, match_len=match_len)


def make_request(name: str) -> Request:
    return Request(GenerationRequest(name, [7], SamplingParams()), 0, 0, max_total_tokens=2000, max_drafts=5)


A, B = make_request("a"), make_request("b")


def compare(model: AcceptanceModel, *outcomes: tuple[Request, Draft, list[int]]) -> int:
    """Update the model with drafts and the tokens that were emitted at their positions."""
    proposed = []
    for like, proposal, emitted in outcomes:
        request = make_request(like.request_id)
        proposed.append((request, proposal, request.num_tokens))
        request.append(emitted)
    return model.update(proposed)


def test_a_source_without_outcomes_has_the_initial_rate_at_every_depth() -> None:
    assert AcceptanceModel().acceptance(A, draft([1, 2])) == pytest.approx([INITIAL_RATE, INITIAL_RATE**2])
    assert AcceptanceModel().expected_accepted("mtp", 2) == pytest.approx(
        [INITIAL_RATE, INITIAL_RATE + INITIAL_RATE**2]
    )


def test_outcomes_change_the_estimate_of_their_source_only() -> None:
    model = AcceptanceModel()
    for _ in range(50):
        compare(model, (A, draft(TEXT), TEXT), (B, draft(WRONG, source="mtp"), TEXT))
    assert model.expected_accepted("ngram", 1)[0] > 0.9
    assert model.expected_accepted("mtp", 1)[0] < 0.1
    assert model.expected_accepted("suffix", 1) == pytest.approx([INITIAL_RATE])


def test_the_match_length_changes_the_estimate() -> None:
    model = AcceptanceModel()
    for _ in range(50):
        compare(model, (A, draft(TEXT, match_len=12), TEXT), (A, draft(WRONG, match_len=1), TEXT))
    assert model.acceptance(B, draft([1], match_len=12))[0] > 0.85
    assert model.acceptance(B, draft([1], match_len=1))[0] < 0.2
    assert model.acceptance(B, draft([1], MAX_DEPTH)) == model.acceptance(B, draft([1], 10 * MAX_DEPTH))


def test_depths_without_outcomes_have_the_rate_of_the_depth_before() -> None:
    model = AcceptanceModel()
    for _ in range(50):
        compare(model, (A, draft([9]), TEXT))
    assert model.expected_accepted("ngram", 5)[-1] < 0.2


def test_a_draft_is_compared_only_as_far_as_tokens_were_emitted() -> None:
    model = AcceptanceModel()
    compare(model, (A, draft([1, 9, 9]), [1]), (A, draft([1, 2]), []))
    first, second = model.acceptance(B, draft([1, 2]))
    assert second / first == pytest.approx(first) and first > INITIAL_RATE  # the prior of the next depth


def test_probabilities_of_a_request_follow_its_own_rejections() -> None:
    model = AcceptanceModel()
    for _ in range(20):
        compare(model, (A, draft(TEXT), TEXT), (B, draft(WRONG), TEXT))
    assert model.acceptance(A, draft([1]))[0] > 1.3 * model.acceptance(B, draft([1]))[0]


def test_tokens_of_a_joined_draft_count_for_their_own_sources() -> None:
    model = AcceptanceModel()
    joined = Draft([1, 9], "mtp", ("mtp", "ngram"))
    for _ in range(50):
        compare(model, (A, joined, TEXT))
    assert model.expected_accepted("mtp", 1)[0] > 0.9
    assert model.expected_accepted("ngram", 2)[1] < 1.2 * model.expected_accepted("ngram", 1)[0]


def test_emitted_tokens_except_the_last_of_a_step_were_accepted_drafts() -> None:
    model = AcceptanceModel()
    assert compare(model, (A, draft([1, 2, 9]), [1, 2, 3]), (B, draft([9]), [1])) == 2


def test_a_finished_request_has_no_state() -> None:
    model, request = AcceptanceModel(), make_request("finished")
    proposed = [(request, draft([1]), request.num_tokens)]
    request.append([1])
    request.status = RequestStatus.FINISHED
    model.update(proposed)
    assert not model.rejections
    assert model.expected_accepted("ngram", 1)[0] > INITIAL_RATE
