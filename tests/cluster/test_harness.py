# SPDX-License-Identifier: Apache-2.0
"""The campaign sees what must not be: wrong, missing and doubled tokens, lost streams, and what is left behind."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import processes
from tests.cluster.bodies import Reference
from tests.cluster.campaign import judge, run_and_judge, single_node
from tests.cluster.clients import Answer, Choice
from tests.cluster.cluster import Cluster, Shape
from tests.cluster.faults import Faults
from tests.cluster.leftovers import check_ended, entries
from tests.cluster.plan import DEAD_FOR_GOOD, SHAPES, Event, Plan, draw_plan
from tests.cluster.redis_failover import LastingRedis
from tests.cluster.redis_server import RedisServer

LOCAL = Shape("local", ("mixed", "mixed"), workers=2)
EXPECTED = Answer(
    0, 200, {0: Choice([7, 8, 9], "abc", end=("length", None))}, {"completion_tokens": 3}, is_complete=True
)


def changed(change: Callable[[Answer], None]) -> Answer:
    answer = copy.deepcopy(EXPECTED)
    change(answer)
    return answer


def judged(answer: Answer, tmp_path: Path, plan: Plan | None = None) -> str:
    cluster = Cluster(LOCAL, tmp_path)
    cluster.close()
    return judge(answer, EXPECTED, Faults(cluster, plan or Plan(0, [], [])))[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda answer: None, "right"),
        (lambda answer: answer.choices[0].token_ids.pop(), "wrong"),
        (lambda answer: answer.choices[0].token_ids.append(9), "wrong"),
        (lambda answer: answer.choices[0].token_ids.insert(1, 7), "wrong"),
        (lambda answer: answer.choices.update({1: Choice([7])}), "wrong"),
        (lambda answer: setattr(answer.choices[0], "text", "abd"), "wrong"),
        (lambda answer: setattr(answer.choices[0], "end", ("stop", None)), "wrong"),
        (lambda answer: setattr(answer, "usage", {"completion_tokens": 4}), "wrong"),
        (lambda answer: setattr(answer, "is_complete", False), "lost"),
        (lambda answer: setattr(answer, "broken", "ReadError") or setattr(answer, "is_complete", False), "lost"),
        (lambda answer: setattr(answer, "error", {"code": "attempts_failed"}), "lost"),
    ],
)
def test_an_answer_that_is_not_that_of_one_node_is_a_problem(
    tmp_path: Path, change: Callable[[Answer], None], word: str
) -> None:
    assert judged(changed(change), tmp_path) == word


def test_a_choice_takes_nothing_after_its_end() -> None:
    choice = Choice()
    choice.add({"completion_token_ids": [7], "text": "a", "finish_reason": "stop", "stop_reason": None})
    with pytest.raises(AssertionError, match="an event after the last one"):
        choice.add({"completion_token_ids": [7], "text": "a", "finish_reason": None})


def test_plans_follow_from_their_seed_and_hold_every_event() -> None:
    plans = [draw_plan(seed, SHAPES[1], is_last=seed % 8 == 7) for seed in range(60)]
    assert [str(plan) for plan in plans[:5]] == [str(draw_plan(seed, SHAPES[1])) for seed in range(5)]
    happened = {(event.action, event.process) for plan in plans for event in plan.events}
    assert happened == {
        *((action, process) for action in ("kill", "stop") for process in ("all", "engine", "agent", "api")),
        ("restart", "all"),
        *((action, "") for action in ("redis_kill", "redis_stop", "flush", "failover", DEAD_FOR_GOOD)),
    }
    assert {fault.partition(":")[2].partition("+")[0] for plan in plans for fault in plan.faults.values()} == {
        "kill",
        "stop",
        "delay=0.2",
        "delay=1.5",
    }


def test_a_slice_tells_broken_connections_errors_and_right_answers_apart(tmp_path: Path) -> None:
    with single_node(tmp_path) as alone, Cluster(LOCAL, tmp_path, step_s=0.01) as cluster:
        reference = Reference(alone.urls[0])
        requests = draw_plan(1, LOCAL).requests[:20]
        events = [Event(0.8, "kill", 1, "api"), Event(1.2, "kill", 1, "engine")]
        plan = Plan(1, requests, events, {0: "detokenise:stop+3"})
        report = run_and_judge(cluster, plan, reference, "none")
        assert report.problems == [] and report.num_events == 4
        assert {word for word, count in report.outcomes.items() if count} == {"right", "broken", "error"}
        check_ended(cluster)


def test_what_is_left_in_redis_is_named(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.execute("SET", "kept", 1)
        server.execute("SET", "passing", 1, "EX", 100)
        server.execute("XGROUP", "CREATE", "queue", "nodes", "0", "MKSTREAM")
        server.execute("EXPIRE", "queue", 100)
        assert entries(server.client()) == {"kept": "no TTL"}
        server.execute("XADD", "queue", "*", "a", 1)
        assert entries(server.client()) == {"kept": "no TTL", "queue": "1 entries"}
        server.execute("XREADGROUP", "GROUP", "nodes", "one", "STREAMS", "queue", ">")
        server.execute("XTRIM", "queue", "MAXLEN", 0)
        assert entries(server.client()) == {"kept": "no TTL", "queue": "pending entries"}


def test_messages_to_a_process_that_is_gone_may_stay_until_their_ttl(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.execute("XADD", "{t}:out:a", "*", "a", 1)
        assert entries(server.client()) == {"{t}:out:a": "no TTL"}
        server.execute("EXPIRE", "{t}:out:a", 100)
        assert entries(server.client()) == {}
        server.execute("SET", "{t}:owner:a", 1, "EX", 100)
        assert entries(server.client()) == {"{t}:out:a": "1 entries"}


@pytest.mark.parametrize(("persistence", "after_restart"), [("none", None), ("default", b"1"), ("aof", b"1")])
def test_a_replica_without_the_last_writes_takes_over_the_port(
    tmp_path: Path, persistence: str, after_restart: bytes | None
) -> None:
    redis = LastingRedis(tmp_path, persistence)
    try:
        redis.server.execute("SET", "early", 1)
        writer = threading.Timer(0.5, redis.server.execute, ("SET", "late", 1))
        writer.start()
        redis.fail_over(1.0)
        writer.join()
        assert redis.client().mget("early", "late") == [b"1", None]
        redis.server.restart()
        assert redis.client().get("early") == after_restart
    finally:
        redis.close()


def test_processes_are_told_apart_by_their_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    known = processes.identity(child.pid)
    assert processes.still_runs(known) and child.pid in processes.tree(os.getpid())
    assert not processes.still_runs((child.pid, "1"))
    processes.send([child.pid], signal.SIGSTOP)
    while processes.state(child.pid) != "T":
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert not processes.still_runs(known) and child.pid not in processes.tree(os.getpid())


def test_shared_memory_of_a_process_is_found_open_and_mapped() -> None:
    code = "import mmap, os, time; f = os.memfd_create('a'); os.ftruncate(f, 4096); m = mmap.mmap(f, 4096); "
    code += "os.close(f); os.memfd_create('b'); print('made', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"made\n"
    assert len(processes.memory_files(child.pid)) == 2
    child.kill()
    child.wait()
