# SPDX-License-Identifier: Apache-2.0
"""The HTTP protocol: what a client sends before a handler accepts it costs bounded memory and time."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from fastdeploy.entrypoints.openai.http_protocol import HttpProtocol
from tests.entrypoints.raw_http import Answer, Connection, RawServer, ask, raw_server

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS: dict[str, Any] = {"max_header_size": 8192, "max_url_length": 4096, "max_connections": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    with raw_server(**LIMITS) as running:
        running.go_on.set()
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[RawServer]:
    """A server whose timers are short."""
    with raw_server(**LIMITS, timeout_header=0.2, timeout_body=0.3) as running:
        running.go_on.set()
        yield running


def only(answers: list[Answer]) -> Answer:
    assert len(answers) == 1
    return answers[0]


def refusal(answers: list[Answer]) -> tuple[int, str]:
    """Return status and code of the only response, which must end the connection."""
    answer = only(answers)
    assert answer.headers["connection"] == "close" and answer.headers["content-type"] == "application/json"
    return answer.status, answer.code


BASE_METHODS = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "on_message_begin": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
    "shutdown": ["self"],
    "_start_asgi_task": ["self", "cycle", "app"],
    "_unset_keepalive_if_required": ["self"],
}
BASE_ATTRIBUTES = ("loop", "parser", "server_state", "transport", "flow", "client", "pipeline", "scope", "cycle", "url")
CYCLE_ATTRIBUTES = ("scope", "transport", "message_event", "keep_alive", "response_complete", "disconnected")


def test_uvicorn_has_the_methods_and_attributes_that_the_protocol_uses() -> None:
    methods = {name: list(inspect.signature(getattr(HttpToolsProtocol, name)).parameters) for name in BASE_METHODS}
    assert methods == BASE_METHODS
    config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
    base = HttpToolsProtocol(config, ServerState(), {}, _loop=object())  # type: ignore[arg-type]
    base.on_message_begin()
    assert [name for name in BASE_ATTRIBUTES if not hasattr(base, name)] == []
    written = inspect.getsource(RequestResponseCycle.__init__)
    assert [name for name in CYCLE_ATTRIBUTES if f"self.{name} =" not in written] == []
    assert "transport.close()" in inspect.getsource(RequestResponseCycle.send)
    assert "self.keep_alive" in inspect.getsource(RequestResponseCycle.send)
    source = inspect.getsource(uvicorn.Server.startup)
    assert "config=config" in source and "server_state=self.server_state" in source and "self.started = True" in source


def test_a_connection_reaches_every_override(server: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[str] = set()

    def recorded(name: str) -> Any:
        method = vars(HttpProtocol)[name]

        def call(*args: Any) -> Any:
            reached.add(name)
            return method(*args)

        return call

    overridden = [name for name in vars(HttpProtocol) if name in BASE_METHODS]
    assert set(BASE_METHODS) - set(overridden) == {"_unset_keepalive_if_required"}
    for name in overridden:
        monkeypatch.setattr(HttpProtocol, name, recorded(name))
    assert [answer.status for answer in ask(server.address, POST % 3, b"abc", LAST_GET)] == [200, 200]
    server.wait_until(lambda: server.gate.num_connections == 0)
    assert set(overridden) - reached == {"shutdown"}


def test_headers_have_a_limit_which_counts_32_bytes_per_header(server: RawServer) -> None:
    size = 8192 - len("Host" + "x") - len("Connection" + "close") - len("a") - 3 * 32
    request = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\na: %b\r\n\r\n"
    assert only(ask(server.address, request % (b"v" * size))).status == 200
    assert refusal(ask(server.address, request % (b"v" * (size + 1)))) == (431, "headers_too_large")
    endless = b"GET /a HTTP/1.1\r\na: " + b"v" * 12_300
    assert refusal(ask(server.address, endless)) == (431, "headers_too_large")
    many = b"GET /a HTTP/1.1\r\n" + b"a:\r\n" * 250
    assert refusal(ask(server.address, many)) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "begin", [b"GET /a HTTP/1.1\r\na: ", b"GET /a HTTP/1.1\r\n", b"\r\n", CHUNKED + b"1;", CHUNKED + b"0\r\na:"]
)
def test_megabytes_without_an_end_cost_no_memory(server: RawServer, begin: bytes) -> None:
    part = (b"\r\n" if begin == b"\r\n" else b"v") * 50_000
    before = resident_bytes()
    with Connection(server.address) as connection:
        connection.send(begin)
        assert not all(connection.send(part) for _ in range(3000))
    assert resident_bytes() - before < 16 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_urls_have_a_limit(server: RawServer) -> None:
    request = b"GET /%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert only(ask(server.address, request % (b"a" * 4095))).status == 200
    assert refusal(ask(server.address, request % (b"a" * 4096))) == (414, "url_too_long")
    assert refusal(ask(server.address, b"GET /", *[b"a" * 1000] * 5)) == (414, "url_too_long")


def test_url_and_headers_may_both_be_as_long_as_allowed(server: RawServer) -> None:
    headers = b"Connection: close\r\na: " + b"v" * 8000
    assert only(ask(server.address, b"GET /" + b"a" * 4095, b" HTTP/1.1\r\n", headers, b"\r\n\r\n")).status == 200


def test_unfinished_headers_end_with_408(hasty: RawServer) -> None:
    assert refusal(ask(hasty.address, b"GET /a HT")) == (408, "request_timeout")
    assert refusal(ask(hasty.address, b"\r\n")) == (408, "request_timeout")
    answers = ask(hasty.address, GET + b"GET /b HTTP/1.1\r\nHos")
    assert [answer.status for answer in answers] == [200, 408]


def test_headers_that_arrive_byte_by_byte_do_not_extend_the_time(hasty: RawServer) -> None:
    with Connection(hasty.address) as connection:
        connection.send(b"GET /a HTTP/1.1\r\na: ")
        while connection.send(b"v") and hasty.gate.num_connections:
            hasty.wait_until(lambda: True)
        hasty.wait_until(lambda: hasty.gate.num_connections == 0)


def test_a_connection_that_sends_nothing_is_closed_without_a_response(hasty: RawServer) -> None:
    with Connection(hasty.address) as connection:
        assert connection.is_closed()


def test_unfinished_bodies_end_with_408(hasty: RawServer) -> None:
    assert refusal(ask(hasty.address, POST % 10 + b"abc")) == (408, "request_timeout")
    assert refusal(ask(hasty.address, CHUNKED + b"3\r\nab")) == (408, "request_timeout")
    assert [answer.status for answer in ask(hasty.address, GET + POST % 1)] == [200, 408]


def test_the_time_of_a_body_begins_with_its_turn() -> None:
    with raw_server(**LIMITS, timeout_body=0.3) as running, Connection(running.address) as connection:
        connection.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + POST % 3)
        with Connection(running.address) as other:  # its timer begins later and ends first
            other.send(POST % 3)
            answer = other.read()
            assert answer is not None and answer.status == 408
        running.go_on.set()
        waited = connection.read()
        connection.send(b"abc")
        late = connection.read()
        assert waited is not None and late is not None and (waited.status, late.status) == (200, 200)


def test_a_response_before_the_end_of_the_body_ends_the_connection(server: RawServer) -> None:
    unread = b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    assert refusal(ask(server.address, unread % 30_000_000)) == (401, "invalid_api_key")
    assert refusal(ask(server.address, unread % 3_000_000, *[b"x" * 100_000] * 30)) == (401, "invalid_api_key")
    assert [answer.status for answer in ask(server.address, unread % 3 + b"abc" + LAST_GET)] == [401, 200]


def test_a_client_can_send_the_rest_of_a_body_after_an_early_response(server: RawServer) -> None:
    with Connection(server.address) as connection:
        connection.send(b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n")
        server.wait_until(lambda: server.seen[-1] == "/unread")
        assert connection.send(b"x" * 20_000_000)
        answer = connection.read()
    assert answer is not None and answer.status == 401


def test_a_body_that_arrives_after_its_headers_keeps_the_connection(server: RawServer) -> None:
    server.seen.clear()
    with Connection(server.address) as connection:
        connection.send(POST % 3)
        server.wait_until(lambda: server.seen == ["/a"])
        connection.send(b"abc")
        first = connection.read()
        connection.send(LAST_GET)
        second = connection.read()
    assert first is not None and second is not None
    assert (first.status, "connection" in first.headers, second.status) == (200, False, 200)


def test_the_body_of_an_unread_request_is_not_kept(server: RawServer) -> None:
    before = resident_bytes()
    with Connection(server.address) as connection:
        connection.send(b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 400000000\r\n\r\n")
        while connection.send(b"x" * 2**20):
            pass
    assert resident_bytes() - before < 16 * 2**20


def test_expect_continue_is_answered_only_if_the_body_is_wanted(server: RawServer) -> None:
    expecting = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n"
    with Connection(server.address) as connection:
        connection.send(expecting % (b"/a", 3))
        assert connection.socket.recv(25, 0) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(b"abc")
        answer = connection.read()
        assert answer is not None and answer.status == 200
    assert refusal(ask(server.address, expecting % (b"/unread", 3)))[0] == 401
    assert refusal(ask(server.address, expecting % (b"/a", 40_000_000))) == (413, "request_too_large")


def test_pipelined_requests_are_answered_in_order(server: RawServer) -> None:
    requests = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(20))
    answers = ask(server.address, requests + LAST_GET)
    assert [answer.body.split(b'"')[3] for answer in answers] == [*(b"/%d" % number for number in range(20)), b"/last"]


def test_too_many_pipelined_requests_are_refused_after_the_responses_before(server: RawServer) -> None:
    answers = ask(server.address, GET * 5000)
    assert [answer.status for answer in answers] == [200] * 65 + [400]
    assert answers[-1].code == "invalid_http"


def test_a_running_request_learns_of_a_disconnect_while_others_are_queued() -> None:
    with raw_server(**LIMITS) as running:
        with Connection(running.address) as connection:
            connection.send(b"GET /disconnect HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
            running.wait_until(lambda: running.seen == ["/disconnect"])
        running.wait_until(lambda: running.seen == ["/disconnect", "disconnected"])


def test_an_error_waits_for_the_responses_before_it(server: RawServer) -> None:
    answers = ask(server.address, GET + GET + b"GET /" + b"a" * 5000)
    assert [answer.status for answer in answers] == [200, 200, 414]
    answers = ask(server.address, GET + CHUNKED + b"zz\r\n" + GET)
    assert [answer.status for answer in answers] == [200, 400]


def test_trailers_are_no_headers_of_this_request_or_the_next(server: RawServer) -> None:
    chunked = CHUNKED + b"3\r\nabc\r\n0\r\nX-Secret: 1\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n"
    for answer in ask(server.address, chunked + LAST_GET):
        assert answer.status == 200 and b"x-secret" not in answer.body and b"x-forwarded-for" not in answer.body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"GET /a HTTP/1.1\r\nHo st: x\r\n\r\n",
        b"GET /a HTTP/1.1\r\na: b\x00c\r\n\r\n",
        b"GET /a HTTP/1.1\nHost: x\n\n\n\x00",
        b"GET a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /a HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /a HTTP/0.9\r\nHost: x\r\n\r\n",
        b"GET /a\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"FETCH /a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_not_valid_http_gets_a_typed_400(server: RawServer, request_bytes: bytes) -> None:
    assert refusal(ask(server.address, request_bytes)) == (400, "invalid_http")


def test_http_1_0_is_answered_and_closed(server: RawServer) -> None:
    answer = only(ask(server.address, b"GET /a HTTP/1.0\r\n\r\n"))
    assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_upgrades_are_answered_as_plain_http(server: RawServer) -> None:
    for protocol in (b"websocket", b"h2c"):
        upgrade = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % protocol
        answer = only(ask(server.address, upgrade + GET))
        assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_refusals_without_a_handler_are_reported(server: RawServer) -> None:
    server.refused.clear()
    ask(server.address, b"GET /" + b"a" * 5000)
    assert server.refused == [414]
