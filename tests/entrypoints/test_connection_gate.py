# SPDX-License-Identifier: Apache-2.0
"""Limits on connections, on requests of one address, and on the bodies that are in memory."""

from __future__ import annotations

import asyncio
import random
import shutil
import ssl
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.openai.connection_gate import BodyInFlight, ConnectionGate
from fastdeploy.entrypoints.openai.http_protocol import HttpProtocol
from tests.entrypoints.raw_http import Answer, Connection, RawServer, ask, raw_server

KIB, MIB = 2**10, 2**20
GET = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
FORWARDED = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Forwarded-For: %b\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"


def gate_of(**config: object) -> ConnectionGate:
    return ConnectionGate(ServerConfig(**config), lambda error, address: None)  # type: ignore[arg-type]


def codes(gate: ConnectionGate, addresses: list[str]) -> list[str | None]:
    """Connect from each address; return the codes of the errors."""
    errors = [gate.connect(address) for address in addresses]
    return [error and error.code for error in errors]


def test_connections_have_a_limit_per_server() -> None:
    gate = gate_of(max_connections=3)
    full = "too_many_connections"
    assert codes(gate, ["1.1.1.1", "127.0.0.1", "2.2.2.2", "3.3.3.3", ""]) == [None, None, None, full, full]
    for address in ("3.3.3.3", "", "1.1.1.1"):
        gate.disconnect(address)
    assert codes(gate, ["3.3.3.3", "3.3.3.3"]) == [None, full]
    assert codes(gate_of(max_connections=0), ["1.1.1.1"] * 100) == [None] * 100


def test_connections_have_a_limit_per_address() -> None:
    gate = gate_of(max_connections_per_address=2)
    full = "too_many_connections"
    assert codes(gate, ["1.1.1.1"] * 3 + ["1.1.1.2", "::ffff:1.1.1.1"]) == [None, None, full, None, full]
    assert codes(gate, ["2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::1"]) == [None, None, full, None]
    for address in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", ""):
        assert codes(gate, [address] * 5) == [None] * 5
    assert codes(gate_of(max_connections_per_address=0), ["1.1.1.1"] * 300) == [None] * 300


def test_connections_of_trusted_proxies_are_limited_by_forwarded_address() -> None:
    gate = gate_of(max_connections_per_address=1, forwarded_allow_ips=("10.0.0.0/8", "2001:db8::7"))
    assert codes(gate, ["10.1.2.3"] * 3 + ["2001:db8::7"] * 3) == [None] * 6
    assert codes(gate, ["11.1.2.3", "11.1.2.3"]) == [None, "too_many_connections"]
    trusting = gate_of(max_connections_per_address=1, forwarded_allow_ips=("*",))
    assert codes(trusting, ["1.1.1.1", "1.1.1.1"]) == [None, None]


def test_every_worker_has_its_share_of_the_limits() -> None:
    gate = gate_of(max_connections=7, workers=3)
    assert [code is None for code in codes(gate, ["1.1.1.1"] * 4)] == [True, True, True, False]
    gate = gate_of(max_connections_per_address=7, workers=3)
    assert [code is None for code in codes(gate, ["1.1.1.1"] * 4)] == [True, True, True, False]
    gate = gate_of(max_total_body_size=9 * MIB, max_body_size=MIB, workers=3)
    assert gate.take_body_bytes("", 3 * MIB) is None and gate.take_body_bytes("", 1) is not None


@pytest.mark.parametrize("name", ["", "a", "1.2.3.4.5", "10.0.0.1/8", "localhost"])
def test_proxies_are_given_as_addresses_or_networks(name: str) -> None:
    with pytest.raises(ConfigError, match="forwarded_allow_ips"):
        ServerConfig(forwarded_allow_ips=(name,))


def test_small_bodies_have_room_while_large_ones_fill_the_memory() -> None:
    gate = gate_of(max_total_body_size=MIB, max_body_size=MIB)
    large, small, other = BodyInFlight(gate), BodyInFlight(gate), BodyInFlight(gate)
    assert large.add(MIB + 64 * KIB) and gate.body_bytes == MIB
    assert small.add(64 * KIB) and small.error is None
    assert not other.add(64 * KIB + 1) and other.error is not None
    assert (other.error.status, other.error.code) == (503, "bodies_in_flight")
    assert other.error.headers == {"Retry-After": "1"}
    large.release()
    large.release()
    assert gate.body_bytes == 0 and not other.add(1)


def test_one_client_may_fill_half_of_the_memory_for_bodies() -> None:
    gate = gate_of(max_total_body_size=4 * MIB, max_body_size=MIB)
    bodies = [BodyInFlight(gate) for _ in range(4)]
    for body in bodies:
        body.count_for("greedy")
    assert [body.add(MIB + 64 * KIB) for body in bodies] == [True, True, False, False]
    polite = BodyInFlight(gate)
    assert polite.add(MIB)
    polite.count_for("polite")
    assert polite.error is None and polite.add(64 * KIB)


def check_random_bodies(seed: int) -> None:
    """Let bodies of several clients grow and end at random; check the gate's counts against a plain model."""
    rng = random.Random(seed)
    gate = gate_of(max_total_body_size=2 * MIB, max_body_size=rng.choice([KIB, MIB, 2 * MIB]))
    bodies: list[BodyInFlight] = []
    held: dict[BodyInFlight, int] = {}
    for _ in range(200):
        kind = rng.randrange(4)
        if kind == 0 or not bodies:
            bodies.append(BodyInFlight(gate))
            held[bodies[-1]] = 0
        body = rng.choice(bodies)
        if kind < 3:
            count = rng.randrange(1, 200 * KIB)
            held[body] += count if body.add(count) else 0
            if rng.random() < 0.3 and not body.client:
                body.count_for(rng.choice("abc"))
        else:
            body.release()
            bodies.remove(body)
        assert 0 <= gate.body_bytes <= 2 * MIB
        assert gate.body_bytes <= sum(max(0, held[body] - 64 * KIB) for body in bodies)
    for body in bodies:
        body.release()
    assert gate.body_bytes == 0 and not gate._bytes_of_client


def test_random_bodies_never_exceed_the_memory_and_return_all_of_it() -> None:
    for seed in range(300):
        check_random_bodies(seed)


@pytest.mark.nightly
def test_many_random_bodies_never_exceed_the_memory() -> None:
    for seed in range(1000, 6000):
        check_random_bodies(seed)


def status(answers: list[Answer]) -> list[int]:
    return [answer.status for answer in answers]


def test_a_connection_too_many_gets_503_and_later_ones_are_served() -> None:
    with raw_server(max_connections=2) as server:
        with Connection(server.address) as first, Connection(server.address) as second:
            for connection in (first, second):
                connection.send(GET.replace(b"close", b"keep-alive"))
                assert connection.read() is not None
            [refused] = ask(server.address, GET)
            assert (refused.status, refused.code) == (503, "too_many_connections")
            assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        server.wait_until(lambda: server.gate.num_connections == 0)
        assert status(ask(server.address, GET)) == [200]
        assert server.refused == [503]


def test_forwarded_addresses_have_a_limit_on_requests_in_flight() -> None:
    with raw_server(max_connections_per_address=2) as server:
        waiting = [Connection(server.address) for _ in range(2)]
        for connection in waiting:
            connection.send(FORWARDED % (b"/wait", b"5.6.7.8, 9.9.9.9"))
        server.wait_until(lambda: server.seen == ["/wait"] * 2)
        [refused] = ask(server.address, FORWARDED % (b"/a", b"9.9.9.9"))
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "server_overloaded", "1")
        assert status(ask(server.address, FORWARDED % (b"/a", b"5.6.7.8"))) == [200]
        assert ask(server.address, FORWARDED % (b"/client", b"5.6.7.8"))[0].body == b'"5.6.7.8"'
        server.go_on.set()
        assert [answer.status for connection in waiting if (answer := connection.read())] == [200, 200]
        assert status(ask(server.address, FORWARDED % (b"/a", b"9.9.9.9"))) == [200]


def test_forwarded_addresses_of_others_than_trusted_proxies_are_ignored() -> None:
    with raw_server(forwarded_allow_ips=("10.0.0.1",)) as server:
        assert ask(server.address, FORWARDED % (b"/client", b"5.6.7.8"))[0].body == b'"127.0.0.1"'


def test_bodies_beyond_the_memory_get_503_and_small_ones_are_read() -> None:
    with raw_server(max_total_body_size=2 * MIB, max_body_size=2 * MIB) as server:
        with Connection(server.address) as first, Connection(server.address) as second:
            first.send(POST % (2 * MIB, b""), b"x" * (2 * MIB - 1))
            server.wait_until(lambda: server.gate.body_bytes == 2 * MIB - 64 * KIB - 1)
            second.send(POST % (2 * MIB, b"Connection: close\r\n"), b"x" * (2 * MIB))
            answer = second.read()
            assert answer is not None and (answer.status, answer.code) == (503, "bodies_in_flight")
            assert answer.headers["retry-after"] == "1" and second.is_closed()
            small = POST % (64 * KIB, b"Connection: close\r\n") + b"x" * 64 * KIB
            assert status(ask(server.address, small)) == [200]
            first.send(b"x")
            answer = first.read()
            assert answer is not None and answer.status == 200
        server.wait_until(lambda: server.gate.body_bytes == 0)


def test_bodies_of_closed_connections_are_released() -> None:
    with raw_server() as server:
        pipelined = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
        for begin in (b"", pipelined):
            connection = Connection(server.address)
            connection.send(begin + POST % (MIB, b"") + b"x" * 200 * KIB)
            server.wait_until(lambda: server.gate.body_bytes > 0)
            connection.close()
            server.go_on.set()
            server.wait_until(lambda: server.gate.body_bytes == 0)
            server.go_on.clear()


def test_bodies_of_queued_requests_are_released_when_the_connection_is_lost() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it has no time to begin")

    async def lose_connection() -> tuple[int, int]:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        gate = gate_of()
        protocol = HttpProtocol(gate, config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(Mock(asyncio.Transport, get_extra_info=lambda name: None))
        protocol.data_received(GET.replace(b"close", b"keep-alive") + POST % (MIB, b"") + b"x" * 100 * KIB)
        held = gate.body_bytes
        protocol.connection_lost(ConnectionError())
        return held, gate.body_bytes

    assert asyncio.run(lose_connection()) == (36 * KIB, 0)


def test_bodies_of_one_client_leave_half_of_the_memory_to_others() -> None:
    with raw_server(max_total_body_size=4 * MIB, max_body_size=MIB) as server:
        connections = [Connection(server.address) for _ in range(3)]
        for number, connection in enumerate(connections):
            connection.send(POST % (MIB, b""), b"x" * (MIB - 1))
            held = min(number + 1, 2) * (MIB - 1 - 64 * KIB)
            server.wait_until(lambda held=held: held <= server.gate.body_bytes <= 2 * MIB)  # type: ignore[misc]
        answer = connections[2].read()
        assert answer is not None and (answer.status, answer.code) == (503, "bodies_in_flight")
        for connection in connections[:2]:
            connection.send(b"x")
            answer = connection.read()
            assert answer is not None and answer.status == 200
        for connection in connections:
            connection.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files with a key and its certificate."""
    folder: Path = tmp_path_factory.mktemp("certificate")
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subprocess.run([*make, "-subj", "/CN=localhost"], check=True, capture_output=True, timeout=120)
    return key, certificate


def tls_status(server: RawServer, *parts: bytes) -> int | None:
    """Return the status of the first response; the server waits for the client to close the connection."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with Connection(server.address, context) as connection:
        connection.send(*parts)
        answer = connection.read()
        return answer and answer.status


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_connections_have_the_same_limits(certificate: tuple[str, str]) -> None:
    key, file = certificate
    with raw_server(ssl_keyfile=key, ssl_certfile=file, timeout_body=1) as server:
        assert tls_status(server, GET) == 200
        assert tls_status(server, b"GET /" + b"a" * 20_000) == 414
        assert tls_status(server, b"GET /a HTTP/1.1\r\na: " + b"v" * 100_000) == 431
        assert tls_status(server, POST % (9, b"") + b"abc") == 408
        unread = b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        assert tls_status(server, unread, b"x" * 1_000_000) == 401


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_unfinished_tls_handshakes_end(certificate: tuple[str, str]) -> None:
    key, file = certificate
    with raw_server(ssl_keyfile=key, ssl_certfile=file, timeout_header=0.3) as server:
        with Connection(server.address) as silent, Connection(server.address) as begun:
            begun.send(b"\x16\x03\x01\x02\x00\x01")
            assert silent.is_closed() and begun.is_closed()
        assert tls_status(server, GET) == 200
