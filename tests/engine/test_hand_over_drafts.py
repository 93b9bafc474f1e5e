# SPDX-License-Identifier: Apache-2.0
"""After a hand-over, a drafting model drafts as on one engine, from the first decoded step on."""

from __future__ import annotations

import random

import pytest

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.batch_scheduler import MIN_PREFILL_ROWS
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_kv_transfer
from fastdeploy.hub.model_path import resolve_model_path
from tests.engine.hand_over import DIGESTS, Deltas, Pair, make_pair, run_moving
from tests.exactness.engines import Texts, build, config, fix_step_times
from tests.exactness.requests import make_requests, prompts_of_lengths, run_alone

Steps = dict[tuple[str, int], list[tuple[int, int]]]


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_requests(Tokenizer.from_pretrained(resolve_model_path("demo")), build(config()))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    return run_alone(build(config()), requests)


def test_a_request_drafts_with_mtp_only_if_the_states_arrive(requests: list[GenerationRequest], plain: Texts) -> None:
    accepted = {}
    for name, digests in {"equal": DIGESTS, "another": {**DIGESTS, "states": "another"}}.items():
        pair = make_pair(plain, "mtp", "mtp", caches_prefixes=False)
        pair.second.transfer = make_kv_transfer(pair.second, 1, digests)
        pair.importing.attach("first", pair.exporting.arena)
        for request in requests:
            pair.add(request)
        assert pair.texts() == plain
        assert pair.importing.num_imported_blocks > 0
        accepted[name] = pair.second.stats().num_accepted_tokens
    assert accepted["equal"] > 0 == accepted["another"]


@pytest.mark.parametrize(
    ("prefill", "decode", "drafts"),
    [
        ("eagle3", "eagle", False),
        ("mtp", "eagle3", False),
        ("naive", "eagle", False),
        ("eagle3", "mlp_speculator", True),
        ("medusa", "naive", False),
    ],
)
def test_engines_with_unlike_heads_exchange_the_target_s_blocks(
    requests: list[GenerationRequest], plain: Texts, prefill: str, decode: str, drafts: bool
) -> None:
    pair = make_pair(plain, prefill, decode, caches_prefixes=False)
    layouts = {"target": DIGESTS["target"], "drafting": "of another head", "states": "of another head"}
    pair.second.transfer = make_kv_transfer(pair.second, 1, layouts)
    pair.importing.attach("first", pair.exporting.arena)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert pair.importing.num_imported_blocks > 0
    assert (pair.second.stats().num_draft_tokens > 0) == drafts, "a head with states drafts only where these arrive"


@pytest.mark.parametrize("method", ["eagle", "mlp_speculator", "medusa"])
def test_texts_move_at_any_step_with_heads_that_have_caches_or_none(
    requests: list[GenerationRequest], plain: Texts, method: str
) -> None:
    pair = make_pair(plain, method, method, chunk=7)
    assert run_moving(pair, requests, random.Random(1)) == plain
    assert pair.importing.num_imported_blocks > 0


@pytest.mark.parametrize("method", ["naive", "eagle", "mlp_speculator", "medusa"])
def test_a_prompt_that_lacks_one_token_of_a_full_block_moves_with_the_tokens_it_has(method: str) -> None:
    prompts = prompts_of_lengths(Tokenizer.from_pretrained(resolve_model_path("demo")), (14, 15, 16, 31, 47))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    asked = [GenerationRequest(f"p{len(prompt)}", prompt, params) for prompt in prompts]
    pair = make_pair({}, method, method, caches_prefixes=False)
    for request in asked:
        pair.add(request)
    assert pair.texts() == run_alone(build(config()), asked)
    assert pair.importing.num_imported_tokens == sum(map(len, prompts))


def test_mtp_drafts_after_a_hand_over_as_on_one_engine(requests: list[GenerationRequest], plain: Texts) -> None:
    alone = build(config("mtp", 3))
    assert run_alone(alone, requests) == plain
    pair = make_pair(plain, "mtp", "mtp")
    for request in requests:
        pair.add(request)
        assert pair.texts().items() >= {k: v for k, v in plain.items() if k[0] == request.request_id}.items()
    ours, expected = pair.second.stats(), alone.stats()
    assert (ours.num_draft_tokens, ours.num_accepted_tokens) == (
        expected.num_draft_tokens,
        expected.num_accepted_tokens,
    )


def steps_of(deltas: Deltas) -> Steps:
    """Return, per choice and step, where its tokens begin and how many were emitted."""
    return {key: [(d.first_index, len(d.token_ids)) for d in parts if d.token_ids] for key, parts in deltas.items()}


def run_on_one(engine: Engine, requests: list[GenerationRequest]) -> Deltas:
    deltas: Deltas = {}

    def collect(new: list[TokenDelta]) -> None:
        for delta in new:
            deltas.setdefault((delta.request_id, delta.index), []).append(delta)

    for request in requests:
        collect(engine.add_request(request))
    while engine.has_unfinished():
        collect(engine.step())
    return deltas


def run_on_two(pair: Pair, requests: list[GenerationRequest]) -> Deltas:
    pair.deltas.clear()
    for request in requests:
        pair.add(request)
    pair.texts()
    return pair.deltas


@pytest.mark.parametrize("method", ["mtp", "with_ngram", "draft_model", "eagle3"])
@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_every_step_accepts_what_it_accepts_on_one_engine(
    requests: list[GenerationRequest],
    plain: Texts,
    method: str,
    caches_prefixes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_step_times(monkeypatch)
    one = build(config(method, 3, prefix_caching=caches_prefixes))
    pair = make_pair(plain, method, method, caches_prefixes=caches_prefixes)
    expected = steps_of(run_on_one(one, requests))
    assert steps_of(run_on_two(pair, requests)) == expected
    assert any(count > 1 for steps in expected.values() for _, count in steps)


def test_requests_that_arrive_together_beside_a_decoding_one_accept_what_they_accept_on_one_engine(
    requests: list[GenerationRequest], plain: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first are added while it decodes; their rows exceed the prefill budget within a draft."""
    expected = steps_of(run_on_one(build(config("draft_model", 3, prefix_caching=True)), requests))
    pair = make_pair(plain, "draft_model", "draft_model")
    scheduler, num_admitted_rows = pair.second.scheduler, list[int]()
    plan_step = scheduler.schedule

    def is_due(ticket: GenerationRequest) -> bool:
        return len(pair.handovers) == len(requests) and (ticket.request_id == "r0" or bool(scheduler.running))

    def schedule() -> StepPlan | None:
        plan = plan_step()
        if plan is not None and len(plan.requests) > plan.num_admitted > 0:
            num_admitted_rows.append(sum(s.num_scheduled_tokens for s in plan.requests[-plan.num_admitted :]))
        return plan

    monkeypatch.setattr(pair, "is_due", is_due)
    monkeypatch.setattr(scheduler, "schedule", schedule)
    monkeypatch.setattr(scheduler, "record_step_time", lambda plan, step_s: None)  # keeps the least prefill budget
    assert steps_of(run_on_two(pair, requests)) == expected
    assert num_admitted_rows[0] > MIN_PREFILL_ROWS


def short_requests(count: int, generator: random.Random) -> list[GenerationRequest]:
    """Return requests of which many begin alike, and end at any place of a block."""
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    prompts = prompts_of_lengths(tokenizer, [90] * 4)
    requests = []
    for i in range(count):
        prompt = generator.choice(prompts)[: generator.randrange(1, 90)]
        greedy = SamplingParams(temperature=0.0, max_tokens=generator.randrange(2, 14), ignore_eos=True)
        requests.append(GenerationRequest(f"s{i}", prompt, greedy))
    return requests


def check_acceptance_after_requests(method: str, count: int) -> None:
    """Send requests through engines of few blocks, which are reused, in groups; compare each step with one engine's."""
    few = 60
    one = build(config(method, 3, num_blocks=few, prefix_caching=True))
    pair = Pair(*(build(config(method, 3, num_blocks=few, prefix_caching=True)) for _ in range(2)))
    requests = short_requests(count, random.Random(method))
    for first in range(0, count, 8):
        group = requests[first : first + 8]
        expected, found = steps_of(run_on_one(one, group)), steps_of(run_on_two(pair, group))
        assert expected == found
    assert pair.importing.num_imported_blocks > count
    assert pair.importing.num_failed_blocks == {}


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_acceptance_is_that_of_one_engine_after_many_requests(method: str) -> None:
    check_acceptance_after_requests(method, 120)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["mtp", "with_ngram", "draft_model"])
def test_acceptance_is_that_of_one_engine_after_thousands_of_requests(method: str) -> None:
    check_acceptance_after_requests(method, 2000)
