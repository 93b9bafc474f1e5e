# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document is valid and complete, and changes of it are noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from fastapi import FastAPI
from openapi_spec_validator import validate
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fastdeploy.core.sampling_params import RANGES
from fastdeploy.entrypoints.openai.app import ENDPOINTS
from fastdeploy.entrypoints.openai.examples import BODIES, PATH_PARAMETERS
from fastdeploy.entrypoints.openai.openapi import build_document
from fastdeploy.entrypoints.openai.protocol import (
    FIELD_RANGES,
    WITHOUT_EFFECT,
    ChatCompletionRequest,
    CompletionRequest,
)
from tests.entrypoints.openapi_fields import RENEW, changes_since_release, make_document


def schema_of(model: type) -> dict[str, Any]:
    return dict(make_document()["components"]["schemas"][model.__name__])


def test_document_is_valid() -> None:
    validate(make_document())
    validate(build_document(ENDPOINTS, "/api", has_api_keys=True))


def test_version_can_describe_the_events_of_a_stream() -> None:
    document = make_document()
    content = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert document["openapi"] == "3.2.0"
    assert "itemSchema" in content["text/event-stream"], "3.1 and earlier versions do not have it"


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_every_field_of_a_body_has_a_description_and_its_range(model: type[msgspec.Struct]) -> None:
    schema = schema_of(model)
    properties = schema["properties"]
    assert set(properties) == {*(spec.name for spec in msgspec.structs.fields(model)), *WITHOUT_EFFECT}
    assert schema["additionalProperties"] is False
    assert [name for name, part in properties.items() if not part.get("description")] == []
    for name in set(FIELD_RANGES) & set(properties):
        if properties[name]["type"] != "boolean":
            allowed = (properties[name]["minimum"], properties[name].get("maximum"))
            assert allowed == (FIELD_RANGES[name].low, FIELD_RANGES[name].high), name


def test_ranges_of_the_document_are_those_that_are_checked() -> None:
    properties = schema_of(ChatCompletionRequest)["properties"]
    assert (properties["n"]["minimum"], properties["n"]["maximum"]) == (1, 128)
    assert (properties["top_p"]["minimum"], properties["top_p"]["maximum"]) == (0.0, 1.0)
    assert properties["stop"]["maxItems"] == 16
    assert properties["speculative"]["properties"]["num_speculative_tokens"]["maximum"] == 16
    assert set(RANGES) <= set(FIELD_RANGES)


def test_document_of_a_server_with_keys_says_which_endpoints_need_one() -> None:
    paths = build_document(ENDPOINTS, has_api_keys=True)["paths"]
    assert paths["/v1/models"]["get"]["security"] == [{"apiKey": []}, {"apiKeyHeader": []}]
    assert "401" in paths["/v1/models"]["get"]["responses"]
    assert "security" not in paths["/health"]["get"]


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each operation with its path."""
    for path, methods in make_document()["paths"].items():
        for operation in methods.values():
            yield path, operation


def test_every_body_has_an_example_and_every_example_a_body() -> None:
    assert {one.path for one in ENDPOINTS if one.request is not None} == set(BODIES), "see examples.py"
    parameters = [parameter for _, operation in operations() for parameter in operation.get("parameters", ())]
    names = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
    assert names == set(PATH_PARAMETERS)


def test_examples_are_in_the_document_and_their_schemas_allow_them() -> None:
    document = make_document()
    for path, body in BODIES.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["example"] == body
        schema = {**content["schema"], "components": document["components"]}
        jsonschema.validate(msgspec.to_builtins(body), schema, jsonschema.Draft202012Validator)


def test_operations_refer_to_the_schemas_of_bodies_and_responses() -> None:
    for path, operation in operations():
        parts = [operation["requestBody"]] if "requestBody" in operation else []
        for part in [*parts, *operation["responses"].values()]:
            for media_type, content in part["content"].items():
                if media_type == "application/json":
                    schemas = content["schema"].get("anyOf", [content["schema"]])
                    assert all(set(schema) == {"$ref"} for schema in schemas), path


def test_every_operation_is_below_one_heading_and_no_heading_is_empty() -> None:
    headings = [tag["name"] for tag in make_document()["tags"]]
    used = [tuple(operation["tags"]) for _, operation in operations()]
    assert set(used) == {(name,) for name in headings}


def test_paths_fields_and_ranges_are_those_of_the_last_release() -> None:
    changes = changes_since_release()
    print(*changes, sep="\n")
    assert not changes, f"if this release is meant to change them, name them in CHANGELOG.md and run {RENEW}"


class AsgiResponse:
    """A response that sends itself, as `GenerationResponse` does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"sent"})


def call(app: FastAPI) -> tuple[int, bytes]:
    """Return status and body of GET /."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "root_path": ""}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


async def asgi_handler(request: Request):  # type: ignore[no-untyped-def]  # FastAPI would read the annotation
    return AsgiResponse()


def test_routes_are_starlette_s_because_fastapi_s_own_lose_an_asgi_response() -> None:
    starlette_route, api_route = FastAPI(openapi_url=None), FastAPI(openapi_url=None)
    starlette_route.add_route("/", asgi_handler)
    api_route.add_api_route("/", asgi_handler)
    assert call(starlette_route) == (201, b"sent")
    assert call(api_route) == (200, b"{}"), "if this fails, FastAPI has changed and its own routes may be an option"
