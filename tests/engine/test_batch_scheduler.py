# SPDX-License-Identifier: Apache-2.0
"""Which rows of which requests the scheduler plans for a step."""

from __future__ import annotations

from zlib import crc32

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.engine.batch_scheduler import MIN_PREFILL_ROWS, BatchScheduler
from fastdeploy.kv_cache.manager import KVCacheManager


def make(num_blocks: int = 32, **config: int) -> BatchScheduler:
    return BatchScheduler(SchedulerConfig(**config), KVCacheManager(num_blocks, 4, True))  # type: ignore[arg-type]


def request(name: str, num_prompt: int, priority: int = 0, **params: int) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    token = crc32(name.encode()) % 2**31  # differs by name, so that prompts share no blocks
    source = GenerationRequest(name, [token] * num_prompt, sampling, priority=priority)
    return Request(source, 0, seed=0, max_total_tokens=1000, max_drafts=8)


def finish_step(scheduler: BatchScheduler, plan: StepPlan, num_accepted: int = 0) -> None:
    """Commit a step in which every request with verification rows emits tokens."""
    for scheduled in plan.requests:
        count = min(num_accepted, len(scheduled.draft)) + 1 if scheduled.num_verify_rows else 0
        scheduler.commit(scheduled, RequestResult([1] * count, max(0, count - 1)), [1] * count)


def schedule(scheduler: BatchScheduler) -> tuple[StepPlan, dict[str, int]]:
    plan = scheduler.schedule()
    assert plan is not None
    return plan, {s.request.request_id: s.num_scheduled_tokens for s in plan.requests}


def test_long_prompt_is_prefilled_in_chunks_and_only_the_last_one_emits() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("a", 19))
    rows, emits = [], []
    for _ in range(3):
        plan, counts = schedule(scheduler)
        rows.append(counts["a"])
        emits.append(plan.requests[0].num_verify_rows)
        finish_step(scheduler, plan)
    assert (rows, emits) == ([8, 8, 3], [0, 0, 1])


def test_decoding_requests_are_scheduled_before_a_long_prompt() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("short", 2))
    scheduler.add(request("long", 40))
    plan, counts = schedule(scheduler)
    assert counts == {"short": 2, "long": 6}
    finish_step(scheduler, plan)
    _, counts = schedule(scheduler)
    assert list(counts.items()) == [("short", 1), ("long", 7)]


def test_draft_is_truncated_to_the_budget() -> None:
    scheduler = make(max_num_batched_tokens=5)
    a = request("a", 3)
    scheduler.add(a)
    finish_step(scheduler, schedule(scheduler)[0])
    a.set_draft(Draft(list(range(1, 9))))
    plan, counts = schedule(scheduler)
    assert counts == {"a": 5}
    assert (plan.requests[0].draft.token_ids, plan.requests[0].num_verify_rows) == ([1, 2, 3, 4], 5)
    assert len(a.draft) == 8


def test_rejected_drafts_are_subtracted_from_the_ledger() -> None:
    scheduler = make()
    a = request("a", 3)
    scheduler.add(a)
    finish_step(scheduler, schedule(scheduler)[0])
    assert (a.num_tokens, a.num_computed) == (4, 3)
    a.set_draft(Draft([5, 6, 7]))
    plan, _ = schedule(scheduler)
    finish_step(scheduler, plan, num_accepted=1)
    assert (a.num_tokens, a.num_computed, a.num_pending) == (6, 5, 1)


def test_last_admitted_request_is_preempted_and_waits_first_in_line() -> None:
    scheduler = make(num_blocks=4)
    a, b, c = request("a", 8), request("b", 7), request("c", 4)
    for r in (a, b, c):
        scheduler.add(r)
    plan, counts = schedule(scheduler)
    assert counts == {"a": 8, "b": 7}
    finish_step(scheduler, plan)
    _, counts = schedule(scheduler)
    assert counts == {"a": 1}
    assert list(scheduler.waiting) == [b, c]
    assert (b.num_computed, b.block_ids, b.metrics.num_preemptions, scheduler.num_preemptions) == (0, [], 1, 1)
    scheduler.check_integrity()


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    scheduler = make(max_num_batched_tokens=8, enable_chunked_prefill=False)
    scheduler.add(request("a", 6))
    scheduler.add(request("b", 6))
    plan, counts = schedule(scheduler)
    assert counts == {"a": 6}
    finish_step(scheduler, plan)
    assert schedule(scheduler)[1] == {"a": 1, "b": 6}


def test_prompt_rows_with_logits_are_those_that_predict_a_prompt_token() -> None:
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(request("a", 6, prompt_logprobs=0))
    plan, _ = schedule(scheduler)
    assert (plan.requests[0].num_prompt_logprob_rows, plan.requests[0].num_verify_rows) == (4, 0)
    finish_step(scheduler, plan)
    plan, _ = schedule(scheduler)
    assert (plan.requests[0].num_prompt_logprob_rows, plan.requests[0].num_verify_rows) == (1, 1)


def test_lower_priority_values_start_earlier_and_equal_ones_in_order_of_arrival() -> None:
    scheduler = make(max_num_seqs=2)
    for name, priority in (("a", 1), ("b", 0), ("c", -3), ("d", 0), ("e", 1)):
        scheduler.add(request(name, 2, priority))
    assert [r.request_id for r in scheduler.waiting] == ["c", "b", "d", "a", "e"]
    assert list(schedule(scheduler)[1]) == ["c", "b"]


def test_highest_priority_value_is_preempted_even_if_it_was_admitted_first() -> None:
    scheduler = make(num_blocks=4)
    low, high = request("low", 7, priority=5), request("high", 8)
    scheduler.add(low)
    finish_step(scheduler, schedule(scheduler)[0])
    scheduler.add(high)
    finish_step(scheduler, schedule(scheduler)[0])
    assert scheduler.running == [high, low]
    _, counts = schedule(scheduler)
    assert counts == {"high": 1}
    assert list(scheduler.waiting) == [low]
    scheduler.check_integrity()


def test_preempted_request_waits_before_later_ones_of_its_priority_and_after_lower_values() -> None:
    scheduler = make(num_blocks=4)
    a, b = request("a", 8), request("b", 7)
    for r in (a, b):
        scheduler.add(r)
    finish_step(scheduler, schedule(scheduler)[0])
    late, urgent = request("late", 20), request("urgent", 20, priority=-1)
    scheduler.add(late)
    scheduler.add(urgent)
    schedule(scheduler)
    assert list(scheduler.waiting) == [urgent, b, late]


def test_no_more_requests_run_than_allowed() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 2))
    assert list(schedule(scheduler)[1]) == ["a", "b"]


def test_prefill_rows_beside_decoding_requests_are_limited() -> None:
    scheduler = make(num_blocks=300, max_num_batched_tokens=1000, max_num_seqs=100)
    for i in range(MIN_PREFILL_ROWS + 6):
        scheduler.add(request(f"decodes-{i}", 3))
    plan, _ = schedule(scheduler)
    finish_step(scheduler, plan)
    for name in ("first", "second"):
        scheduler.add(request(name, 100))
    plan, counts = schedule(scheduler)
    assert counts["first"] == MIN_PREFILL_ROWS + 6 == 70 and "second" not in counts
    finish_step(scheduler, plan)
    for other in scheduler.running[3:-1]:
        scheduler.finish(other)
    _, counts = schedule(scheduler)
    assert (counts["first"], counts["second"]) == (30, MIN_PREFILL_ROWS - 30)


def add_handed_over(scheduler: BatchScheduler, name: str) -> Request:
    """Add a request of 4 tokens of which all but the last were imported, with a draft of 8 tokens."""
    handed_over = request(name, 4)
    assert scheduler.kv_cache_manager.begin_import(name, handed_over.token_ids.tolist(), "", 3) is not None
    scheduler.add(handed_over)
    scheduler.kv_cache_manager.adopt([handed_over], 3)
    handed_over.set_draft(Draft(list(range(1, 9))))
    return handed_over


def test_the_prefill_budget_does_not_truncate_drafts_of_requests_that_were_handed_over() -> None:
    scheduler = make(num_blocks=300, max_num_batched_tokens=1000)
    scheduler.add(request("decodes", 3))
    finish_step(scheduler, schedule(scheduler)[0])
    scheduler.add(request("prompt", MIN_PREFILL_ROWS - 3))
    for name in ("begins-within", "later"):
        add_handed_over(scheduler, name)
    plan, counts = schedule(scheduler)
    assert counts == {"decodes": 1, "prompt": MIN_PREFILL_ROWS - 3, "begins-within": 9}
    finish_step(scheduler, plan)
    assert schedule(scheduler)[1]["later"] == 9


def test_drafts_of_requests_that_were_handed_over_are_truncated_to_the_rows_of_a_step() -> None:
    scheduler = make(num_blocks=300, max_num_batched_tokens=MIN_PREFILL_ROWS + 4)
    scheduler.add(request("decodes", 3))
    finish_step(scheduler, schedule(scheduler)[0])
    scheduler.add(request("prompt", MIN_PREFILL_ROWS - 3))
    handed_over = add_handed_over(scheduler, "handed-over")
    _, counts = schedule(scheduler)
    assert counts == {"decodes": 1, "prompt": MIN_PREFILL_ROWS - 3, "handed-over": 6}
    assert len(handed_over.draft) == 8
    assert sum(counts.values()) == MIN_PREFILL_ROWS + 4


def test_prefill_rows_beside_decoding_requests_take_at_most_the_maximum_stall() -> None:
    scheduler = make(num_blocks=300, max_num_batched_tokens=1000, max_num_seqs=100)
    scheduler.add(request("decodes", 80))
    plan, _ = schedule(scheduler)
    scheduler.record_step_time(plan, 0.02)
    finish_step(scheduler, plan)
    scheduler.add(request("long", 900))
    plan, counts = schedule(scheduler)
    assert counts == {"decodes": 1, "long": 200}, "80 rows took 20 ms, so 200 rows take 50 ms"
    scheduler.record_step_time(plan, 0.201)
    finish_step(scheduler, plan)
    plan, counts = schedule(scheduler)
    assert counts["long"] == 125, "halfway from 4,000 rows a second to 1,000"
    scheduler.record_step_time(plan, 10.0)
    finish_step(scheduler, plan)
    assert schedule(scheduler)[1]["long"] == MIN_PREFILL_ROWS, "the minimum, however slow steps are"


def test_prompts_of_models_with_experts_have_larger_chunks() -> None:
    config = SchedulerConfig(max_num_batched_tokens=1000)
    scheduler = BatchScheduler(config, KVCacheManager(300, 4, True), min_prefill_rows=128)
    scheduler.add(request("decodes", 100))
    plan, _ = schedule(scheduler)
    scheduler.record_step_time(plan, 1e-6)  # too few rows to tell the rate
    finish_step(scheduler, plan)
    scheduler.add(request("long", 900))
    assert schedule(scheduler)[1] == {"decodes": 1, "long": 128}


def test_steps_of_few_rows_do_not_change_the_prefill_budget() -> None:
    scheduler = make(num_blocks=300, max_num_batched_tokens=1000)
    scheduler.add(request("decodes", MIN_PREFILL_ROWS - 1))
    plan, _ = schedule(scheduler)
    scheduler.record_step_time(plan, 1e-6)
    finish_step(scheduler, plan)
    scheduler.add(request("long", 900))
    assert schedule(scheduler)[1]["long"] == MIN_PREFILL_ROWS


def test_prefill_rows_are_not_limited_without_chunked_prefill() -> None:
    scheduler = make(num_blocks=300, max_num_batched_tokens=1000, enable_chunked_prefill=False)
    scheduler.add(request("decodes", 3))
    plan, _ = schedule(scheduler)
    finish_step(scheduler, plan)
    scheduler.add(request("long", 110))
    assert schedule(scheduler)[1] == {"decodes": 1, "long": 110}
