# SPDX-License-Identifier: Apache-2.0
"""Rows, running sequences and KV blocks are divided between clients by weight."""

from __future__ import annotations

from zlib import crc32

import pytest

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.errors import InvalidRequestError, QueueFullError
from fastdeploy.core.request import GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import ClientLoad
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.kv_cache.manager import KVCacheManager
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from tests.doubles import make_engine

WEIGHTS = {"heavy": 3.0}  # of clients; others weigh 1


def make(num_blocks: int = 1000, **config: float) -> BatchScheduler:
    return BatchScheduler(SchedulerConfig(**config), KVCacheManager(num_blocks, 4, True))  # type: ignore[arg-type]


def add(scheduler: BatchScheduler, name: str, num_prompt: int, priority: int = 0, prompt: str | None = None) -> Request:
    """Add a request; its name is CLIENT-NUMBER. Prompts share blocks if they have the same name."""
    client = name.split("-")[0]
    token = crc32((prompt or name).encode()) % 2**31
    source = GenerationRequest(name, [token] * num_prompt, SamplingParams(), priority=priority)
    source.client_id, source.client_name, source.client_weight = client, client, WEIGHTS.get(client, 1.0)
    request = Request(source, 0, seed=0, max_total_tokens=1000, max_drafts=0)
    scheduler.add(request)
    return request


def step(scheduler: BatchScheduler) -> dict[str, int]:
    """Run a step; return the rows of each request."""
    plan = scheduler.schedule()
    if plan is None:
        return {}
    rows = {s.request.request_id: s.num_scheduled_tokens for s in plan.requests}
    commit(scheduler, plan)
    scheduler.check_integrity()
    return rows


def commit(scheduler: BatchScheduler, plan: StepPlan) -> None:
    for scheduled in plan.requests:
        tokens = [1] if scheduled.num_verify_rows else []
        scheduler.commit(scheduled, RequestResult(tokens), tokens)


def test_waiting_requests_of_several_clients_are_admitted_in_turn() -> None:
    scheduler = make()
    for name in ("a-1", "a-2", "a-3", "b-1", "b-2", "c-1"):
        add(scheduler, name, 5)
    assert list(step(scheduler)) == ["a-1", "b-1", "c-1", "a-2", "b-2", "a-3"]


def test_a_client_of_three_times_the_weight_is_admitted_three_times_as_often() -> None:
    scheduler = make(max_num_seqs=8)
    for i in range(8):
        add(scheduler, f"light-{i}", 6)
        add(scheduler, f"heavy-{i}", 6)
    names = [name.split("-")[0] for name in step(scheduler)]
    assert names == ["light", "heavy", "heavy", "heavy", "light", "heavy", "heavy", "heavy"]


def test_priority_orders_only_the_requests_of_one_client() -> None:
    scheduler = make()
    for name, priority in (("a-1", 0), ("a-2", -5), ("b-1", 7), ("b-2", 3)):
        add(scheduler, name, 5, priority)
    assert list(step(scheduler)) == ["a-2", "b-2", "a-1", "b-1"]


def test_prompts_of_two_clients_share_the_rows_of_steps_by_weight() -> None:
    scheduler = make(max_num_batched_tokens=10)
    add(scheduler, "light-1", 400)
    add(scheduler, "heavy-1", 400)
    rows = {"light-1": 0, "heavy-1": 0}
    for _ in range(40):
        for name, count in step(scheduler).items():
            rows[name] += count
    assert rows == {"light-1": 100, "heavy-1": 300}


def test_a_short_prompt_does_not_wait_for_the_long_prompts_of_another_client() -> None:
    scheduler = make(max_num_batched_tokens=10)
    for i in range(3):
        add(scheduler, f"a-{i}", 300)
    for _ in range(5):
        assert step(scheduler) == {"a-0": 10}
    add(scheduler, "b-1", 7)
    assert [step(scheduler) for _ in range(2)] == [{"a-0": 10}, {"b-1": 7, "a-0": 3}]


def test_a_client_that_comes_back_has_saved_up_nothing() -> None:
    scheduler = make(max_num_batched_tokens=10)
    idle = add(scheduler, "b-1", 3)
    add(scheduler, "a-1", 900)
    for _ in range(20):
        step(scheduler)
    add(scheduler, "b-2", 200)
    rows = {"a-1": 0, "b-2": 0, "b-1": 0}
    for _ in range(20):
        for name, count in step(scheduler).items():
            rows[name] += count
    assert idle.num_output_tokens == 40
    assert rows == {"a-1": 99, "b-2": 81, "b-1": 20}, "b has the rows of both of its requests"


def test_a_client_that_left_is_forgotten_once_others_have_been_served_as_much() -> None:
    scheduler = make(max_num_batched_tokens=10)
    add(scheduler, "a-1", 100)
    ended = [add(scheduler, f"b-{i}", 10) for i in range(3)]
    for _ in range(5):
        step(scheduler)
    for request in ended:
        scheduler.finish(request)
    for _ in range(3):
        step(scheduler)
    add(scheduler, "c-1", 10)
    scheduler.check_integrity()
    assert {c.client_id for c in scheduler.shares.clients_with_prompts("abc")} == {"a", "c"}


def test_one_client_leaves_a_share_of_running_sequences_to_others() -> None:
    scheduler = make(max_num_seqs=8, max_client_share=0.75)
    for i in range(10):
        add(scheduler, f"a-{i}", 5)
    assert len(step(scheduler)) == 6
    add(scheduler, "b-1", 5)
    assert step(scheduler)["b-1"] == 5


def test_one_client_leaves_a_share_of_blocks_to_others_and_nobody_is_preempted_for_them() -> None:
    scheduler = make(num_blocks=16, max_client_share=0.75)
    greedy = [add(scheduler, f"a-{i}", 14) for i in range(4)]
    assert list(step(scheduler)) == ["a-0", "a-1", "a-2"], "12 of 16 blocks"
    for _ in range(2):
        step(scheduler)
    polite = add(scheduler, "b-1", 14)
    assert step(scheduler) == {"a-0": 1, "a-1": 1, "b-1": 14}, "a-0 needs a fifth block, and its client has none left"
    assert [r.metrics.num_preemptions for r in greedy] == [0, 0, 1, 0]
    assert polite.metrics.num_preemptions == 0


def test_a_request_that_needs_more_than_its_clients_share_runs_alone() -> None:
    scheduler = make(num_blocks=8, max_client_share=0.5)
    large = add(scheduler, "a-1", 14)
    assert step(scheduler) == {"a-1": 14}, "4 blocks are the share"
    add(scheduler, "a-2", 3)
    for _ in range(16):
        assert list(step(scheduler)) == ["a-1"], "a second request of its client would exceed it"
    assert len(large.block_ids) == 8


def test_blocks_that_requests_of_one_client_share_count_once() -> None:
    scheduler = make(num_blocks=16, max_client_share=0.5)
    add(scheduler, "a-1", 21, prompt="same")
    step(scheduler)
    for i in range(2, 5):
        add(scheduler, f"a-{i}", 21, prompt="same")
    assert list(step(scheduler)) == ["a-1", "a-2", "a-3"], "5 shared blocks and one each: 8 blocks for three"


def test_the_client_that_holds_most_blocks_gives_them_up() -> None:
    scheduler = make(num_blocks=8)
    greedy = [add(scheduler, f"a-{i}", 12) for i in range(2)]
    polite = add(scheduler, "b-1", 7, priority=9)
    assert step(scheduler) == {"a-0": 12, "b-1": 7, "a-1": 12}
    assert step(scheduler) == {"a-0": 1, "b-1": 1}, "a-0 takes the blocks of a-1"
    assert [r.metrics.num_preemptions for r in (polite, *greedy)] == [0, 0, 1]


def test_blocks_are_held_in_relation_to_the_weight() -> None:
    scheduler = make(num_blocks=8)
    heavy, light = add(scheduler, "heavy-1", 20), add(scheduler, "light-1", 12)
    assert step(scheduler) == {"heavy-1": 20, "light-1": 12}
    assert step(scheduler) == {"heavy-1": 1}, "5 blocks by weight 3 are less than 3 by 1"
    assert [r.metrics.num_preemptions for r in (heavy, light)] == [0, 1]


def test_a_polite_request_takes_its_block_from_the_last_request_of_the_greedy_client() -> None:
    scheduler = make(num_blocks=8)
    greedy = [add(scheduler, f"a-{i}", 9) for i in range(2)]
    polite = add(scheduler, "b-1", 7)
    assert step(scheduler) == {"a-0": 9, "b-1": 7, "a-1": 9}
    assert step(scheduler) == {"a-0": 1, "a-1": 1, "b-1": 1}
    assert step(scheduler) == {"a-0": 1, "b-1": 1}, "it takes back the rows that a-1 had in this step"
    assert [r.metrics.num_preemptions for r in (polite, *greedy)] == [0, 0, 1]


def test_small_requests_pass_a_large_one_only_until_they_are_served_as_much() -> None:
    scheduler = make(num_blocks=20)
    holder = add(scheduler, "c-1", 40)
    step(scheduler)
    add(scheduler, "a-1", 60)
    passed = 0
    for i in range(40):
        small = add(scheduler, f"b-{i}", 9)
        if f"b-{i}" not in step(scheduler):
            break
        passed += 1
        scheduler.finish(small)
    assert passed == 7, "they may have 60 rows more, which they exceed with the seventh"
    scheduler.finish(holder)
    assert next(iter(step(scheduler))) == "a-1"


def test_choices_that_wait_for_their_shared_prompt_do_not_delay_other_clients() -> None:
    scheduler = make(max_num_batched_tokens=10)
    source = GenerationRequest("a-1", [3] * 40, SamplingParams(n=4), client_id="a")
    for i in range(4):
        scheduler.add(Request(source, i, seed=0, max_total_tokens=100, max_drafts=0))
    assert list(step(scheduler)) == ["a-1"]
    add(scheduler, "b-1", 3)
    assert [step(scheduler) for _ in range(2)] == [{"a-1": 10}, {"b-1": 3, "a-1": 7}]


def test_decoding_requests_that_exceed_the_budget_leave_rows_for_prompts_of_others() -> None:
    scheduler = make(max_num_batched_tokens=8, max_num_seqs=16)
    for i in range(8):
        add(scheduler, f"a-{i}", 2)
    while scheduler.waiting:
        step(scheduler)
    add(scheduler, "b-1", 6)
    assert [step(scheduler).get("b-1") for _ in range(3)] == [4, 2, 1]


def test_limits_of_the_queue_name_what_is_full() -> None:
    engine = make_engine(NaiveProposer(), scheduler=SchedulerConfig(max_waiting_requests=8, max_client_share=0.5))
    params = SamplingParams(n=2)

    def request(name: str, client: str, max_sequences: int | None = None) -> GenerationRequest:
        return GenerationRequest(name, [1, 2], params, client_id=client, client_max_sequences=max_sequences)

    engine.add_request(request("a-1", "a"))
    engine.add_request(request("a-2", "a"))
    with pytest.raises(QueueFullError, match=r"^4 requests of this client are waiting; the limit is 4$"):
        engine.add_request(request("a-3", "a"))
    engine.add_request(request("b-1", "b", 3))
    with pytest.raises(QueueFullError, match=r"^2 requests of this client are running or waiting; the limit is 3$"):
        engine.add_request(request("b-2", "b", 3))
    engine.add_request(request("c-1", "c"))
    with pytest.raises(QueueFullError, match=r"^8 requests are waiting; the limit is 8$"):
        engine.add_request(request("d-1", "d"))
    with pytest.raises(InvalidRequestError, match=r"^n: expected at most 1, the limit of requests, got 2$"):
        engine.add_request(request("b-2", "b", 1))
    engine.step()
    with pytest.raises(QueueFullError, match=r"^2 requests of this client are running or waiting; the limit is 3$"):
        engine.add_request(request("b-2", "b", 3))
    engine.check_integrity()


def test_loads_are_those_of_keys_with_sequences_by_name() -> None:
    engine = make_engine(NaiveProposer(), scheduler=SchedulerConfig(max_num_seqs=3))

    def add(name: str, client: str, n: int = 1, max_tokens: int = 9) -> None:
        params = SamplingParams(n=n, max_tokens=max_tokens)
        engine.add_request(GenerationRequest(name, [1, 2], params, client_id=f"id of {name[0]}", client_name=client))

    add("a-1", "alice", n=2)
    add("b-1", "bob", max_tokens=1)
    add("a-2", "alice", n=3)
    add("x-1", "")
    assert engine.stats().clients == {"alice": ClientLoad(0, 5), "bob": ClientLoad(0, 1)}
    engine.step()  # the request of bob ends with it
    assert engine.stats().clients == {"alice": ClientLoad(1, 4)}, "each client runs one"
    add("c-1", "alice")  # another key of the same name, as two nodes may have
    assert engine.stats().clients == {"alice": ClientLoad(1, 5)}
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().clients == {}


def test_a_preempted_sequence_waits_in_the_load_of_its_client() -> None:
    scheduler = make(num_blocks=4, max_num_seqs=4)
    for name in ("a-1", "a-2"):
        add(scheduler, name, 7)
    step(scheduler)
    assert scheduler.shares.loads() == {"a": ClientLoad(2, 0)}
    for _ in range(2):
        step(scheduler)
    assert scheduler.shares.loads() == {"a": ClientLoad(1, 1)}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_is_positive(weight: float) -> None:
    engine = make_engine(NaiveProposer())
    request = GenerationRequest("a", [1, 2], SamplingParams(), client_weight=weight)
    with pytest.raises(InvalidRequestError, match=rf"^client_weight: expected a positive number, got {weight}$"):
        engine.add_request(request)
    engine.check_integrity()
