# SPDX-License-Identifier: Apache-2.0
"""The queue that serves its clients in turn."""

from __future__ import annotations

import pytest

from fastdeploy.core.fair_queue import FairQueue


def drain(queue: FairQueue[str], num_items: int | None = None) -> str:
    return "".join(queue.pop() for _ in range(len(queue) if num_items is None else num_items))


def test_one_client_is_served_in_order_of_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "abc":
        queue.push("one", item)
    assert drain(queue) == "abc"
    with pytest.raises(IndexError):
        queue.pop()


def test_peek_returns_what_pop_will_remove() -> None:
    queue: FairQueue[str] = FairQueue()
    for client in ("greedy", "greedy", "polite"):
        queue.push(client, client)
    assert [(queue.peek(), queue.pop()) for _ in range(3)] == [
        ("greedy", "greedy"),
        ("polite", "polite"),
        ("greedy", "greedy"),
    ]
    with pytest.raises(IndexError):
        queue.peek()


def test_a_client_with_many_items_does_not_delay_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(6):
        queue.push("greedy", "g")
    assert drain(queue, 2) == "gg"
    for _ in range(2):
        queue.push("polite", "p")
    assert drain(queue) == "pgpggg"


def test_weights_are_proportions() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(12):
        queue.push("light", "l", 1)
        queue.push("heavy", "h", 3)
    first = drain(queue, 16)
    assert (first.count("l"), first.count("h")) == (4, 12)


def test_an_idle_client_gains_no_credit_and_a_busy_one_keeps_its_place() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(5):
        queue.push("busy", "b")
    assert drain(queue, 4) == "bbbb"
    for _ in range(4):
        queue.push("late", "l")
    queue.push("busy", "b")
    assert drain(queue) == "lblbll"


def test_nothing_is_remembered_of_a_busy_period_that_has_ended() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.push(str(number), "x")
    drain(queue)
    assert (queue._ends, queue._items, queue._due) == ({}, {}, [])
