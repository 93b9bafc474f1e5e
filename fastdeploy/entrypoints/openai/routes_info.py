# SPDX-License-Identifier: Apache-2.0
"""Endpoints that tell something and change nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import asdict
from functools import lru_cache
from importlib import resources
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fastdeploy.config.env import shown_variables
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.version import __version__


def server_of(request: Request) -> ApiServer:
    """Return the state behind a request."""
    server: ApiServer = request.app.state.server
    return server


def json_response(content: Any, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_model_card(server_of(request))]})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    server = server_of(request)
    server.check_model(request.path_params["name"])
    return json_response(_model_card(server))


def _model_card(server: ApiServer) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created_s,
        "owned_by": "FastDeploy",
        "root": server.engine_config.model,
        "parent": None,
        "max_model_len": server.description().get("max_model_len", server.engine_config.max_model_len),
        "permission": [_permission(server.created_s)],
    }


def _permission(created_s: int) -> dict[str, Any]:
    """Return what clients of OpenAI's older protocol look for."""
    return {
        "id": f"modelperm-{created_s}",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


async def health(request: Request) -> Response:
    """GET /health, GET and POST /ping: 200 when requests can be served."""
    status = server_of(request).status
    return json_response({"status": status}, 200 if status == "ready" else 503)


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    return Response(generate_latest(server_of(request).registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def version(request: Request) -> Response:
    """GET /version."""
    library = server_of(request).description().get("fingerprint", {}).get("operator_library")
    return json_response({"version": __version__, "operator_library": library})


async def load(request: Request) -> Response:
    """GET /load: requests and blocks now."""
    server = server_of(request)
    stats = server.client.stats
    return json_response(
        {
            "num_requests": server.metrics.num_inside(),
            "max_concurrency": server.config.max_concurrency,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_free_blocks": stats.num_free_blocks,
            "num_blocks": stats.num_blocks,
        }
    )


async def config_info(request: Request) -> Response:
    """GET /config-info: what the server runs with and where each value came from, without its secrets."""
    server = server_of(request)
    masked = {**asdict(server.config), "api_keys": ["***"] * len(server.config.api_keys)}
    return json_response(
        {
            "engine": server.description(),
            "engine_config": asdict(server.engine_config),
            "server": masked,
            "provenance": server.provenance,
            "environment": shown_variables(),
        }
    )


async def page(request: Request) -> Response:
    """Return the page."""
    content, policy = _page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return Response(content, headers=headers, media_type="text/html")


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """Return the page and the policy that lets a browser run this script, ask this server, and nothing else."""
    content = resources.files("fastdeploy").joinpath("assets", "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {_digest(content, 'script')}; "
        f"style-src {_digest(content, 'style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return content, policy


def _digest(content: str, element: str) -> str:
    found = re.search(rf"<{element}>(.*?)</{element}>", content, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()}'"


ROUTES = [
    Route("/", page),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/health", health),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/metrics", metrics),
    Route("/version", version),
    Route("/load", load),
    Route("/config-info", config_info),
]
