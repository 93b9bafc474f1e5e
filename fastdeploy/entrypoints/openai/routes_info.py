# SPDX-License-Identifier: Apache-2.0
"""Endpoints that report on the server and the model."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fastdeploy.config.env import shown_variables
from fastdeploy.core.stats import ClientLoad, NodeStats
from fastdeploy.entrypoints.openai.clients import client_of
from fastdeploy.entrypoints.openai.openapi import Endpoint
from fastdeploy.entrypoints.openai.responses import ErrorResponse, ResponseBody
from fastdeploy.entrypoints.openai.server import ApiServer, ServerStatus
from fastdeploy.scheduler.request_states import Role
from fastdeploy.version import __version__

ClusterState = Literal["ok", "degraded: redis", "degraded: agent", "alone"]


class ModelPermission(ResponseBody, kw_only=True):
    """Permissions, which clients of OpenAI's older protocol read."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(ResponseBody, kw_only=True):
    """The served model, for the clients of OpenAI and of Anthropic.

    Attributes:
        root: the model's path
        created_at: the time of `created`, as in RFC 3339
        max_input_tokens, max_tokens: the same as `max_model_len`
        max_model_len: maximum number of tokens of prompt and output; null until the model is loaded
        architecture, dtype, quantization: of the model; null until it is loaded
        has_chat_template: conversations need no `chat_template` in the request
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "FastDeploy"
    root: str
    parent: None = None
    max_model_len: int | None
    permission: list[ModelPermission]
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None
    architecture: str | None
    dtype: str | None
    quantization: str | None
    has_chat_template: bool


class ModelList(ResponseBody, kw_only=True):
    """Body of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class HealthResponse(ResponseBody, kw_only=True):
    """State of the server.

    Attributes:
        node, role: name and present role of a node that works with others
        cluster: whether it does; `degraded: redis` while Redis does not answer, `degraded: agent` while the agent does
            not run, `alone` while no other node of its group takes requests. Requests are served in every case
    """

    status: ServerStatus
    node: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    cluster: ClusterState | UnsetType = UNSET


class VersionResponse(ResponseBody, kw_only=True):
    """Body of GET /version.

    Attributes:
        operator_library: digest of the native operators; null until the model is loaded
    """

    version: str
    operator_library: str | None


class ClientLoadResponse(ResponseBody, kw_only=True):
    """Load of one API key.

    Attributes:
        name: of the key
        num_running, num_waiting: its requests inside the engine
        num_sequences_waiting: its sequences that wait for max_concurrency
    """

    name: str
    num_running: int
    num_waiting: int
    num_sequences_waiting: int


class LoadResponse(ResponseBody, kw_only=True):
    """Body of GET /load.

    Attributes:
        server_load, num_requests: requests inside the server, under vLLM's name and FastDeploy's
        num_sequences: their sequences, prompts times n, of which there are at most max_concurrency
        num_running, num_waiting: requests inside the engine
        num_free_blocks, num_blocks: blocks of the KV cache
        num_foreign_requests: requests inside the engine whose clients are connected to other nodes
        num_leased_slots: KV blocks that this node keeps until another one has fetched them
        clients: the load of each API key, for administrators' keys only
    """

    server_load: int
    num_requests: int
    num_sequences: int
    max_concurrency: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_foreign_requests: int | UnsetType = UNSET
    num_leased_slots: int | UnsetType = UNSET
    clients: list[ClientLoadResponse] | UnsetType = UNSET


class ConfigResponse(ResponseBody, kw_only=True):
    """Body of GET /config-info.

    Attributes:
        engine: what the engine reports about itself; empty until the model is loaded
        engine_config, server: the configuration, without secrets
        cluster: how this node works with others, without secrets; empty if it works alone
        provenance: name of each value that is not a default, and where it came from
        environment: variables of the environment that the server reads
    """

    engine: dict[str, Any]
    engine_config: dict[str, Any]
    server: dict[str, Any]
    cluster: dict[str, Any]
    provenance: dict[str, str]
    environment: dict[str, str]


def server_of(request: Request) -> ApiServer:
    """Return the state of the server that handles a request."""
    server: ApiServer = request.app.state.server
    return server


def json_response(body: ResponseBody, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def list_models(request: Request) -> Response:
    """Return the served model, once for each of its names."""
    server = server_of(request)
    names = server.served_names
    cards = [_model_card(server, name) for name in names]
    return json_response(ModelList(data=cards, first_id=names[0], last_id=names[-1]))


async def get_model(request: Request) -> Response:
    """Return the served model by its name."""
    server = server_of(request)
    name = request.path_params["name"]
    if not name:  # the list of models with a slash at the end, which is no route
        raise HTTPException(404)
    server.check_model(name)
    return json_response(_model_card(server, server.response_model(name)))


def _model_card(server: ApiServer, name: str) -> ModelCard:
    created, description = server.created_s, server.description()
    requested = server.engine_config.max_model_len
    max_model_len = description.get("max_model_len", None if requested == "auto" else requested)
    numerics = description.get("fingerprint", {})
    return ModelCard(
        id=name,
        created=created,
        root=server.engine_config.model,
        max_model_len=max_model_len,
        permission=[ModelPermission(id=f"modelperm-{created}", created=created)],
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=max_model_len,
        max_tokens=max_model_len,
        architecture=description.get("architecture"),
        dtype=numerics.get("dtype"),
        quantization=numerics.get("quantization"),
        has_chat_template=server.chat_template is not None or server.tokenizer.chat_templates.has_default,
    )


async def health(request: Request) -> Response:
    """Return the state of the server: 200 if it is ready, otherwise 503."""
    server = server_of(request)
    body = HealthResponse(status=server.status)
    if server.cluster.is_clustered:
        node = server.scheduler.stats.node
        body.node = server.cluster.node_id
        body.role = node.role if node is not None else server.cluster.splitwise_role
        body.cluster = _cluster_state(node)
    return json_response(body, 200 if body.status == "ready" else 503)


def _cluster_state(node: NodeStats | None) -> ClusterState:
    if node is None:
        return "degraded: agent"
    if not node.is_redis_up:
        return "degraded: redis"
    num_ready = sum(count for role, count in node.nodes.items() if role != Role.DRAINING)
    return "ok" if num_ready > (node.role != Role.DRAINING) else "alone"


async def metrics(request: Request) -> Response:
    """Return the metrics in the format of Prometheus."""
    return Response(generate_latest(server_of(request).registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def version(request: Request) -> Response:
    """Return the versions of the server and of its native operators."""
    library = server_of(request).description().get("fingerprint", {}).get("operator_library")
    return json_response(VersionResponse(version=__version__, operator_library=library))


async def load(request: Request) -> Response:
    """Return the current numbers of requests and blocks; for an administrator's key those of each key as well."""
    server = server_of(request)
    stats = server.scheduler.stats
    num_requests = server.metrics.num_inside()
    body = LoadResponse(
        server_load=num_requests,
        num_requests=num_requests,
        num_sequences=server.metrics.num_sequences_inside(),
        max_concurrency=server.config.max_concurrency,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_free_blocks=stats.num_free_blocks,
        num_blocks=stats.num_blocks,
    )
    if stats.node is not None:
        body.num_foreign_requests = stats.node.num_foreign
        body.num_leased_slots = stats.node.num_leased_slots
    if client_of(request.scope).is_admin:
        body.clients = _client_loads(server)
    return json_response(body)


def _client_loads(server: ApiServer) -> list[ClientLoadResponse]:
    waiting = server.metrics.sequences_waiting()
    loads = [(key.name, server.scheduler.stats.clients.get(key.name, ClientLoad())) for key in server.config.keys]
    return [
        ClientLoadResponse(
            name=name,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_sequences_waiting=waiting.get(name, 0),
        )
        for name, load in loads
    ]


async def config_info(request: Request) -> Response:
    """Return the configuration and where each value came from, with secrets masked.

    If there are administrators' keys, it needs one of them.
    """
    server = server_of(request)
    server.check_admin(client_of(request.scope))
    config = asdict(server.config)
    keys = [{**key, "key": "***"} for key in config["keys"]]
    masked = {**config, "api_keys": ["***"] * len(server.config.api_keys), "keys": keys}
    return json_response(
        ConfigResponse(
            engine=dict(server.description()),
            engine_config=asdict(server.engine_config),
            server=masked,
            cluster=server.cluster.shown() if server.cluster.is_clustered else {},
            provenance=dict(server.provenance),
            environment=shown_variables(),
        )
    )


ENDPOINTS = (
    Endpoint("/v1/models", list_models, response=ModelList, tag="Models"),
    Endpoint("/v1/models/{name:path}", get_model, response=ModelCard, errors={404: ErrorResponse}, tag="Models"),
    Endpoint("/health", health, response=HealthResponse, errors={503: HealthResponse}, is_open=True, tag="Server"),
    Endpoint(
        "/ping",
        health,
        methods=("GET", "POST"),
        response=HealthResponse,
        errors={503: HealthResponse},
        is_open=True,
        tag="Server",
    ),
    Endpoint("/metrics", metrics, media_type="text/plain", is_open=True, tag="Server"),
    Endpoint("/version", version, response=VersionResponse, is_open=True, tag="Server"),
    Endpoint("/load", load, response=LoadResponse, tag="Server"),
    Endpoint("/config-info", config_info, response=ConfigResponse, errors={403: ErrorResponse}, tag="Administration"),
)
