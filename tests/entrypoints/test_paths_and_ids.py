# SPDX-License-Identifier: Apache-2.0
"""The root path of a proxy, and X-Request-Id on every response."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import quote, urljoin

import httpx
import pytest
from starlette.requests import Request

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.entrypoints.openai.pages import page
from tests.entrypoints.server_process import ServerProcess, mock_server, sample

KEY = {"Authorization": "Bearer alpha"}
FRESH_ID = re.compile("[0-9a-f]{32}")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server behind a proxy at /llm, with an API key, which sends X-Request-Id; its url is without the root path."""
    folder = tmp_path_factory.mktemp("proxied")
    flags = ["--root-path", "/llm/", "--api-key", "alpha", "--enable-request-id-headers"]
    with mock_server(folder, *flags) as running:
        assert running.url.endswith("/llm")
        running.url = running.url.removesuffix("/llm")
        yield running


# path as the server receives it, status without a key, status with the key
PATHS = [
    ("/v1/models", 401, 200),
    ("/llm/v1/models", 401, 200),
    ("/llm/llm/v1/models", 401, 404),
    ("/llmx/v1/models", 401, 404),
    ("/llmv1/models", 401, 404),
    ("/LLM/v1/models", 401, 404),
    ("//llm/v1/models", 401, 404),
    ("/llm//v1/models", 401, 404),
    ("/v1/llm/models", 401, 404),
    ("/health", 200, 200),
    ("/llm/health", 200, 200),
    ("/llm/llm/health", 401, 404),
    ("/llmx/health", 401, 404),
    ("/llmhealth", 401, 404),
    ("/llm/health/llm", 401, 404),
    ("/llm/health/../v1/models", 401, 404),
    ("/llm/health%2F..%2Fv1%2Fmodels", 401, 404),
    ("/%6clm/health", 200, 200),
    ("/llm%2Fhealth", 200, 200),
    ("/llm%2fllm%2fhealth", 401, 404),
    ("/llm/metrics", 200, 200),
    ("/llm", 307, 307),
    ("/%6clm", 307, 307),
    ("/llm/", 200, 200),
    ("/", 200, 200),
    ("/llm/config-info", 401, 200),
    ("/llmx/config-info", 401, 404),
]


def status(server: ServerProcess, path: str, headers: dict[str, str]) -> int:
    """Return the status of GET for a path that is sent as it is; httpx would remove its dots."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close", *(f"{k}: {v}" for k, v in headers.items())]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(("path", "without_key", "with_key"), PATHS)
def test_key_check_and_routes_see_the_same_path(
    proxied: ServerProcess, path: str, without_key: int, with_key: int
) -> None:
    assert (status(proxied, path, {}), status(proxied, path, KEY)) == (without_key, with_key)


def test_proxies_that_strip_the_root_path_and_those_that_do_not_reach_the_generation(proxied: ServerProcess) -> None:
    body = {"prompt": "the", "max_tokens": 4, "seed": 3}
    stripped = proxied.post("/v1/completions", body, headers=KEY).json()
    kept = httpx.post(f"{proxied.url}/llm/v1/completions", json=body, headers=KEY, timeout=60).json()
    assert stripped["choices"][0]["text"] == kept["choices"][0]["text"] != ""


def test_metrics_and_refusals_name_the_path_without_the_root_path(proxied: ServerProcess) -> None:
    httpx.get(f"{proxied.url}/llm/v1/models/nobody", headers=KEY)
    httpx.get(f"{proxied.url}/llm/load")
    refused = httpx.get(f"{proxied.url}/llm/lood", headers=KEY).json()["error"]["message"]
    assert refused == "/lood: no such route; did you mean /load?"
    text = httpx.get(f"{proxied.url}/llm/metrics").text
    assert sample(text, 'http_requests_total{method="GET",path="/load",status_code="401"}') == 1
    assert "llm" not in "".join(line for line in text.splitlines() if "http_requests_total" in line)
    logged = re.findall("401 invalid_api_key for (.*) from ", proxied.stderr)
    assert logged[0] in ("/load", "/v1/models")  # the log has few lines per reason


def test_errors_under_the_root_path_have_the_shape_of_their_protocol(proxied: ServerProcess) -> None:
    for path in ("/v1/messages", "/llm/v1/messages"):
        refused = httpx.post(proxied.url + path, json={})
        too_long = httpx.get(proxied.url + path + "?" + "a" * 20_000)
        assert [response.json()["type"] for response in (refused, too_long)] == ["error", "error"]
        assert [response.status_code for response in (refused, too_long)] == [401, 414]


def test_pages_link_to_the_root_path_however_they_were_reached(proxied: ServerProcess) -> None:
    for path in ("/docs", "/llm/docs"):
        page = httpx.get(proxied.url + path).text
        assert "/llm/docs/swagger-ui-bundle.js" in page and "/llm/llm" not in page


@pytest.mark.parametrize("query", ["", "?a=1&b=%2F"])
def test_the_root_path_without_a_slash_leads_to_the_page_by_a_relative_address(
    proxied: ServerProcess, query: str
) -> None:
    answer = httpx.get(f"{proxied.url}/llm{query}")
    assert (answer.status_code, answer.headers["location"]) == (307, f"llm/{query}")
    followed = httpx.get(f"{proxied.url}/llm{query}", follow_redirects=True)
    assert followed.status_code == 200 and followed.url.raw_path == f"/llm/{query}".encode()
    assert "<title>FastDeploy" in followed.text


@pytest.mark.parametrize(
    ("root_path", "location"), [("/outer/llm", "llm/"), ("/v1:a", "v1%3Aa/"), ("/a b?", "a%20b%3F/"), ("/é", "%C3%A9/")]
)
def test_the_address_of_the_page_is_relative_to_any_root_path(root_path: str, location: str) -> None:
    path = quote(root_path)
    scope = {"type": "http", "path": "/", "raw_path": path.encode(), "query_string": b"", "headers": []}
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(config=ServerConfig(root_path=root_path))))
    answer = asyncio.run(page(Request({**scope, "app": app})))
    assert answer.headers["location"] == location
    assert urljoin(f"https://example.com{path}", location) == f"https://example.com{quote(root_path, safe='/')}/"


def request_ids(server: ServerProcess, headers: dict[str, str]) -> dict[str, str]:
    """Return X-Request-Id of a request of each kind, by the request."""
    url, keyed = server.url, {**headers, **KEY}
    body = {"prompt": "the", "max_tokens": 2}
    responses = {
        "200 /health": httpx.get(f"{url}/health", headers=headers),
        "200 /metrics": httpx.get(f"{url}/metrics", headers=headers),
        "200 /docs": httpx.get(f"{url}/llm/docs", headers=headers),
        "200 /v1/models": httpx.get(f"{url}/v1/models", headers=keyed),
        "200 /tokenize": httpx.post(f"{url}/tokenize", json={"prompt": "the"}, headers=keyed),
        "400 /tokenize": httpx.post(f"{url}/tokenize", json={"prompt": 3}, headers=keyed),
        "400 /v1/completions": httpx.post(f"{url}/v1/completions", json={"prompt": 3}, headers=keyed),
        "401 /v1/models": httpx.get(f"{url}/v1/models", headers=headers),
        "404 /nowhere": httpx.get(f"{url}/nowhere", headers=keyed),
        "405 /v1/completions": httpx.get(f"{url}/v1/completions", headers=keyed),
        "200 /v1/completions": httpx.post(f"{url}/v1/completions", json=body, headers=keyed, timeout=60),
        "200 stream": httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, headers=keyed, timeout=60),
    }
    assert [int(name[:3]) for name in responses] == [response.status_code for response in responses.values()]
    assert all(response.headers.get_list("x-request-id")[1:] == [] for response in responses.values())
    return {name: response.headers["x-request-id"] for name, response in responses.items()}


def test_every_response_has_the_client_s_request_id(proxied: ServerProcess) -> None:
    assert set(request_ids(proxied, {"X-Request-Id": "trace-7"}).values()) == {"trace-7"}


def test_every_response_has_a_fresh_request_id_if_the_client_sends_none(proxied: ServerProcess) -> None:
    ids = request_ids(proxied, {})
    generated = {name for name in ids if ids[name].startswith("cmpl-")}
    assert generated == {"200 /v1/completions", "200 stream"}, "the id of the response, as without the flag"
    assert all(FRESH_ID.fullmatch(ids[name]) for name in set(ids) - generated) and len(set(ids.values())) == len(ids)


@pytest.mark.parametrize("header", ["", "a" * 97, "caf\u00e9"])
def test_invalid_request_ids_are_replaced_and_refused_where_they_name_a_request(
    proxied: ServerProcess, header: str
) -> None:
    headers = {"X-Request-Id": header.encode("latin-1"), **{k: v.encode() for k, v in KEY.items()}}
    listed = httpx.get(f"{proxied.url}/v1/models", headers=headers)
    assert listed.status_code == 200 and FRESH_ID.fullmatch(listed.headers["x-request-id"])
    refused = httpx.post(f"{proxied.url}/v1/completions", json={"prompt": "a"}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Id")
    assert FRESH_ID.fullmatch(refused.headers["x-request-id"])


def test_errors_of_the_http_protocol_have_a_request_id(proxied: ServerProcess) -> None:
    response = httpx.get(proxied.url + "/health?" + "a" * 20_000)
    assert response.status_code == 414 and FRESH_ID.fullmatch(response.headers["x-request-id"])


def test_without_the_flag_only_generation_has_a_request_id(server: ServerProcess) -> None:
    assert "x-request-id" not in server.get("/health", headers={"X-Request-Id": "trace-7"}).headers
    body = {"prompt": "the", "max_tokens": 1}
    assert server.post("/v1/completions", body).headers["x-request-id"].startswith("cmpl-")
