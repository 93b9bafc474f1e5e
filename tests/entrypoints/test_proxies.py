# SPDX-License-Identifier: Apache-2.0
"""The page on proxies: its numbers are those of the code, and its configurations of nginx and Caddy work."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.entrypoints.openai import clients
from fastdeploy.entrypoints.openai.app import (
    ENDPOINTS,
    ServingChat,
    ServingCompletion,
    ServingMessages,
    ServingResponses,
)
from fastdeploy.entrypoints.openai.connection_gate import ConnectionGate
from fastdeploy.entrypoints.openai.event_stream import KEEP_ALIVE_S
from fastdeploy.entrypoints.openai.pages import DOCS_ENDPOINTS
from fastdeploy.entrypoints.openai.web_server import make_web_server
from tests.cluster.redis_server import free_port
from tests.entrypoints.server_process import ROOT, ServerProcess, mock_server
from tests.entrypoints.test_event_stream import STREAMED

PAGE = (ROOT / "docs" / "guide" / "proxies.md").read_text()
MAX_BODY_BYTES = ServerConfig().max_body_size
KEY = {"Authorization": "Bearer alpha"}
CLIENT: Any = {"headers": KEY, "verify": False, "timeout": 60}


def blocks(language: str) -> list[str]:
    """Return the code blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Proxied:
    """A server behind a proxy.

    Attributes:
        server: the server, whose own url a proxy forwards to.
        url: the server's address at the proxy, without the root path.
        root_path: the root path; empty for a host of its own.
        log: the errors and warnings of the proxy.
    """

    server: ServerProcess
    url: str
    root_path: str
    log: Path

    def post(self, path: str, body: Any) -> httpx.Response:
        """POST a body through the proxy."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + self.root_path + path, **content, **CLIENT)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET a path through the proxy, whether it is under the root path or not."""
        return httpx.get(self.url + path, verify=False, timeout=60, **options)


def nginx(folder: Path, block: str, port: int) -> tuple[list[str], str]:
    """Write the configuration of nginx; return its arguments and the scheme."""
    has_tls = " ssl;" in block
    if has_tls:
        make_certificate(folder)
        block = re.sub(r"/etc/ssl/llm\.example\.com", str(folder / "tls"), block)
        block = block.replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;")
    else:
        block = f"server {{ listen 127.0.0.1:{port}; {block} }}"
    paths = [f"{name}_temp_path {folder / name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    user = "user root;" if os.geteuid() == 0 else ""  # its workers have no access to the folder otherwise
    text = f"{user} daemon off; pid {folder}/pid; error_log {folder}/log warn; events {{}}\n"
    (folder / "nginx.conf").write_text(f"{text}http {{ access_log off; {' '.join(paths)}\n{block} }}\n")
    return ["-p", str(folder), "-c", str(folder / "nginx.conf")], "https" if has_tls else "http"


def caddy(folder: Path, block: str, port: int) -> tuple[list[str], str]:
    """Write the configuration of Caddy, which makes its certificate itself; return its arguments and the scheme."""
    has_name = block.startswith("llm.example.com {")
    scheme = "https" if has_name else "http"
    site = f"{scheme}://localhost:{port}"
    block = block.replace("llm.example.com", site) if has_name else f"{site} {{\n{block}\n}}"
    options = (
        f"{{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n\tstorage file_system {folder}\n}}"
    )
    (folder / "Caddyfile").write_text(f"{options}\n{block}\n")
    return ["run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")], scheme


def make_certificate(folder: Path) -> None:
    """Make a certificate for localhost, and its key."""
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    make += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.pem")]
    subprocess.run(make, check=True, capture_output=True, timeout=120)


@contextmanager
def running(command: list[str], url: str, log: Path) -> Iterator[None]:
    """Run a proxy; begin when it answers."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "HOME": str(log.parent)})
    try:
        end_s = time.monotonic() + 60
        while not answers(url):
            assert process.poll() is None and time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    """Return whether something answers at an address."""
    try:
        return httpx.get(url, verify=False).status_code > 0
    except httpx.TransportError:
        return False


def path_of(program: str) -> str | None:
    """Return the path of a program, None if it is not installed; those of administrators may be outside of PATH."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin")


PROGRAMS: dict[str, tuple[Callable[[Path, str, int], tuple[list[str], str]], list[str]]] = {
    "nginx": (nginx, blocks("nginx")),
    "caddy": (caddy, blocks("caddyfile")),
}
CASES = [
    pytest.param(
        (program, root_path),
        id=program + root_path,
        marks=pytest.mark.skipif(path_of(program) is None, reason=f"{program} is not installed"),
    )
    for program in PROGRAMS
    for root_path in ("", "/llm")
]


@pytest.fixture(scope="module", params=CASES)
def proxied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    """A slow server with an API key behind one of the page's configurations."""
    program, root_path = request.param
    configure, (own_host, under_path) = PROGRAMS[program]
    folder, log = tmp_path_factory.mktemp(program), tmp_path_factory.mktemp("log") / "log"
    flags = ["--api-key", "alpha", "--max-body-size", str(MAX_BODY_BYTES), "--forwarded-allow-ips", "127.0.0.1"]
    flags += ["--root-path", root_path] if root_path else []
    (folder / "model").mkdir()
    with mock_server(folder / "model", *flags, step_s=0.2) as server:
        server.url = server.url.removesuffix("/llm")
        block = (under_path if root_path else own_host).replace("127.0.0.1:8000", server.url.removeprefix("http://"))
        port = free_port()
        arguments, scheme = configure(folder, block, port)
        url = f"{scheme}://localhost:{port}"
        with running([str(path_of(program)), *arguments], url, log):
            yield Proxied(server, url, root_path, folder / "log" if program == "nginx" else log)


@pytest.mark.nightly
@pytest.mark.parametrize("path", list(STREAMED))
def test_events_arrive_while_the_request_runs(proxied: Proxied, path: str) -> None:
    """The answer is so short that a proxy which buffers it sends nothing before its end."""
    with httpx.stream("POST", proxied.url + proxied.root_path + path, json=body_of(path, 5, True), **CLIENT) as stream:
        events = stream.iter_bytes()  # whose end would end the request
        assert stream.status_code == 200 and next(events)
        assert num_running(proxied) == 1, "the first event is here before the last one"
        assert b"".join(events)
    wait_for(lambda: num_running(proxied) == 0)


@pytest.mark.nightly
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_disconnects_ends_its_request(proxied: Proxied, streams: bool) -> None:
    scheme, _, host = proxied.url.partition("://")
    tls = {"context": ssl._create_unverified_context()} if scheme == "https" else {}
    connection = (HTTPSConnection if tls else HTTPConnection)(host, **tls)
    body = json.dumps(body_of("/v1/completions", 1500, streams))
    headers = {**KEY, "Content-Type": "application/json"}
    connection.request("POST", f"{proxied.root_path}/v1/completions", body, headers)
    wait_for(lambda: num_running(proxied) == 1)
    connection.close()
    wait_for(lambda: num_running(proxied) == 0)


def body_of(path: str, num_tokens: int, streams: bool) -> dict[str, Any]:
    """Return the body of a request for a number of tokens, of which a step computes one."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {**STREAMED[path], limit: num_tokens, "stream": streams, "ignore_eos": True}


def wait_for(is_true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    end_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end_s, "it stays as it is"
        time.sleep(0.05)


def num_running(proxied: Proxied) -> int:
    """Return how many requests are inside the server."""
    return int(httpx.get(f"{proxied.server.url}/load", headers=KEY).json()["num_requests"])


@pytest.mark.nightly
def test_bodies_up_to_the_limit_reach_the_server_and_no_temporary_file(proxied: Proxied) -> None:
    padding = b" " * (MAX_BODY_BYTES - 100)
    answer = proxied.post("/v1/completions", b'{"prompt": 3,' + padding + b'"stream": false}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert proxied.post("/v1/completions", padding + b" " * 101).status_code == 413
    assert "temporary file" not in proxied.log.read_text()


@pytest.mark.nightly
def test_the_server_sees_the_address_of_the_client_and_not_one_that_it_claims(proxied: Proxied) -> None:
    transport = httpx.HTTPTransport(local_address="127.0.0.2", verify=False)
    with httpx.Client(transport=transport) as client:
        for path in ("/v1/models", "/load", "/config-info"):
            headers = {"X-Forwarded-For": "6.6.6.6"}
            assert client.get(proxied.url + proxied.root_path + path, headers=headers).status_code == 401
    wait_for(lambda: " from 127.0.0.2" in proxied.server.stderr)
    assert "6.6.6.6" not in proxied.server.stderr


@pytest.mark.nightly
def test_the_page_is_served_and_metrics_are_not(proxied: Proxied) -> None:
    page = proxied.get(proxied.root_path, follow_redirects=True)
    assert page.status_code == 200 and "<title>FastDeploy" in page.text
    assert page.url.path == f"{proxied.root_path}/"
    assert proxied.get(f"{proxied.root_path}/metrics").status_code == 403
    assert proxied.get(f"{proxied.root_path}/v1/models", headers=KEY).status_code == 200
    if proxied.root_path:
        assert "no such route" not in proxied.get("/llmx", headers=KEY).text, "it is another part of the site"


def web_server(**config: Any) -> uvicorn.Server:
    """Return a web server whose application notes the client of a request in its scope."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        scope["seen"].append(scope["client"])

    return make_web_server(application, ConnectionGate(ServerConfig(**config), lambda error, address: None))


def test_the_command_of_the_page_is_valid() -> None:
    (command,) = blocks("bash")
    config = parse_serve_args(command.split()[2:]).server
    assert (config.host, config.request_timeout) == ("127.0.0.1", 3000)
    read_timeouts_s = [3600 * int(hours) for hours in re.findall(r"proxy_read_timeout (\d+)h;", PAGE)]
    assert len(read_timeouts_s) == 2 and min(read_timeouts_s) > config.request_timeout


def test_numbers_and_names_of_the_page_are_those_of_the_code() -> None:
    config, text = ServerConfig(), " ".join(PAGE.split())
    idle_s = web_server().config.timeout_keep_alive
    assert f"has been idle for {idle_s} s" in text
    assert {int(given) for given in re.findall(r"keepalive(?:_timeout)? (\d)s", PAGE)} == {idle_s - 1}
    assert f"send an event every {KEEP_ALIVE_S:g} s" in text
    assert f"bodies of up to {config.max_body_size >> 20} MiB (`--max-body-size`)" in text
    assert PAGE.count(f"client_max_body_size {config.max_body_size >> 20}m;") == 2
    assert f"headers of up to {config.max_header_size >> 10} KiB (`--max-header-size`)" in text
    assert f"{config.timeout_body:g} s for a body (`--timeout-body`)" in text
    assert f"`--timeout-header` ({config.timeout_header:g} s)" in text
    assert f"`--max-connections` ({config.max_connections:,})" in text
    (listed,) = re.findall(r"\*\*What is open.\*\* (.*?) need no key", text)
    is_open = {endpoint.path for endpoint in (*ENDPOINTS, *DOCS_ENDPOINTS) if endpoint.is_open}
    assert set(re.findall("`(.*?)`", listed)) == {path for path in is_open if not path.startswith("/docs/")}
    (listed,) = re.findall(r"which it tells by (.*?)\. \*\*", text)
    assert {name.lower().encode() for name in re.findall("`(.*?)`", listed)} == clients._PASSED_ON


def test_streams_with_events_in_silence_are_those_of_the_page() -> None:
    kept_alive = {
        serving
        for serving in (ServingCompletion, ServingChat, ServingMessages, ServingResponses)
        if serving.keep_alive_event
    }
    assert kept_alive == {ServingMessages, ServingResponses}


@pytest.mark.parametrize(
    ("trusted", "peer", "seen"),
    [
        (("127.0.0.1",), "127.0.0.1", "9.9.9.9"),
        (("127.0.0.1", "9.9.9.0/24"), "127.0.0.1", "7.7.7.7"),
        (("127.0.0.1",), "10.0.0.1", "10.0.0.1"),
        (("127.0.0.1",), "::1", "::1"),
        (("127.0.0.1",), "::ffff:127.0.0.1", "::ffff:127.0.0.1"),
        (("::1", "::ffff:127.0.0.1"), "::1", "9.9.9.9"),
        (("::1", "::ffff:127.0.0.1"), "::ffff:127.0.0.1", "9.9.9.9"),
        (("127.0.0.1",), None, None),
        (("*",), None, "7.7.7.7"),
        (("*",), "10.0.0.1", "7.7.7.7"),
    ],
)
def test_forwarded_addresses_are_believed_as_the_page_says(
    trusted: tuple[str, ...], peer: str | None, seen: str | None
) -> None:
    config = web_server(forwarded_allow_ips=trusted).config
    config.load()
    found: list[Any] = []
    headers = [(b"x-forwarded-for", b"7.7.7.7"), (b"x-forwarded-for", b"9.9.9.9")]
    scope: Any = {"type": "http", "headers": headers, "client": (peer, 1) if peer else None, "seen": found}
    asyncio.run(config.loaded_app(scope, None, None))  # type: ignore[arg-type]
    assert [client and client[0] for client in found] == [seen]
