# SPDX-License-Identifier: Apache-2.0
"""/docs, /redoc and /openapi.json: open to all, without requests to other hosts, and off by a flag."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from fastdeploy.entrypoints.openai.examples import BODIES, PATH_PARAMETERS
from tests.entrypoints.openapi_fields import make_document
from tests.entrypoints.server_process import ServerProcess, mock_server

PAGES = ("/docs", "/redoc")
SOURCES = re.compile(r"""(?:src|href|spec-url)=["']?([^"' >]+)|url: ['"]([^'"]+)""")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with an API key, behind a proxy that serves it under a path."""
    with mock_server(tmp_path_factory.mktemp("docs"), "--api-key", "alpha", "--root-path", "/api") as running:
        running.url = running.url.removesuffix("/api")
        yield running


def loaded_urls(page: str) -> list[str]:
    """Return what a browser loads for a page."""
    return [first or second for first, second in SOURCES.findall(page)]


@pytest.mark.parametrize("page", PAGES)
def test_pages_load_files_of_this_host_only(server: ServerProcess, page: str) -> None:
    response = server.get(page)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    urls = loaded_urls(response.text)
    assert len(urls) >= 3 and "/openapi.json" in urls
    for url in urls:
        assert url.startswith("/") and not url.startswith("//"), f"{url} may be on another host"
        assert httpx.get(urljoin(server.url, url)).status_code == 200


@pytest.mark.parametrize("page", PAGES)
def test_policy_of_the_pages_forbids_requests_to_other_hosts(server: ServerProcess, page: str) -> None:
    policy = server.get(page).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    allowed = {source for rule in rules.values() for source in rule.split() if not source.startswith("'sha256-")}
    assert allowed == {"'none'", "'self'", "'unsafe-inline'", "data:", "blob:"}
    assert rules["connect-src"] == "'self'" and "'unsafe-inline'" not in rules["script-src"]


def test_style_sheet_loads_nothing(server: ServerProcess) -> None:
    loaded = re.findall(r"url\(([^)]*)\)|@import", server.get("/docs/swagger-ui.css").text)
    assert [url for url in loaded if not url.strip("\"'").startswith("data:")] == []


def test_scripts_of_redoc_name_no_other_host_to_load_from(server: ServerProcess) -> None:
    script = server.get("/docs/redoc.standalone.js").text
    assert 'src:"data:,"' in script, "the logo of the footer; look for its address if ReDoc has changed"
    assert "cdn." not in script


def test_bodies_open_as_examples_because_schemas_cannot_be_sent(server: ServerProcess) -> None:
    assert '"defaultModelRendering": "example"' in server.get("/docs").text


@pytest.mark.parametrize("path", sorted(set(BODIES) - {"/v1/role"}))
def test_examples_are_answered(server: ServerProcess, path: str) -> None:
    """`test_cluster_routes.py` sends the example of /v1/role, which a server alone does not have."""
    response = server.post(path, BODIES[path])
    assert response.status_code == 200, response.text


def test_examples_of_paths_are_answered(server: ServerProcess) -> None:
    paths = [path for path in make_document()["paths"] if "{" in path]
    assert [server.get(path.format_map(PATH_PARAMETERS)).status_code for path in paths] == [200] * len(paths)


def test_openapi_json_is_the_document(server: ServerProcess) -> None:
    assert server.get("/openapi.json").json() == make_document(has_flags=False)


def test_pages_need_no_key_and_name_the_root_path(keyed: ServerProcess) -> None:
    assert keyed.get("/v1/models").status_code == 401
    for page in PAGES:
        urls = loaded_urls(keyed.get(page).text)
        assert urls and all(url.startswith("/api/") for url in urls)
        assert [httpx.get(keyed.url + url.removeprefix("/api")).status_code for url in urls] == [200] * len(urls)
    document = keyed.get("/openapi.json").json()
    assert document["servers"] == [{"url": "/api"}]
    assert "401" in document["paths"]["/v1/models"]["get"]["responses"]


def test_disable_fastapi_docs_removes_the_pages(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--disable-fastapi-docs") as running:
        for path in (*PAGES, "/openapi.json", "/docs/swagger-ui.css"):
            assert running.get(path).status_code == 404
        assert running.get("/health").status_code == 200
        assert "href=" not in running.get("/").text
        assert re.search(r"^Ready: .*\(model '.*'\)$", running.stdout, re.MULTILINE)


def test_links_of_the_page_and_of_the_ready_line_open_the_documentation(keyed: ServerProcess) -> None:
    links = re.findall(r'href="(.*?)"', keyed.get("/").text)
    (shown,) = re.findall(r"^Ready: .*; documentation: (\S+), (\S+)$", keyed.stdout, re.MULTILINE)
    assert (
        [urljoin(f"{keyed.url}/api/", link) for link in links]
        == [*shown]
        == [f"{keyed.url}/api{page}" for page in PAGES]
    )
    assert [httpx.get(url).status_code for url in shown] == [200, 200]
