# SPDX-License-Identifier: Apache-2.0
"""Arenas: what one process writes another one reads, and what is no arena is refused."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from fastdeploy.kv_cache import arena as arena_module
from fastdeploy.kv_cache.arena import (
    MAGIC,
    PAGE_BYTES,
    Arena,
    ArenaError,
    SlotPart,
    check_peer,
    receive_arena,
    send_arena,
)

PARTS = [SlotPart("target", "abc", 0, 4000, 0, 1), SlotPart("states", "d", 4032, 968, 1, 1)]


@pytest.fixture
def arena() -> Iterator[Arena]:
    created = Arena.create(3, PARTS)
    yield created
    created.close()


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair(socket.AF_UNIX)
    yield ends
    for end in ends:
        end.close()


def write_slot(arena: Arena, slot: int, value: int) -> None:
    view = (np.ctypeslib.ctypes.c_uint8 * arena.slot_bytes).from_address(arena.address(slot))
    np.frombuffer(view, np.uint8)[:] = value


def read_slot(arena: Arena, slot: int) -> set[int]:
    view = (np.ctypeslib.ctypes.c_uint8 * arena.slot_bytes).from_address(arena.address(slot))
    return set(np.frombuffer(view, np.uint8).tolist())


def test_a_peer_reads_slots_generations_and_checksums(
    arena: Arena, connection: tuple[socket.socket, socket.socket]
) -> None:
    send_arena(connection[0], arena)
    peer = receive_arena(connection[1])
    write_slot(arena, 2, 7)
    arena.generations[2] = 41
    arena.checksums[2] = [5, 6]
    assert (peer.num_slots, peer.slot_bytes, peer.num_checksums) == (3, 5000, 2)
    assert list(peer.parts.values()) == PARTS
    assert [read_slot(peer, slot) for slot in range(3)] == [{0}, {0}, {7}]
    assert peer.generations.tolist() == [0, 0, 41]
    assert peer.checksums.tolist() == [[0, 0], [0, 0], [5, 6]]
    peer.close()


def test_slots_lie_on_pages_of_their_own(arena: Arena) -> None:
    addresses = [arena.address(slot) for slot in range(3)]
    assert all(address % PAGE_BYTES == 0 for address in addresses)
    assert addresses[1] - addresses[0] == addresses[2] - addresses[1] == 2 * PAGE_BYTES


def test_a_peer_cannot_write_and_a_process_of_this_server_can(
    arena: Arena, connection: tuple[socket.socket, socket.socket]
) -> None:
    send_arena(connection[0], arena)
    peer = receive_arena(connection[1])
    with pytest.raises(ValueError, match="read-only"):
        peer.generations[0] = 1
    send_arena(connection[0], arena)
    with pytest.raises(PermissionError):
        receive_arena(connection[1], is_writable=True)
    send_arena(connection[0], arena, is_writable=True)
    own = receive_arena(connection[1], is_writable=True)
    own.generations[0] = 9
    assert arena.generations[0] == 9
    peer.close()
    own.close()


def test_an_arena_cannot_be_shrunk_or_grown(arena: Arena) -> None:
    for size in (0, 1 << 24):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_an_arena_outlives_the_process_that_made_it(connection: tuple[socket.socket, socket.socket]) -> None:
    connection[0].set_inheritable(True)
    code = (
        "import socket; from fastdeploy.kv_cache.arena import Arena, SlotPart, send_arena\n"
        "arena = Arena.create(2, [SlotPart('target', '', 0, 64, 0, 1)]); arena.generations[1] = 8\n"
        f"send_arena(socket.socket(fileno={connection[0].fileno()}), arena)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[connection[0].fileno()], timeout=120)
    peer = receive_arena(connection[1])
    assert peer.generations.tolist() == [0, 8]
    peer.close()


def memfd(content: bytes, seals: int = arena_module._SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, content, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header(
    num_slots: int, slot_bytes: int, num_checksums: int, magic: bytes = MAGIC, parts: bytes | None = None
) -> bytes:
    encoded = msgspec.msgpack.encode([SlotPart("target", "", 0, 4096, 0, 1)]) if parts is None else parts
    fields = arena_module._HEADER.pack(magic, num_slots, slot_bytes, num_checksums, len(encoded))
    return (fields + encoded).ljust(3 * PAGE_BYTES, b"\0")


def part(offset: int, num_bytes: int, first_checksum: int, num_checksums: int) -> bytes:
    return msgspec.msgpack.encode([SlotPart("target", "", offset, num_bytes, first_checksum, num_checksums)])


def test_the_headers_of_these_tests_are_right() -> None:
    Arena.attach(memfd(header(1, 4096, 1))).close()


@pytest.mark.parametrize(
    ("content", "seals", "message"),
    [
        (header(1, 4096, 1), 0, "sealed"),
        (header(1, 4096, 1), fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, "sealed"),
        (b"", arena_module._SEALS, "expected an arena"),
        (header(1, 4096, 1, b"OTHER..."), arena_module._SEALS, "expected an arena of version FDARENA1"),
        (header(2, 4096, 1), arena_module._SEALS, "2 slots of 4096 bytes do not make up 12288 bytes"),
        (header(1, 1 << 60, 1), arena_module._SEALS, "do not make up"),
        (header(0, 4096, 1), arena_module._SEALS, "0 slots"),
        (header(-1, -4096, 1), arena_module._SEALS, "-1 slots"),
        (header(1, 4096, 1, parts=b"\x91\xc1"), arena_module._SEALS, "the parts of a slot cannot be read"),
        (header(1, 4096, 1, parts=b""), arena_module._SEALS, "the parts of a slot cannot be read"),
        (header(1, 4096, 1, parts=part(64, 4096, 0, 1)), arena_module._SEALS, "part 'target' lies outside"),
        (header(1, 4096, 1, parts=part(-64, 64, 0, 1)), arena_module._SEALS, "part 'target' lies outside"),
        (header(1, 4096, 1, parts=part(0, 4096, 0, 2)), arena_module._SEALS, "part 'target' lies outside"),
    ],
)
def test_what_is_no_sealed_arena_of_its_size_is_refused_and_closed(content: bytes, seals: int, message: str) -> None:
    fd = memfd(content, seals)
    with pytest.raises(ArenaError, match=message):
        Arena.attach(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_file_is_no_arena() -> None:
    with pytest.raises(ArenaError, match="expected a memfd"):
        Arena.attach(os.open(__file__, os.O_RDONLY))


def test_a_peer_of_another_user_is_refused(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_peer(connection[0])
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ArenaError, match=f"expected a process of user {user + 1}, got one of user {user}"):
        check_peer(connection[0])


def test_other_messages_than_arenas_are_refused(connection: tuple[socket.socket, socket.socket]) -> None:
    connection[0].sendall(b"FDARENA0")
    with pytest.raises(ArenaError, match="FDARENA0"):
        receive_arena(connection[1])
