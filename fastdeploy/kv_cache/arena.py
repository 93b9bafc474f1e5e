# SPDX-License-Identifier: Apache-2.0
"""Shared memory in which the blocks of a request wait for the engine that continues it.

    header   magic, number of slots, bytes and checksums of a slot, then the parts of a slot as msgpack
    table    generations [num_slots] uint64, checksums [num_slots, num_checksums] uint32
    slots    num_slots times slot_bytes, each at a multiple of PAGE_BYTES

The memory is a memfd that is sealed against growing and shrinking: a process that reads it would be killed by SIGBUS if
another one shrank it. The descriptor travels over a Unix socket (`send_arena`, `receive_arena`), and only to processes
of the same user. A slot's generation increases whenever it is reused, so that a reader notices that what it has copied
is no longer what it was to copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

MAGIC = b"FDARENA1"
PAGE_BYTES = 4096
_HEADER = struct.Struct("<8sqqqq")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer, as SO_PEERCRED returns them


class ArenaError(Exception):
    """Memory that cannot be used as an arena; the message says why."""


class SlotPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of each slot, such as the caches of the target model.

    Attributes:
        name: names what it holds.
        digest: of everything that the meaning of its bytes depends on; parts of unlike digests must not be imported.
        offset, num_bytes: where it lies in a slot.
        first_checksum, num_checksums: which checksums of the slot cover it.
    """

    name: str
    digest: str
    offset: int
    num_bytes: int
    first_checksum: int
    num_checksums: int


class Arena:
    """A mapped arena.

    Attributes:
        fd: its descriptor, which the arena owns.
        num_slots, slot_bytes, num_checksums: its sizes.
        parts: of each slot, by name.
        generations: [num_slots] uint64, in the shared memory.
        checksums: [num_slots, num_checksums] uint32, in the shared memory.
    """

    def __init__(self, fd: int, is_writable: bool) -> None:
        """Map an arena that exists; see `create` and `attach`."""
        self.fd = fd
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self._memory = mmap.mmap(fd, 0, mmap.MAP_SHARED, access)
        self.num_slots, self.slot_bytes, self.num_checksums, parts = _read_header(self._memory[:PAGE_BYTES])
        self.parts = {part.name: part for part in parts}
        table_bytes = self.num_slots * 8
        self.generations: NDArray[np.uint64] = np.frombuffer(self._memory, np.uint64, self.num_slots, PAGE_BYTES)
        checksums = np.frombuffer(
            self._memory, np.uint32, self.num_slots * self.num_checksums, PAGE_BYTES + table_bytes
        )
        self.checksums: NDArray[np.uint32] = checksums.reshape(self.num_slots, self.num_checksums)
        first = _first_slot(self.num_slots, self.num_checksums)
        self._first_address = np.frombuffer(self._memory, np.uint8, 1, first).ctypes.data
        self._stride = page_aligned(self.slot_bytes)

    @classmethod
    def create(cls, num_slots: int, parts: Sequence[SlotPart]) -> Arena:
        """Create an arena whose slots have these parts; its pages take memory when they are first written."""
        slot_bytes = max(part.offset + part.num_bytes for part in parts)
        num_checksums = max(part.first_checksum + part.num_checksums for part in parts)
        encoded = msgspec.msgpack.encode(parts)
        header = _HEADER.pack(MAGIC, num_slots, slot_bytes, num_checksums, len(encoded)) + encoded
        assert len(header) <= PAGE_BYTES
        fd = os.memfd_create("fastdeploy-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _total_bytes(num_slots, slot_bytes, num_checksums))
        os.pwrite(fd, header, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, is_writable=True)

    @classmethod
    def attach(cls, fd: int, is_writable: bool = False) -> Arena:
        """Map an arena of another process; the arena owns the descriptor from now on, and closes it on an error.

        Raises:
            ArenaError: the descriptor is no sealed arena of its stated size.
            OSError: it cannot be mapped as required.
        """
        try:
            _check(fd)
            return cls(fd, is_writable)
        except (ArenaError, OSError):
            os.close(fd)
            raise

    def address(self, slot: int) -> int:
        """Return the address of a slot in this process."""
        return self._first_address + slot * self._stride

    def close(self) -> None:
        """Unmap the memory; nothing may use its arrays or addresses any more."""
        del self.generations, self.checksums
        self._memory.close()
        os.close(self.fd)


def send_arena(connection: socket.socket, arena: Arena, is_writable: bool = False) -> None:
    """Send the arena's descriptor to the peer of a connected Unix socket.

    Args:
        is_writable: for a process of this server; peers get a descriptor that can only be read.

    Raises:
        ArenaError: the peer runs as another user.
    """
    check_peer(connection)
    fd = arena.fd if is_writable else os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(connection, [MAGIC], [fd])
    finally:
        if not is_writable:
            os.close(fd)


def receive_arena(connection: socket.socket, is_writable: bool = False) -> Arena:
    """Receive and map an arena from the peer of a connected Unix socket.

    Raises:
        ArenaError: the peer runs as another user, or has sent something else.
    """
    check_peer(connection)
    message, fds, _, _ = socket.recv_fds(connection, len(MAGIC), 1)
    if message != MAGIC or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ArenaError(f"expected an arena of version {MAGIC.decode()}, got {message[:16]!r}")
    return Arena.attach(fds[0], is_writable)


def check_peer(connection: socket.socket) -> None:
    """Raise ArenaError unless the peer of a Unix socket runs as the same user as this process."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise ArenaError(f"expected a process of user {os.geteuid()}, got one of user {user}")


def _check(fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ArenaError("expected a memfd, got another file") from None
    if seals & _SEALS != _SEALS:
        raise ArenaError("expected memory that is sealed against growing and shrinking")
    size = os.fstat(fd).st_size
    num_slots, slot_bytes, num_checksums, parts = _read_header(os.pread(fd, PAGE_BYTES, 0))
    if min(num_slots, slot_bytes, num_checksums) < 1 or _total_bytes(num_slots, slot_bytes, num_checksums) != size:
        raise ArenaError(f"{num_slots} slots of {slot_bytes} bytes do not make up {size} bytes")
    for part in parts:
        fits = 0 <= part.offset <= part.offset + part.num_bytes <= slot_bytes
        if not (fits and 0 <= part.first_checksum <= part.first_checksum + part.num_checksums <= num_checksums):
            raise ArenaError(f"part {part.name!r} lies outside of the slots")


def _read_header(page: bytes) -> tuple[int, int, int, list[SlotPart]]:
    """Return the number of slots, bytes and checksums of a slot, and its parts."""
    if len(page) < PAGE_BYTES or not page.startswith(MAGIC):
        raise ArenaError(f"expected an arena of version {MAGIC.decode()}, got {page[:8]!r}")
    _, num_slots, slot_bytes, num_checksums, num_encoded = _HEADER.unpack_from(page)
    try:
        encoded = page[_HEADER.size : _HEADER.size + max(0, num_encoded)]
        parts = msgspec.msgpack.decode(encoded, type=list[SlotPart])
    except (msgspec.DecodeError, ValueError) as error:
        raise ArenaError(f"the parts of a slot cannot be read: {error}") from None
    return num_slots, slot_bytes, num_checksums, parts


def page_aligned(num_bytes: int) -> int:
    """Return the bytes of the pages that hold so many bytes."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _first_slot(num_slots: int, num_checksums: int) -> int:
    """Return where the slots begin: after the header's page and the table."""
    return page_aligned(PAGE_BYTES + num_slots * (8 + 4 * num_checksums))


def _total_bytes(num_slots: int, slot_bytes: int, num_checksums: int) -> int:
    return _first_slot(num_slots, num_checksums) + num_slots * page_aligned(slot_bytes)
