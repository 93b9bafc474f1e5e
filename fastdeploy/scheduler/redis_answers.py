# SPDX-License-Identifier: Apache-2.0
"""What answers of Redis contain, in RESP 2 and 3."""

from __future__ import annotations

from typing import Any

FIELD = b"m"
"""The only field of our entries."""

RawEntry = tuple[bytes, bytes | None]
"""Id and payload of an entry; the payload of one that was deleted is None."""


def parse_streams(answer: Any) -> list[tuple[str, list[RawEntry]]]:
    """Return the entries by stream of an answer to XREAD or XREADGROUP, in RESP 2 or 3."""
    pairs = answer.items() if isinstance(answer, dict) else answer or []
    return [(stream.decode(), parse_entries(entries)) for stream, entries in pairs]


def parse_entries(answer: list[Any]) -> list[RawEntry]:
    """Return (id, payload) of each entry; the payload of one that was deleted is None."""
    return [(entry_id, None if fields is None else parse_map(fields).get(FIELD, b"")) for entry_id, fields in answer]


def parse_map(answer: Any) -> dict[bytes, Any]:
    """Return a map, which RESP 2 writes as a list of keys and values."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2]))


def server_identity(info: bytes) -> str:
    """Return run id and replication id."""
    lines = (line.strip() for line in info.decode(errors="replace").splitlines())
    return " ".join(line for line in lines if line.startswith(("run_id:", "master_replid:")))
