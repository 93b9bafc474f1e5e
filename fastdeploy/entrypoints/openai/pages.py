# SPDX-License-Identifier: Apache-2.0
"""The page at GET /, and the documentation pages; browsers load nothing for them from other hosts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
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
_STATIC_HEADERS = {"Cache-Control": "max-age=86400", **_HEADERS}
_SWAGGER_UI = {
    "validatorUrl": None,
    "defaultModelRendering": "example",  # "Try it out" sends nothing while a body is shown as a schema
    "defaultModelsExpandDepth": 0,
    "displayRequestDuration": True,
    "syntaxHighlight": False,  # a page of /metrics would take seconds
}
_DOCS_LINKS = re.compile(r'<p id="docs">.*</p>\n')
_REDOC_OPTIONS = 'side-nav-style="path-only" path-in-middle-panel expand-responses="200"'
_REDOC_LOGO = b"https://cdn.redoc.ly/redoc/logo-mini.svg"
_REDOC_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>FastDeploy</title>
<link rel="icon" href="{root}/docs/favicon.png">
<style>
body {{ margin: 0 }}
[role=menuitem] > ul {{ display: block !important }}  /* the routes of every tag, not only of the one in view */
[role=menuitem] > label {{ padding-block: 6px; font-size: 12px }}
[role=menuitem] > label > svg {{ display: none }}
[role=menuitem] > label > span {{ white-space: normal; overflow-wrap: anywhere }}
</style>
</head>
<body>
<redoc spec-url="{root}/openapi.json" {options}></redoc>
<script src="{root}/docs/redoc.standalone.js"></script>
</body>
</html>
"""


async def page(request: Request) -> Response:
    """Return a page to try a prompt, which colours each token by its source.

    The addresses in it are relative, so that it works under any path of a proxy, if its own address ends with a slash.
    """
    if not request.scope["raw_path"].endswith(b"/"):  # /llm, of a server whose root path is /llm
        name = server_of(request).config.root_path.rpartition("/")[2]
        return RedirectResponse(_with_query(f"{quote(name, safe='')}/", request.scope["query_string"]))
    content, policy = _page()
    if server_of(request).config.disable_fastapi_docs:
        content = _DOCS_LINKS.sub("", content)
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
        swagger_ui_parameters=_SWAGGER_UI,
    ).body
    return _documentation(bytes(content).decode())


async def redoc(request: Request) -> Response:
    """Return the documentation in ReDoc."""
    root = server_of(request).config.root_path
    return _documentation(_REDOC_PAGE.format(root=html.escape(root), options=_REDOC_OPTIONS))


def _documentation(content: str) -> Response:
    policy = _DOCS_POLICY.format(script=_digest(content, "script"))
    return Response(content, headers={"Content-Security-Policy": policy, **_HEADERS}, media_type="text/html")


def _digest(content: str, element: str) -> str:
    """Return the digest by which a policy allows the inline script or style of a page; empty if there is none."""
    found = re.search(rf"<{element}>(.*?)</{element}>", content, re.DOTALL)
    if found is None:
        return ""
    return f"'sha256-{base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()}'"


def _static_path(name: str) -> Path:
    """Return the path of a file of the package `fastapi_offline`, which is located without importing it."""
    package = find_spec("fastapi_offline")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent / "static" / name


def _static_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler for a file of the package `fastapi_offline`."""

    async def handler(request: Request) -> Response:
        return FileResponse(_static_path(name), headers=_STATIC_HEADERS)

    return handler


async def redoc_script(request: Request) -> Response:
    """Return the script of ReDoc, without the address of the logo that it would load from another host."""
    script = await asyncio.to_thread(_static_path("redoc.standalone.js").read_bytes)
    return Response(script.replace(_REDOC_LOGO, b"data:,"), headers=_STATIC_HEADERS, media_type="text/javascript")


ENDPOINTS = (Endpoint("/", page, media_type="text/html", is_open=True, tag="Server"),)
DOCS_ENDPOINTS = (
    Endpoint("/openapi.json", openapi_json, is_open=True, is_documented=False),
    Endpoint("/docs", swagger_ui, is_open=True, is_documented=False),
    Endpoint("/redoc", redoc, is_open=True, is_documented=False),
    Endpoint("/docs/redoc.standalone.js", redoc_script, is_open=True, is_documented=False),
    *(
        Endpoint(f"/docs/{name}", _static_file(name), is_open=True, is_documented=False)
        for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
    ),
)
