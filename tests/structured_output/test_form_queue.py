# SPDX-License-Identifier: Apache-2.0
"""The order of forms: clients take turns, and forms that nobody waits for are skipped."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from fastdeploy.core.errors import QueueFullError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.structured_output.form_queue import MAX_WAITING_FORMS, Form, FormQueue


class Waiting:
    """A queue with the futures of those who wait, by the name of the form."""

    def __init__(self) -> None:
        self.queue = FormQueue()
        self.waiters: dict[str, Future[None]] = {}
        self.forms: dict[str, Form] = {}

    def push(self, client_id: str, *names: str, weight: float = 1.0) -> None:
        for name in names:
            form = self.forms.setdefault(name, Form(name, client_id, GuidedDecodingParams(regex=name)))
            self.waiters.setdefault(name, form.wait())
            self.queue.push(client_id, form, weight)

    def drop(self, *names: str) -> None:
        for name in names:
            del self.waiters[name]

    def order(self) -> list[str]:
        names = []
        while (form := self.queue.pop()) is not None:
            names.append(form.request_id)
        return names


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_clients_take_turns_and_each_clients_forms_keep_their_order(waiting: Waiting) -> None:
    waiting.push("a", "a1", "a2", "a3")
    waiting.push("b", "b1")
    waiting.push("c", "c1", "c2")
    assert waiting.order() == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_client_of_weight_two_has_two_turns_of_three(waiting: Waiting) -> None:
    waiting.push("a", *(f"a{i}" for i in range(6)), weight=2.0)
    waiting.push("b", *(f"b{i}" for i in range(3)))
    assert sorted(waiting.order()[:6]) == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_a_form_of_two_clients_comes_at_the_earlier_turn_and_once(waiting: Waiting) -> None:
    waiting.push("a", "a1", "a2", "a3", "shared")
    waiting.push("b", "shared")
    assert waiting.order() == ["a1", "shared", "a2", "a3"]


def test_a_form_that_nobody_waits_for_is_skipped(waiting: Waiting) -> None:
    waiting.push("a", "a1", "a2", "a3")
    waiting.drop("a2")
    assert waiting.order() == ["a1", "a3"]


def test_a_dropped_form_that_is_asked_for_again_is_compiled(waiting: Waiting) -> None:
    waiting.push("a", "a1", "a2")
    waiting.drop("a1")
    waiting.push("a", "a1")
    assert waiting.order() == ["a1", "a2"]


def test_a_client_has_a_limited_number_of_waiting_forms_and_others_are_not_affected(waiting: Waiting) -> None:
    names = [f"a{i}" for i in range(MAX_WAITING_FORMS)]
    waiting.push("a", *names)
    with pytest.raises(QueueFullError, match="64 forms of this client"):
        waiting.push("a", "one more")
    waiting.push("a", names[3])  # is in the queue already
    waiting.push("b", "b1")
    waiting.drop(names[0])
    waiting.push("a", "another")
    assert waiting.order() == [names[1], "b1", *names[2:], "another"]


def test_aborted_forms_leave_nothing_in_the_queue(waiting: Waiting) -> None:
    for i in range(10 * MAX_WAITING_FORMS):
        waiting.push("a", f"a{i}")
        waiting.drop(f"a{i}")
    assert [len(forms) for forms in waiting.queue._forms.values()] == [1]
    assert len(waiting.queue._turns) == 1
    assert waiting.order() == []
    assert not waiting.queue._forms and not waiting.queue._num_turns
