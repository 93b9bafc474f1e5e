# SPDX-License-Identifier: Apache-2.0
"""The messages of an engine server in this process, in the order in which they are sent."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.errors import InvalidRequestError, QueueFullError, RequestFailedError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine_server import EngineServer
from fastdeploy.ipc import messages
from tests.mock_engine import make_engine, save_mock_model

WAIT_MS = 30_000


def sent_tokens(folder: Path, max_tokens: int) -> list[list[int]]:
    """Return the tokens of one request, message by message."""
    engine = make_engine(EngineConfig(model=str(save_mock_model(folder))))
    found: list[list[int]] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as client:
        router.bind("inproc://engine")
        client.setsockopt(zmq.IDENTITY, b"reader")
        client.connect("inproc://engine")
        client.send(messages.encode(messages.Hello()))
        request = GenerationRequest("r", [10, 11, 12], SamplingParams(max_tokens=max_tokens))
        client.send(messages.encode(messages.AddRequest(request)))
        thread = threading.Thread(target=EngineServer(engine, router, set()).run)
        thread.start()
        while sum(map(len, found)) < max_tokens:
            if not client.poll(WAIT_MS):
                pytest.fail("the engine sends nothing")
            message = messages.decode_to_client(client.recv())
            if isinstance(message, messages.Deltas):
                tokens = [ids for _, _, ids, _, _, _ in message.plain] + [delta.token_ids for delta in message.others]
                found.append([token_id for ids in tokens for token_id in ids])
        client.send(messages.encode(messages.Shutdown()))
        thread.join()
    return found


def test_first_tokens_are_sent_at_once_and_later_steps_share_messages(tmp_path: Path) -> None:
    first, *others = sent_tokens(tmp_path, max_tokens=300)
    assert len(first) == 1, "first tokens do not wait for another step"
    assert len(others) < 299


@pytest.mark.parametrize(
    ("error", "kind", "field", "message"),
    [
        (InvalidRequestError("guided_regex", "is wrong"), "invalid", "guided_regex", "is wrong"),
        (QueueFullError("64 forms wait"), "full", "", "64 forms wait"),
        (RequestFailedError("internal error"), "internal", "", "internal error"),
    ],
)
def test_an_error_before_the_grammar_is_compiled_refuses_the_request(
    tmp_path: Path, error: Exception, kind: str, field: str, message: str
) -> None:
    engine = make_engine(EngineConfig(model=str(save_mock_model(tmp_path))))

    def prepare(request: GenerationRequest) -> Any:
        raise error

    engine.prepare = prepare  # type: ignore[method-assign]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as client:
        router.bind("inproc://engine")
        client.setsockopt(zmq.IDENTITY, b"reader")
        client.connect("inproc://engine")
        for sent in (messages.Hello(), messages.AddRequest(GenerationRequest("r", [1], SamplingParams()))):
            client.send(messages.encode(sent))
        thread = threading.Thread(target=EngineServer(engine, router, set()).run)
        thread.start()
        rejected = None
        while not isinstance(rejected, messages.Rejected):
            if not client.poll(WAIT_MS):
                pytest.fail("the engine sends nothing")
            rejected = messages.decode_to_client(client.recv())
        client.send(messages.encode(messages.Shutdown()))
        thread.join()
    assert rejected == messages.Rejected("r", kind, field, message)
