# SPDX-License-Identifier: Apache-2.0
"""Builds the OpenAPI document from the table of endpoints and the structs of their bodies.

FastAPI itself documents only handlers of its own kind, which it also validates; ours are Starlette routes. Descriptions
come from docstrings and ranges from `FIELD_RANGES`. Version 3.2 is the first one that can describe the events of a
stream (`itemSchema`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, get_args

import msgspec
from msgspec.inspect import DataclassType, DictType, ListType, Metadata, StructType, Type, UnionType
from starlette.requests import Request

from fastdeploy.core.generation_request import MAX_SALT_LENGTH
from fastdeploy.core.guided_decoding import BACKENDS
from fastdeploy.core.sampling_params import (
    LOGIT_BIASES,
    MATCH,
    MAX_BAD_WORD_IDS,
    MAX_ITEMS,
    MAX_STOP_LENGTH,
    NUM_SPECULATIVE_TOKENS,
    TOKEN_IDS,
    TRUNCATION_SIDES,
    Range,
)
from fastdeploy.detokenize.messages import FUNCTION_NAME, ROLES
from fastdeploy.entrypoints.openai.examples import BODIES, PATH_PARAMETERS
from fastdeploy.entrypoints.openai.field_rules import rules_of
from fastdeploy.entrypoints.openai.load_report import FORMAT_HEADER, FORMATS, REPORT_HEADER
from fastdeploy.entrypoints.openai.middleware import MAX_HEADER_ID_LENGTH
from fastdeploy.entrypoints.openai.params import RESPONSE_FORMATS
from fastdeploy.entrypoints.openai.prompt import REASONING_EFFORTS
from fastdeploy.entrypoints.openai.protocol import FIELD_RANGES, BatchChatCompletionRequest
from fastdeploy.entrypoints.openai.responses import ErrorResponse
from fastdeploy.entrypoints.openai.serving_base import MAX_REQUEST_ID_LENGTH
from fastdeploy.scheduler.request_states import Role
from fastdeploy.version import __version__

Schema = dict[str, Any]
OPENAPI_VERSION = "3.2.0"
BODY_ERRORS: Mapping[int, type] = dict.fromkeys((400, 404, 408, 413, 415, 500, 503), ErrorResponse)
GENERATION_ERRORS: Mapping[int, type] = {**BODY_ERRORS, **dict.fromkeys((429, 504), ErrorResponse)}
REFERENCE = "#/components/schemas/{name}"
TAGS: Mapping[str, str] = {
    "Generation": "Completions and conversations, in the protocols of OpenAI and Anthropic",
    "Tokens": "Token ids of texts and conversations, and their number",
    "Models": "The served model under its names",
    "Server": "State, load, metrics and versions",
    "Administration": "Configuration, ending requests, and roles of nodes that work with others",
}
"""Heading of /docs -> what the operations below it are about, in the order of the page."""


def _bounds(allowed: Range) -> Schema:
    return {"minimum": allowed.low, **({} if allowed.high is None else {"maximum": allowed.high})}


def _printable(max_length: int) -> Schema:
    return {"minLength": 1, "maxLength": max_length, "pattern": "^[ -~]+$"}


_TOKEN_ID: Schema = {"type": "integer", **_bounds(TOKEN_IDS)}
_NON_EMPTY: Schema = {"type": "string", "minLength": 1}
_STOP_LENGTHS: Schema = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}
_LOGIT_BIAS: Schema = {
    "propertyNames": {"pattern": "^[0-9]{1,18}$"},
    "additionalProperties": {"type": "number", **_bounds(LOGIT_BIASES)},
}
_THINKING_BUDGET: Schema = {"type": "integer", **_bounds(FIELD_RANGES["reasoning_max_tokens"])}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {**_NON_EMPTY, "description": f"{', '.join(ROLES)}, or another one that the chat template knows"},
        "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _TEXT_PART}]},
        "reasoning": {"type": ["string", "null"]},
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role"],
}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"], "description": "JSON schema of the arguments"},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
}
_TOOL: Schema = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_BAD_WORD: Schema = {"type": "array", "items": _TOKEN_ID, "minItems": 1, "maxItems": MAX_BAD_WORD_IDS}
FIELD_SCHEMAS: dict[str, Schema] = {
    "messages": {"minItems": 1, "items": _MESSAGE},
    "tools": {"items": _TOOL},
    "stop": {"items": {"type": "string", **_STOP_LENGTHS}, **_STOP_LENGTHS},
    "bad_words": {"items": _NON_EMPTY},
    "stop_token_ids": {"items": _TOKEN_ID},
    "allowed_token_ids": {"items": _TOKEN_ID, "minItems": 1},
    "logprob_token_ids": {"items": _TOKEN_ID},
    "bad_words_token_ids": {"items": {"anyOf": [_TOKEN_ID, _BAD_WORD]}},
    "tokens": {"items": _TOKEN_ID},
    "logit_bias": _LOGIT_BIAS,
    "logits_processors_args": {
        "properties": {"logit_bias": {"type": "object", **_LOGIT_BIAS}, "thinking_budget": _THINKING_BUDGET},
        "additionalProperties": False,
    },
    "speculative": {
        "properties": {
            "method": {"enum": ["off", MATCH, None]},
            "num_speculative_tokens": {"type": ["integer", "null"], **_bounds(NUM_SPECULATIVE_TOKENS)},
        },
        "additionalProperties": False,
    },
    "response_format": {"properties": {"type": {"enum": list(RESPONSE_FORMATS)}}, "required": ["type"]},
    "guided_choice": {"minItems": 1},
    "structured_outputs": {
        "properties": {
            "json": {"type": ["object", "string", "boolean", "null"]},
            "regex": {"type": ["string", "null"], "minLength": 1},
            "choice": {"type": ["array", "null"], "items": _NON_EMPTY, "minItems": 1},
            "grammar": {"type": ["string", "null"], "minLength": 1},
            "json_object": {"type": ["boolean", "null"]},
            "structural_tag": {"type": ["object", "string", "null"]},
            "disable_fallback": {"type": ["boolean", "null"]},
            "backend": {"enum": [*BACKENDS, None]},
            "disable_any_whitespace": {"type": ["boolean", "null"]},
            "disable_additional_properties": {"type": ["boolean", "null"]},
            "whitespace_pattern": {"type": ["string", "null"], "minLength": 1},
        },
        "additionalProperties": False,
    },
    "truncation_side": {"enum": [*TRUNCATION_SIDES, None]},
    "reasoning_effort": {"enum": [*REASONING_EFFORTS, None]},
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_LENGTH},
    "request_id": _printable(MAX_REQUEST_ID_LENGTH),
    "role": {"enum": [role.value for role in Role]},
}
"""Field of a body -> what its schema says beyond its type and its range."""
BODY_SCHEMAS: dict[type, dict[str, Schema]] = {
    BatchChatCompletionRequest: {
        "messages": {"minItems": 1, "items": {"type": "array", "items": _MESSAGE, "minItems": 1}}
    }
}
"""Struct of a body -> the same for fields that differ from those of other bodies."""


@dataclass(frozen=True)
class Endpoint:
    """A route of the API and what its documentation says.

    Attributes:
        path: may contain `{name:path}`.
        handler: its docstring describes the endpoint.
        tag: one of `TAGS`; empty if the endpoint is not documented.
        request: struct of the body, or several of which it is one (`A | B`), with an example in `examples.BODIES`; None
            for no body.
        response: struct of the response with status 200, or several; None for other media types than JSON.
        event: struct of the events of a stream, or several; None if the endpoint does not stream.
        names_events: each event has a line with its name, and no `[DONE]` follows the last one.
        errors: status -> struct of the response.
        error: struct of errors that every endpoint may answer with.
        is_open: no API key is needed.
        is_documented: the endpoint is part of the document.
        flag: the switch of the server's configuration without which there is no such endpoint; empty for none.
    """

    path: str
    handler: Callable[[Request], Any]
    methods: tuple[str, ...] = ("GET",)
    request: Any = None
    response: Any = None
    event: Any = None
    names_events: bool = False
    errors: Mapping[int, type] = field(default_factory=dict)
    error: type = ErrorResponse
    tag: str = ""
    media_type: str = "application/json"
    is_open: bool = False
    is_documented: bool = True
    flag: str = ""


def build_document(endpoints: Sequence[Endpoint], root_path: str = "", has_api_keys: bool = False) -> Schema:
    """Return the OpenAPI document.

    Args:
        endpoints: the table of endpoints.
        root_path: path under which a proxy serves the API.
        has_api_keys: endpoints that are not open need a key.
    """
    documented = [endpoint for endpoint in endpoints if endpoint.is_documented]
    paths: Schema = {}
    for endpoint in documented:
        path = paths.setdefault(endpoint.path.replace(":path}", "}"), {})
        for method in endpoint.methods:
            path[method.lower()] = _operation(endpoint, method, has_api_keys)
    components: Schema = {"schemas": _schemas(documented)}
    if has_api_keys:
        components["securitySchemes"] = {
            "apiKey": {"type": "http", "scheme": "bearer"},
            "apiKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "FastDeploy", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": components,
    }


def describe_fields(model: type) -> dict[str, str]:
    """Return the descriptions of a struct's fields from the `Attributes` of its docstring and those of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for names, text in re.findall(r"^    ((?:\w+, )*\w+): (.*(?:\n     +.*)*)", attributes, re.MULTILINE):
            texts.update(dict.fromkeys(names.split(", "), re.sub(r"\s+", " ", text)))
    return texts


def _operation(endpoint: Endpoint, method: str, has_api_keys: bool) -> Schema:
    operation: Schema = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", endpoint.path.replace(":path", ""))]),
        "tags": [endpoint.tag],
        "summary": inspect.cleandoc(endpoint.handler.__doc__ or "").partition("\n")[0],
        "responses": _responses(endpoint, has_api_keys),
    }
    if parameters := _parameters(endpoint):
        operation["parameters"] = parameters
    if endpoint.request is not None:
        body = {"schema": _reference(endpoint.request), "example": BODIES[endpoint.path]}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if has_api_keys and not endpoint.is_open:
        operation["security"] = [{"apiKey": []}, {"apiKeyHeader": []}]
    return operation


def _parameters(endpoint: Endpoint) -> list[Schema]:
    schema: Schema = {"type": "string", "minLength": 1}
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": schema, "example": PATH_PARAMETERS[name]}
        for name in re.findall(r"\{(\w+)", endpoint.path)
    ]
    if endpoint.event is not None:
        schema = {"type": "string", **_printable(MAX_HEADER_ID_LENGTH)}
        description = "begins the response's id; returned in the header of the same name"
        parameters.append({"name": "X-Request-Id", "in": "header", "description": description, "schema": schema})
        description = f"{' or '.join(FORMATS)}: an answer that is no stream has the load in {REPORT_HEADER}"
        schema = {"type": "string"}
        parameters.append({"name": FORMAT_HEADER, "in": "header", "description": description, "schema": schema})
    return parameters


def _responses(endpoint: Endpoint, has_api_keys: bool) -> Schema:
    schema = {"type": "string"} if endpoint.response is None else _reference(endpoint.response)
    content: Schema = {endpoint.media_type: {"schema": schema}}
    if endpoint.event is not None:
        content["text/event-stream"] = {"itemSchema": _event(endpoint)}
    responses: Schema = {"200": {"description": "OK", "content": content}}
    errors = dict(endpoint.errors)
    if has_api_keys and not endpoint.is_open:
        errors[401] = endpoint.error
    for status, model in sorted(errors.items()):
        content = {"application/json": {"schema": _reference(model)}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    return responses


def _event(endpoint: Endpoint) -> Schema:
    """Return the schema of a server-sent event: an event or an error as JSON, or `[DONE]` at the end."""
    chunk = {"anyOf": [_reference(model) for model in (*models_of(endpoint.event), endpoint.error)]}
    data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
    properties: Schema = {"data": data if endpoint.names_events else {"anyOf": [data, {"const": "[DONE]"}]}}
    if endpoint.names_events:
        properties["event"] = {"type": "string"}
    return {"type": "object", "properties": properties, "required": list(properties)}


def models_of(model: Any) -> tuple[type, ...]:
    """Return the structs of one struct, of several (`A | B`), or of None."""
    return get_args(model) or ((model,) if model is not None else ())


def _reference(model: Any) -> Schema:
    references = [{"$ref": REFERENCE.format(name=one.__name__)} for one in models_of(model)]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _schemas(endpoints: Iterable[Endpoint]) -> Schema:
    """Return the schemas of all structs that the endpoints use, by name."""
    bodies = {model for endpoint in endpoints for model in models_of(endpoint.request)}
    used = {ErrorResponse, *bodies}
    for endpoint in endpoints:
        used.update((*models_of(endpoint.response), *models_of(endpoint.event), *endpoint.errors.values()))
    _, schemas = msgspec.json.schema_components(used, ref_template=REFERENCE)
    classes: dict[str, type] = {}
    for info in msgspec.inspect.multi_type_info(used):
        _collect_classes(info, classes)
    for name, schema in schemas.items():
        _describe(schema, classes[name])
        if classes[name] in bodies:
            _complete_body(schema, classes[name])
    return dict(sorted(schemas.items()))


def _collect_classes(info: Type, classes: dict[str, type]) -> None:
    """Add the structs and dataclasses of a type to `classes`, by name."""
    match info:
        case StructType(cls=cls) | DataclassType(cls=cls):
            if cls.__name__ not in classes:
                classes[cls.__name__] = cls
                for member in info.fields:
                    _collect_classes(member.type, classes)
        case UnionType(types=types):
            for part in types:
                _collect_classes(part, classes)
        case ListType(item_type=part) | DictType(value_type=part) | Metadata(type=part):
            _collect_classes(part, classes)


def _describe(schema: Schema, model: type) -> None:
    """Take the descriptions from the docstring of `model`, and simplify the schemas of its fields."""
    schema.pop("title")
    schema["description"] = inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    texts = describe_fields(model)
    for name, part in schema["properties"].items():
        _merge_types(part)
        if name in texts:
            part["description"] = texts[name]
        if part.get("default", "") is None:  # the field may be left out
            del part["default"]


def _merge_types(schema: Schema) -> None:
    """Replace `anyOf` of plain types by a list of types; every keyword applies to one type only."""
    parts = schema.get("anyOf", [])
    keys = [key for part in parts for key in part]
    if not parts or len(keys) - keys.count("type") != len(set(keys) - {"type"}) or keys.count("type") != len(parts):
        return
    del schema["anyOf"]
    for part in parts:
        schema.update(part)
    schema["type"] = [part["type"] for part in parts]


def _complete_body(schema: Schema, model: type) -> None:
    """Add ranges, lengths and what else is known of the fields of a body; unknown fields are refused."""
    properties = schema["properties"]
    schemas = {**FIELD_SCHEMAS, **BODY_SCHEMAS.get(model, {}), **getattr(model, "schemas", {})}
    for name, part in properties.items():
        if name in FIELD_RANGES and not {"integer", "number"}.isdisjoint(_types(part)):
            part.update(_bounds(FIELD_RANGES[name]))
        if name in MAX_ITEMS:
            part["maxItems"] = MAX_ITEMS[name]
        part.update(schemas.get(name, {}))
    rules = rules_of(model)
    for name, reason in rules.without_effect.items():
        properties[name] = {"description": f"accepted without effect: {reason}"}
        if name in rules.object_fields:
            properties[name]["type"] = ["object", "null"]
        if values := rules.noted.get(name):
            properties[name]["enum"] = [*values, None]
        if name == "metadata":
            properties[name] |= {"type": ["object", "null"], "additionalProperties": {"type": "string"}}
    schema["additionalProperties"] = False


def _types(schema: Schema) -> Sequence[str]:
    types = schema.get("type", ())
    return [types] if isinstance(types, str) else types
