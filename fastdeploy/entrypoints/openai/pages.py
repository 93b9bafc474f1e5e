# SPDX-License-Identifier: Apache-2.0
"""The page at GET /, and the documentation pages; browsers load nothing for them from other hosts."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from fastdeploy.entrypoints.openai.openapi import Endpoint
from fastdeploy.entrypoints.openai.routes_info import server_of

_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_LOCKED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_DOCS_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self' {script}; style-src 'self' 'unsafe-inline'; "
    f"img-src 'self' data:; worker-src blob:; {_LOCKED}"
)


async def page(request: Request) -> Response:
    """Return a page to try a prompt, which colours each token by its source.

    The addresses in it are relative, so that it works under any path of a proxy, if its own address ends with a slash.
    """
    if not request.scope["raw_path"].endswith(b"/"):  # /llm, of a server whose root path is /llm
        name = server_of(request).config.root_path.rpartition("/")[2]
        return RedirectResponse(_with_query(f"{quote(name, safe='')}/", request.scope["query_string"]))
    content, policy = _page()
    return Response(content, headers={"Content-Security-Policy": policy, **_HEADERS}, media_type="text/html")


def _with_query(url: str, query: bytes) -> str:
    return f"{url}?{query.decode('latin-1')}" if query else url


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """Return the page and a policy that allows its own script and requests to this server, and nothing else."""
    content = resources.files("fastdeploy").joinpath("assets", "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {_digest(content, 'script')}; "
        f"style-src {_digest(content, 'style')}; {_LOCKED}"
    )
    return content, policy


async def openapi_json(request: Request) -> Response:
    """Return the OpenAPI document."""
    app: FastAPI = request.app
    return Response(msgspec.json.encode(app.openapi()), media_type="application/json")


async def swagger_ui(request: Request) -> Response:
    """Return the documentation in Swagger UI."""
    root = server_of(request).config.root_path
    content = get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title="FastDeploy",
        swagger_js_url=f"{root}/docs/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/swagger-ui.css",
        swagger_favicon_url=f"{root}/docs/favicon.png",
        swagger_ui_parameters={"validatorUrl": None, "defaultModelRendering": "model", "defaultModelExpandDepth": 3},
    ).body
    return _documentation(bytes(content).decode())


async def redoc(request: Request) -> Response:
    """Return the documentation in ReDoc."""
    root = server_of(request).config.root_path
    content = get_redoc_html(
        openapi_url=f"{root}/openapi.json",
        title="FastDeploy",
        redoc_js_url=f"{root}/docs/redoc.standalone.js",
        redoc_favicon_url=f"{root}/docs/favicon.png",
        with_google_fonts=False,
    ).body
    return _documentation(bytes(content).decode())


def _documentation(content: str) -> Response:
    policy = _DOCS_POLICY.format(script=_digest(content, "script"))
    return Response(content, headers={"Content-Security-Policy": policy, **_HEADERS}, media_type="text/html")


def _digest(content: str, element: str) -> str:
    """Return the digest by which a policy allows the inline script or style of a page; empty if there is none."""
    found = re.search(rf"<{element}>(.*?)</{element}>", content, re.DOTALL)
    if found is None:
        return ""
    return f"'sha256-{base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()}'"


def _static_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler for a file of the package `fastapi_offline`, which is located without importing it."""

    async def handler(request: Request) -> Response:
        package = find_spec("fastapi_offline")
        assert package is not None and package.origin is not None
        headers = {"Cache-Control": "max-age=86400", **_HEADERS}
        return FileResponse(Path(package.origin).parent / "static" / name, headers=headers)

    return handler


ENDPOINTS = (Endpoint("/", page, media_type="text/html", is_open=True),)
DOCS_ENDPOINTS = (
    Endpoint("/openapi.json", openapi_json, is_open=True, is_documented=False),
    Endpoint("/docs", swagger_ui, is_open=True, is_documented=False),
    Endpoint("/redoc", redoc, is_open=True, is_documented=False),
    *(
        Endpoint(f"/docs/{name}", _static_file(name), is_open=True, is_documented=False)
        for name in ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")
    ),
)
