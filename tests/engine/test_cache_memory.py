# SPDX-License-Identifier: Apache-2.0
"""A KV cache takes its memory as it is used, and ends where the machine has no more."""

from __future__ import annotations

import logging

import pytest

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.cache_memory import RESERVE_BYTES, CacheMemory
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from tests.doubles import OracleProposer, make_engine, plain_text

MEBIBYTE = 1 << 20
BLOCK_BYTES = 16 * MEBIBYTE


class Machine:
    """Pages of blocks of one size, and the memory that is available for them and for other processes."""

    def __init__(self, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.left = num_bytes
        self.block_bytes = block_bytes
        self.touched: list[int] = []
        self.num_reads = 0

    def available_bytes(self) -> int:
        self.num_reads += 1
        return self.left

    def touch(self, first: int, last: int) -> None:
        self.touched += range(first, last)
        self.left -= (last - first) * self.block_bytes

    def release(self) -> None:
        raise AssertionError("nothing is given back once requests are served")

    def num_bytes(self, first: int, last: int) -> int:
        return (last - first) * self.block_bytes


def make_memory(machine: Machine, num_blocks: int) -> CacheMemory:
    return CacheMemory(machine, num_blocks, machine.block_bytes, machine.available_bytes)


def test_available_memory_is_read_before_each_further_64_mebibytes() -> None:
    machine = Machine(10**12)
    memory = make_memory(machine, 100)
    reads = []
    for block in range(10):
        assert memory.touch(block, block + 1) == block + 1
        reads.append(machine.num_reads)
    assert reads == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert machine.touched == list(range(10))
    assert memory.resident_bytes == 10 * BLOCK_BYTES


def test_many_blocks_at_once_need_memory_for_all_of_them() -> None:
    machine = Machine(RESERVE_BYTES + 20 * BLOCK_BYTES)
    assert make_memory(machine, 100).touch(0, 20) == 20
    assert machine.num_reads == 1


def test_memory_for_a_part_of_the_blocks_is_told_and_given_when_they_are_asked_for() -> None:
    machine = Machine(RESERVE_BYTES + 20 * BLOCK_BYTES - 1)
    memory = make_memory(machine, 100)
    assert memory.touch(0, 20) == 19
    assert machine.touched == []
    assert (memory.touch(0, 19), machine.num_reads) == (19, 1)
    assert memory.resident_bytes == 19 * BLOCK_BYTES


def test_what_is_left_of_a_step_is_used_and_memory_is_read_again() -> None:
    machine = Machine(RESERVE_BYTES + 2 * BLOCK_BYTES)
    memory = make_memory(machine, 100)
    assert [memory.touch(0, 1), memory.touch(1, 2)] == [1, 2]
    machine.left += 10 * BLOCK_BYTES
    assert memory.touch(2, 3) == 3


def test_blocks_larger_than_a_step_are_read_for_one_by_one() -> None:
    machine = Machine(RESERVE_BYTES + 2 * 80 * MEBIBYTE, 80 * MEBIBYTE)
    memory = make_memory(machine, 9)
    assert [memory.touch(block, block + 1) for block in range(3)] == [1, 2, 2]
    assert machine.touched == [0, 1]


def test_the_last_blocks_need_no_memory_for_more_than_there_are() -> None:
    assert make_memory(Machine(RESERVE_BYTES + BLOCK_BYTES), 1).touch(0, 1) == 1


def test_memory_that_others_took_ends_the_cache_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(10**12)
    memory = make_memory(machine, 100)
    assert memory.touch(0, 4) == 4
    machine.left = RESERVE_BYTES + BLOCK_BYTES - 1
    with caplog.at_level(logging.WARNING, "fastdeploy.engine"):
        assert memory.touch(4, 5) == 4
    assert machine.touched == [0, 1, 2, 3]
    assert [record.message for record in caplog.records] == [
        "the KV cache ends at 4 of 100 blocks: 79 MiB of memory are available, of which 64 MiB stay free "
        "(--kv-cache-memory takes the memory at the start)"
    ]


def short_machine(num_blocks: int) -> Machine:
    """Return a machine whose memory ends behind so many blocks."""
    return Machine(RESERVE_BYTES + num_blocks * 64 * MEBIBYTE, 64 * MEBIBYTE)


def run(engine: Engine, requests: list[GenerationRequest]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Run requests to their ends; return their texts, and the types of the errors of those that failed."""
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    errors: dict[str, str] = {}
    for request in requests:
        engine.add_request(request)
    for _ in range(5000):
        if not engine.has_unfinished():
            break
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
            if delta.error is not None:
                errors[delta.request_id] = delta.error.type
        engine.check_integrity()
    assert not engine.has_unfinished()
    return texts, errors


def make_requests(lengths: list[int], max_tokens: int, clients: int = 1) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return [
        GenerationRequest(f"r{i}", [1 + i % 5] * length, params, client_id=f"client{i % clients}")
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("clients", [1, 3])
def test_requests_are_preempted_where_the_cache_ended_and_their_texts_stay_the_same(
    prefix_caching: bool, clients: int
) -> None:
    engine = make_engine(
        NaiveProposer(), prefix_caching=prefix_caching, memory=make_memory(short_machine(9), num_blocks=64)
    )
    requests = make_requests([5, 9, 14, 3, 8, 11], 12, clients)
    texts, errors = run(engine, requests)
    assert not errors
    for request in requests:
        assert texts[request.request_id] == plain_text(request.prompt_token_ids, 1, request.params)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_blocks, stats.num_free_blocks) == (9, 9)
    assert stats.resident_cache_bytes == 9 * 64 * MEBIBYTE


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_a_request_that_alone_does_not_fit_ends_with_an_error_and_the_others_go_on(num_drafts: int) -> None:
    requests = make_requests([8, 30, 9, 40], 20)  # 36 tokens fit into nine blocks
    full = {r.request_id: plain_text(r.prompt_token_ids, 1, r.params) for r in requests}
    proposer = OracleProposer({(name, 0): text for name, text in full.items()}, 0.3) if num_drafts else NaiveProposer()
    memory = make_memory(short_machine(9), num_blocks=64)
    engine = make_engine(proposer, num_speculative_tokens=num_drafts, memory=memory)
    texts, errors = run(engine, requests)
    assert errors == {"r1": "out_of_memory", "r3": "out_of_memory"}
    assert (texts["r0"], texts["r2"]) == (full["r0"], full["r2"])
    assert texts["r1"] == full["r1"][:7], "36 tokens in the cache give the 37th"
    assert texts["r3"] == []
    assert engine.stats().num_finished == {"length": 2, "error": 2}


def test_without_any_memory_each_request_ends_with_an_error() -> None:
    engine = make_engine(NaiveProposer(), memory=make_memory(Machine(RESERVE_BYTES), 64))
    texts, errors = run(engine, make_requests([3, 30, 1], 5))
    assert set(errors.values()) == {"out_of_memory"}
    assert len(errors) == 3 and not any(texts.values())
    assert engine.stats().num_blocks == 0


def test_shares_of_clients_are_shares_of_what_is_left() -> None:
    scheduler = SchedulerConfig(max_client_share=0.5)
    engine = make_engine(NaiveProposer(), scheduler=scheduler, memory=make_memory(short_machine(8), 64))
    requests = make_requests([12] * 6, 8, clients=2)
    texts, errors = run(engine, requests)
    assert not errors
    assert all(texts[r.request_id] == plain_text(r.prompt_token_ids, 1, r.params) for r in requests)
    assert engine.scheduler.shares._max_blocks == 4
