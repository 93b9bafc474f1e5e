# SPDX-License-Identifier: Apache-2.0
"""POST /v1/role, which changes the role of a node that works with others."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import shorten
from fastdeploy.core.stats import NodeStats
from fastdeploy.entrypoints.openai.bodies import parse_body, read_body
from fastdeploy.entrypoints.openai.clients import client_of, is_from_this_machine
from fastdeploy.entrypoints.openai.errors import ApiError, unavailable
from fastdeploy.entrypoints.openai.openapi import BODY_ERRORS, Endpoint
from fastdeploy.entrypoints.openai.responses import ErrorResponse, ResponseBody
from fastdeploy.entrypoints.openai.routes_info import json_response, server_of
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.scheduler.request_states import Role

ROLE_TIMEOUT_S = 5.0
POLL_S = 0.02
_ROLES = ", ".join(Role)


class RoleRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/role.

    Attributes:
        role: which requests this node prefers; draining hands the requests of other nodes over and takes no more
    """

    role: str | None = None


class RoleResponse(ResponseBody, kw_only=True):
    """Body of POST /v1/role, once the node has the role."""

    node: str
    role: str


async def set_role(request: Request) -> Response:
    """Change the role of this node, without a restart and without ending a request.

    It needs the key of an administrator or, on a server without such keys, a connection from the same machine.
    """
    server = server_of(request)
    _check_operator(server, request)
    server.check_available()
    body = parse_body(await read_body(request, server.config), RoleRequest, server.config)
    role = _checked_role(server, body.role)
    server.scheduler.set_role(role)
    return json_response(RoleResponse(node=(await _wait_for_role(server, role)).node, role=role))


def _check_operator(server: ApiServer, request: Request) -> None:
    """Raise ApiError 403 unless the client is an administrator, or is on this machine if there is none."""
    if server.keys is not None and server.keys.has_admin:
        server.check_admin(client_of(request.scope))
    elif not is_from_this_machine(request.scope):
        message = (
            "needs the API key of an administrator (`admin: true` in --api-key-file); "
            "without such keys, only a connection from the same machine may change the role"
        )
        raise ApiError(403, message, type="permission_error", code="admin_required")


def _checked_role(server: ApiServer, role: str | None) -> str:
    """Return the role; raise InvalidRequestError if it is none, or this server cannot have it."""
    if role is None:
        raise InvalidRequestError("role", f"is missing; expected one of {_ROLES}")
    if role not in set(Role):
        raise InvalidRequestError("role", f"expected one of {_ROLES}, got {shorten(role)}")
    if not server.cluster.is_clustered:
        reason = "this server works alone; start it with --scheduler-name splitwise or global to give it a role"
        raise InvalidRequestError("role", reason)
    if role in (Role.PREFILL, Role.DECODE) and not server.cluster.is_split:
        name = server.cluster.scheduler_name
        raise InvalidRequestError("role", f"{role!r} needs --scheduler-name splitwise; this server runs with {name}")
    return role


async def _wait_for_role(server: ApiServer, role: str) -> NodeStats:
    """Wait until the agent reports the role.

    Raises:
        ApiError: 503, it does not report it in time, or the engine has died.
    """
    end_s = asyncio.get_running_loop().time() + ROLE_TIMEOUT_S
    while (node := server.scheduler.stats.node) is None or node.role != role:
        server.check_available()
        if asyncio.get_running_loop().time() > end_s:
            present = "it has reported nothing" if node is None else f"its role is {node.role}"
            message = f"the node's agent has not taken the role {role} within {ROLE_TIMEOUT_S:g} s; {present}"
            raise unavailable(message, "agent_unavailable")
        await asyncio.sleep(POLL_S)
    return node


ENDPOINTS = (
    Endpoint(
        "/v1/role",
        set_role,
        methods=("POST",),
        request=RoleRequest,
        response=RoleResponse,
        errors={**BODY_ERRORS, 403: ErrorResponse},
        tag="Administration",
    ),
)
