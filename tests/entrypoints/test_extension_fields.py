# SPDX-License-Identifier: Apache-2.0
"""Objects of vLLM's clients and proxies are accepted without effect in every protocol, and the log says so once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core import notes
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.bodies import parse_body
from fastdeploy.entrypoints.openai.field_rules import EXTENSIONS
from tests.entrypoints.error_table import CHATS, COUNT_TOKENS, MODELS, VALID
from tests.entrypoints.openapi_fields import make_document
from tests.entrypoints.server_process import ServerProcess

PATHS = [path for path in MODELS if path != COUNT_TOKENS]
VALUES = {
    "kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": None},
    "vllm_xargs": {"name": "x", "values": [1, 2.5]},
}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of a process that has noted nothing."""
    monkeypatch.setattr(notes.logger, "propagate", True)
    caplog.set_level(logging.INFO, notes.logger.name)
    notes.note_once.cache_clear()
    yield caplog
    notes.note_once.cache_clear()


def parsed(path: str, **fields: Any) -> Any:
    return parse_body(json.dumps({**VALID[path], **fields}).encode(), MODELS[path], ServerConfig())


@pytest.mark.parametrize("path", PATHS)
def test_extensions_change_nothing_and_are_noted_once(path: str, log: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert parsed(path, **VALUES) == parsed(path)
    assert [record.message for record in log.records] == [
        f"the field {name} has no effect: {reason}" for name, reason in EXTENSIONS.items()
    ]


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_object_asks_for_nothing(path: str, log: pytest.LogCaptureFixture) -> None:
    assert parsed(path, kv_transfer_params={}, vllm_xargs=None) == parsed(path)
    assert log.records == []


@pytest.mark.parametrize("name", EXTENSIONS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("value", "got"), [("x", "a string"), (5, "a number"), ([{}], "an array"), (True, "a boolean")]
)
def test_other_values_than_objects_are_refused(path: str, name: str, value: Any, got: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parsed(path, **{name: value})
    assert (refused.value.field, refused.value.message) == (name, f"expected an object, got {got}")


def test_the_document_says_that_they_are_objects() -> None:
    schemas = make_document()["components"]["schemas"]
    for path in PATHS:
        assert issubclass(MODELS[path], msgspec.Struct)
        for name in EXTENSIONS:
            part = schemas[MODELS[path].__name__]["properties"][name]
            assert part["type"] == ["object", "null"] and part["description"].startswith("accepted without effect: ")


def test_an_answer_does_not_depend_on_them(server: ServerProcess) -> None:
    answers = [server.post(CHATS, {**VALID[CHATS], "seed": 1, **fields}).json() for fields in ({}, VALUES)]
    assert answers[0]["choices"] == answers[1]["choices"]
