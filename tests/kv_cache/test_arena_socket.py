# SPDX-License-Identifier: Apache-2.0
"""An arena that is served on a socket: whoever connects as the same user gets it, whatever others do there."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy.kv_cache import arena as arena_module
from fastdeploy.kv_cache import arena_socket
from fastdeploy.kv_cache.arena import MAGIC, Arena, ArenaError, SlotPart
from fastdeploy.kv_cache.arena_socket import arena_file, open_arena, serve_arena
from tests.kv_cache.test_arena import header, memfd

TIMEOUT_S = 30.0
PARTS = [SlotPart("target", "abc", 0, 64, 0, 1)]


@pytest.fixture
def arena() -> Iterator[Arena]:
    created = Arena.create(3, PARTS)
    yield created
    created.close()


@pytest.fixture
def path(tmp_path: Path, arena: Arena) -> str:
    path = str(tmp_path / "arena")
    serve_arena(arena, path)
    return path


def answer(tmp_path: Path, fds: list[int], message: bytes = MAGIC) -> str:
    """Return the path of a socket whose process answers one connection with these descriptors."""
    path = str(tmp_path / "peer")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def run() -> None:
        with listener, listener.accept()[0] as connection:
            socket.send_fds(connection, [message], fds)
        for fd in fds:
            os.close(fd)

    threading.Thread(target=run, daemon=True).start()
    return path


def test_the_socket_is_beside_that_of_the_engine() -> None:
    assert arena_file("ipc:///run/fd-1/engine.sock") == "/run/fd-1/arena"


def test_who_connects_reads_the_arena(arena: Arena, path: str) -> None:
    arena.generations[1] = 5
    peer = open_arena(path, TIMEOUT_S)
    assert peer.generations.tolist() == [0, 5, 0] and peer.parts == arena.parts
    with pytest.raises(ValueError, match="read-only"):
        peer.generations[0] = 1
    peer.close()


def test_peers_that_say_nothing_send_garbage_or_leave_do_not_keep_others_waiting(arena: Arena, path: str) -> None:
    peers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for i, peer in enumerate(peers):
        peer.connect(path)
        if i % 3 == 1:
            with contextlib.suppress(BrokenPipeError):  # it has been answered already
                peer.sendall(b"x" * 1000)
        elif i % 3 == 2:
            peer.close()
    open_arena(path, TIMEOUT_S).close()
    for peer in peers:
        peer.close()
    open_arena(path, TIMEOUT_S).close()


def test_a_socket_that_a_former_process_left_is_replaced(arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    serve_arena(arena, str(path))
    open_arena(str(path), TIMEOUT_S).close()


def test_after_an_error_of_accept_others_are_still_served(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_socket, "RETRY_S", 0.0)
    failures = iter([OSError("no descriptors left")])
    accept = socket.socket.accept

    def fail_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if (error := next(failures, None)) is not None:
            raise error
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    serve_arena(arena, str(tmp_path / "arena"))
    open_arena(str(tmp_path / "arena"), TIMEOUT_S).close()
    assert "no descriptors left" in caplog.text


def test_a_peer_of_another_user_gets_nothing(
    arena: Arena, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    user = os.geteuid()
    with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX) as peer:
        patch.setattr(os, "geteuid", lambda: user + 1)
        peer.settimeout(TIMEOUT_S)
        peer.connect(path)
        assert socket.recv_fds(peer, 100, 1)[:2] == (b"", [])
        with pytest.raises(ArenaError, match=f"expected a process of user {user + 1}, got one of user {user}"):
            open_arena(path, TIMEOUT_S)
    assert f"the arena is not sent: expected a process of user {user + 1}" in caplog.text


def test_where_nobody_serves_an_arena_the_error_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=f"{tmp_path}/none: .* No such file or directory"):
        open_arena(str(tmp_path / "none"), TIMEOUT_S)


@pytest.mark.parametrize("path", ["x" * 200, "a\0b", ""])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ArenaError):
        open_arena(path, TIMEOUT_S)


def test_a_peer_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        with pytest.raises(ArenaError, match="timed out"):
            open_arena(str(tmp_path / "silent"), 0.01)


@pytest.mark.parametrize(
    ("message", "content", "seals", "error"),
    [
        (MAGIC, header(1, 4096, 1), 0, "sealed"),
        (MAGIC, header(2, 4096, 1), arena_module._SEALS, "do not make up"),
        (b"FDARENA0", header(1, 4096, 1), arena_module._SEALS, "FDARENA0"),
        (MAGIC, None, 0, "expected an arena of version FDARENA1"),
    ],
)
def test_what_is_no_arena_is_refused(
    tmp_path: Path, message: bytes, content: bytes | None, seals: int, error: str
) -> None:
    fds = [] if content is None else [memfd(content, seals)]
    with pytest.raises(ArenaError, match=error):
        open_arena(answer(tmp_path, fds, message), TIMEOUT_S)
