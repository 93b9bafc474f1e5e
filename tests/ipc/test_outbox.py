# SPDX-License-Identifier: Apache-2.0
"""When the outbox sends collected deltas, on a simulated clock."""

from __future__ import annotations

from typing import Any

from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.ipc import messages
from fastdeploy.ipc.outbox import Outbox


class Sent:
    """Records what an outbox for one core sends, and when."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.log: list[tuple[float, str, list[int]]] = []
        self.outbox = Outbox(self._send, num_cores=1, clock=lambda: self.now_s)

    def step(self, now_s: float, *token_ids: int, client: str = "a", num_streams: int = 4) -> None:
        self.now_s = now_s
        for token_id in token_ids:
            self.outbox.put(client.encode(), TokenDelta("r", 0, [token_id]))
        self.outbox.send_when_due(num_streams)

    def _send(self, client: bytes, message: messages.Deltas) -> None:
        token_ids = [token_id for _, _, ids, _, _, _ in message.plain for token_id in ids]
        self.log.append((round(self.now_s, 4), client.decode(), token_ids))


def test_steps_are_sent_together_at_an_interval_that_grows_with_the_number_of_streams() -> None:
    few, many = Sent(), Sent()
    for sent, num_streams in ((few, 1), (many, 4)):
        for i in range(1, 49):
            sent.step(100 + 0.0011 * i, i, num_streams=num_streams)
    assert [len(token_ids) for _, _, token_ids in few.log] == [6] * 8, "6.6 ms are nearest to 6.7"
    assert [len(token_ids) for _, _, token_ids in many.log] == [24, 24], "26.4 ms are nearest to four times that"
    assert [token_id for _, _, token_ids in many.log for token_id in token_ids] == list(range(1, 49))


def test_interval_has_a_maximum() -> None:
    sent = Sent()
    for i in range(1, 91):
        sent.step(100 + 0.0011 * i, i, num_streams=1000)
    assert [len(token_ids) for _, _, token_ids in sent.log] == [45, 45]


def test_deltas_are_sent_before_a_step_that_would_make_them_late() -> None:
    sent = Sent()
    sent.step(100.018, 1)
    assert [token_ids for _, _, token_ids in sent.log] == [[1]], "18 ms are nearer to 26.7 than 36"
    sent.step(100.0185, 2)
    assert len(sent.log) == 1
    sent.step(100.040, 3)
    assert [token_ids for _, _, token_ids in sent.log] == [[1], [2, 3]]


def test_send_sends_the_deltas_of_all_clients() -> None:
    sent = Sent()
    sent.step(100.001, 1, client="a")
    sent.step(100.002, 2, 3, client="b")
    assert sent.log == []
    sent.outbox.send()
    assert sent.log == [(100.002, "a", [1]), (100.002, "b", [2, 3])]
    sent.outbox.send()
    assert len(sent.log) == 2


def test_plain_and_other_deltas_of_one_request_keep_their_order() -> None:
    def delta(request_id: str, token_id: int, **fields: Any) -> TokenDelta:
        return TokenDelta(request_id, 0, [token_id], **fields)

    with_prompt = delta("r", 1, prompt_logprobs=[None, TokenLogprobs(9, -0.5, 1)])
    message = messages.split_deltas([delta("q", 7), with_prompt, delta("r", 2), delta("q", 8, finish_reason="stop")])
    assert [(request_id, ids) for request_id, _, ids, _, _, _ in message.plain] == [("q", [7])]
    assert [(one.request_id, one.token_ids) for one in message.others] == [("r", [1]), ("r", [2]), ("q", [8])]
