# SPDX-License-Identifier: Apache-2.0
"""Requests of random clients: nobody starves, nobody is preempted unfairly, and texts are those of running alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.request import GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.engine.engine import Engine
from tests.doubles import VOCAB, make_engine
from tests.engine.test_engine_fuzz import expected_texts, make_proposer

MAX_LEN = 48
BLOCK_SIZE = 4


def random_request(random: np.random.Generator, name: str, client: str, weight: float) -> GenerationRequest:
    head = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6][: random.integers(0, 13)]
    prompt = head + random.integers(0, VOCAB, random.integers(1, 20)).tolist()
    params = SamplingParams(
        n=int(random.integers(1, 4)),
        seed=int(random.integers(0, 1000)),
        max_tokens=int(random.integers(1, 30)),
        ignore_eos=bool(random.random() < 0.7),
        prompt_logprobs=0 if random.random() < 0.1 else None,
    )
    request = GenerationRequest(name, prompt, params, priority=int(random.integers(-2, 3)))
    request.client_id, request.client_weight = client, weight
    return request


class Watch:
    """Checks each step of a scheduler from the outside."""

    def __init__(self, engine: Engine, weights: dict[str, float]) -> None:
        self.scheduler: BatchScheduler = engine.scheduler
        self.weights = weights
        self.preempted: list[str] = []  # clients, in this step
        self.beyond_share = ""  # the client that had no blocks left of its share when it was last asked
        shares = self.scheduler.shares
        self._schedule, self._preempt = self.scheduler.schedule, self.scheduler._preempt
        self._may_grow, shares.may_grow = shares.may_grow, self.may_grow  # type: ignore[method-assign]
        self.scheduler.schedule, self.scheduler._preempt = self.schedule, self.preempt  # type: ignore[method-assign]

    def held(self, client: str) -> int:
        """Return how many different blocks a client holds, from the tables of its requests."""
        return len({block for r in self.scheduler.running if r.client_id == client for block in r.block_ids})

    def may_grow(self, request: Request, num_tokens: int) -> bool:
        """Remember whose share is used up."""
        may_grow = self._may_grow(request, num_tokens)
        self.beyond_share = "" if may_grow else request.client_id
        return may_grow

    def preempt(self, request: Request) -> None:
        """Check who gives up blocks: the client itself if its share is used up, else that with most by weight."""
        if self.beyond_share:
            assert request.client_id == self.beyond_share
        else:
            loads = {client: self.held(client) / weight for client, weight in self.weights.items()}
            assert loads[request.client_id] == max(loads.values())
        self.preempted.append(request.client_id)
        self._preempt(request)

    def schedule(self):  # type: ignore[no-untyped-def]
        """Plan a step; check the limits of each client, and that no capacity is idle."""
        self.preempted = []
        plan = self._schedule()
        config, kv_cache = self.scheduler.config, self.scheduler.kv_cache_manager
        max_running = max(1, int((config.max_client_share or 1) * config.max_num_seqs))
        max_blocks = int((config.max_client_share or 1) * kv_cache.pool.num_blocks)
        running = Counter(r.client_id for r in self.scheduler.running)
        for client, count in running.items():
            assert count <= max_running
            assert self.held(client) <= max_blocks or count == 1
        num_rows = sum(s.num_scheduled_tokens for s in plan.requests) if plan else 0
        has_room = num_rows < config.max_num_batched_tokens and len(self.scheduler.running) < config.max_num_seqs
        if has_room and not self.preempted:
            for client in {r.client_id for r in self.scheduler.waiting}:
                first = next(r for r in self.scheduler.waiting if r.client_id == client)
                num_blocks = -(-first.num_tokens // BLOCK_SIZE)
                assert (
                    running[client] >= max_running
                    or (running[client] and self.held(client) + num_blocks > max_blocks)
                    or self.scheduler._waits_for_choice(first)
                    or num_blocks > kv_cache.pool.num_free
                    or self.is_passed(first)
                ), f"{first.key} could run"
        return plan

    def is_passed(self, request: Request) -> bool:
        """Return whether a request of another client waits for blocks, for which this one is kept waiting."""
        free = self.scheduler.kv_cache_manager.pool.num_free
        return any(
            r.client_id != request.client_id and -(-r.num_tokens // BLOCK_SIZE) > free for r in self.scheduler.waiting
        )


def run(engine: Engine, requests: list[GenerationRequest], random: np.random.Generator, max_steps: int) -> set[str]:
    """Add requests at random times and abort a few; return the ids of those, and raise if it takes too many steps."""
    waiting, aborted = list(requests), set()
    engine_texts: dict[tuple[str, int], list[int]] = {}
    for _ in range(max_steps):
        while waiting and random.random() < 0.6:
            engine.add_request(waiting.pop())
        if random.random() < 0.03 and engine.scheduler.running:
            request_id = engine.scheduler.running[0].request_id
            engine.abort(request_id)
            aborted.add(request_id)
        for delta in engine.step():
            engine_texts.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        engine.check_integrity()
        if not waiting and not engine.has_unfinished():
            break
    assert not engine.has_unfinished(), f"not ended after {max_steps} steps"
    for key, text in expected_texts([r for r in requests if r.request_id not in aborted]).items():
        assert engine_texts[key] == text, key
    return aborted


def check_random_clients(seed: int) -> Counter[str]:
    """Run a random mix of several clients' requests."""
    random = np.random.default_rng(seed)
    weights = {f"c{i}": float(random.choice([0.5, 1, 1, 3])) for i in range(random.integers(2, 5))}
    names = list(weights)
    requests = []
    for i in range(random.integers(2, 12)):
        client = names[int(random.integers(len(names)) * random.random())]  # the first ones have more requests
        requests.append(random_request(random, f"r{i}", client, weights[client]))
    num_drafts = int(random.integers(0, 4))
    engine = make_engine(
        make_proposer("oracle" if num_drafts else "naive", expected_texts(requests), seed),
        num_blocks=int(random.choice([12, 16, 24, 40])),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        num_speculative_tokens=num_drafts,
        prefix_caching=bool(random.random() < 0.7),
        scheduler=SchedulerConfig(
            max_num_seqs=int(random.integers(1, 9)),
            max_num_batched_tokens=int(random.choice([8, 17, 64])),
            long_prefill_token_threshold=int(random.choice([0, 3])),
            max_client_share=[None, 0.4, 0.75][random.integers(3)],
        ),
    )
    Watch(engine, weights)
    num_tokens = sum(r.params.n * MAX_LEN for r in requests)
    aborted = run(engine, requests, random, 20 + 2 * num_tokens)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return Counter(preempted=stats.num_preemptions, aborted=len(aborted), hits=stats.num_prefix_hit_tokens)


def check_polite_client(seed: int) -> int:
    """Run a greedy client's random requests beside a polite client's, one at a time; return the number of the latter.

    The polite client's requests fit into what the greedy client must leave free. None is ever preempted, and each has
    its first token within 4 steps plus twice those that its prompt needs: prompts of two clients take turns.
    """
    random = np.random.default_rng(seed)
    num_seqs, budget = int(random.integers(4, 12)), int(random.choice([16, 32, 64]))
    engine = make_engine(
        make_proposer("naive", {}, seed),
        num_blocks=32,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        scheduler=SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_client_share=0.75),
    )
    num_greedy = 0
    polite, num_polite, arrival_step = "", 0, 0
    for step in range(120):
        while num_greedy < 64 and random.random() < 0.9:
            weight = float(random.choice([0.5, 1.0]))
            request = random_request(random, f"greedy-{num_greedy}", "greedy", weight)
            request.priority = -100
            engine.add_request(request)
            num_greedy += 1
        if not polite and random.random() < 0.3:
            polite, num_polite, arrival_step = f"polite-{num_polite}", num_polite + 1, step
            prompt = random.integers(0, VOCAB, random.integers(1, 20)).tolist()
            params = SamplingParams(max_tokens=int(random.integers(1, 9)), ignore_eos=True)
            engine.add_request(GenerationRequest(polite, prompt, params, client_id="polite"))
            max_steps = 4 + 2 * -(-len(prompt) // (budget // 2))
        for delta in engine.step():
            if delta.request_id == polite and delta.finish_reason is not None:
                assert delta.metrics is not None and delta.metrics.num_preemptions == 0
                polite = ""
        engine.check_integrity()
        ours = [r for r in (*engine.scheduler.running, *engine.scheduler.waiting) if r.client_id == "polite"]
        if ours and ours[0].num_output_tokens == 0:
            assert step - arrival_step < max_steps, f"seed {seed}: no first token after {max_steps} steps"
    return num_polite


def test_random_clients_starve_nobody_and_change_no_text() -> None:
    totals: Counter[str] = Counter()
    for seed in range(150):
        totals += check_random_clients(seed)
    assert min(totals["preempted"], totals["aborted"], totals["hits"]) > 20, totals


def test_a_polite_client_has_its_first_token_within_four_steps_plus_its_prompt() -> None:
    assert sum(check_polite_client(seed) for seed in range(25)) > 150


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_mixes_of_random_clients_starve_nobody_and_change_no_text() -> None:
    for seed in range(1000):
        check_random_clients(seed)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_polite_client_beside_a_thousand_greedy_ones() -> None:
    for seed in range(1000):
        check_polite_client(seed)
