# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between mock engines: real arenas, whose slots hold a digest of the tokens up to a block's end."""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import Handover, KVImage
from fastdeploy.kv_cache.arena import Arena, ArenaError, SlotPart

LAYOUT = {"target": "mock"}
BLOCK_SIZE = 64
CONTENT_BYTES = 8


class MockTransfer:
    """The blocks of one engine.

    A slot of the right generation with a wrong content raises AssertionError, because then slots were freed too early.

    Attributes:
        is_moving: whether `pop_handovers` has to be called again.
        num_imported_tokens: of all imports.
    """

    def __init__(self, num_slots: int, export_s: float = 0.0, import_s: float = 0.0) -> None:
        """Start without peers; exports and imports take the given times."""
        self.arena = Arena.create(num_slots, [SlotPart("target", LAYOUT["target"], 0, CONTENT_BYTES, 0, 1)])
        self.num_imported_tokens = 0
        self._export_s, self._import_s = export_s, import_s
        self._peers: dict[str, Arena] = {}
        self._imports: dict[str, Future[int]] = {}
        self._slots: dict[str, tuple[list[int], list[int]]] = {}  # and generations, of requests that will be exported
        self._leaving: list[tuple[float, Handover]] = []
        self._thread = ThreadPoolExecutor(1, "kv-blocks")

    @property
    def is_moving(self) -> bool:
        return bool(self._leaving)

    def attach(self, name: str, arena: Arena) -> None:
        part = arena.parts.get("target")
        if part is None or part.digest != LAYOUT["target"]:
            raise ArenaError("expected blocks of the mock engine")
        self.detach(name)
        self._peers[name] = arena

    def detach(self, name: str) -> None:
        arena = self._peers.pop(name, None)
        if arena is not None:
            self._thread.submit(arena.close)  # after the imports that have begun

    def begin_import(self, request: GenerationRequest) -> Future[int] | None:
        image = request.image
        arena = None if image is None else self._peers.get(image.arena)
        if image is None or arena is None or request.request_id in self._imports:
            return None
        tokens = request.prompt_token_ids + request.open_choices[0][1]
        imported = self._imports[request.request_id] = self._thread.submit(self._import, arena, image, tokens)
        return imported

    def num_prepared_tokens(self, request_id: str) -> int:
        imported = self._imports.get(request_id)
        return 0 if imported is None else imported.result()

    def adopt(self, request_id: str) -> int:
        imported = self._imports.pop(request_id, None)
        num_tokens = 0 if imported is None else imported.result()
        self.num_imported_tokens += num_tokens
        return num_tokens

    def cancel(self, request_id: str) -> None:
        self._imports.pop(request_id, None)

    def begin_export(self, request_id: str, slots: Sequence[int]) -> None:
        if not slots or request_id in self._slots:
            return
        if not 0 <= min(slots) <= max(slots) < self.arena.num_slots or len(set(slots)) < len(slots):
            expected = f"different slots in [0, {self.arena.num_slots - 1}]"
            raise InvalidRequestError("export_slots", f"expected {expected}, got {list(slots)}")
        self.arena.generations[list(slots)] += 1
        self._slots[request_id] = list(slots), self.arena.generations[list(slots)].tolist()

    def hand_over(self, handover: Handover, tokens: list[int]) -> None:
        """Give up a request of whose text these tokens are computed."""
        slots, generations = self._slots.pop(handover.request_id, ([], []))
        slots = slots[: -(-len(tokens) // BLOCK_SIZE)]
        for slot, content in zip(slots, _contents(tokens), strict=False):
            ctypes.memmove(self.arena.address(slot), content, CONTENT_BYTES)
            self.arena.checksums[slot] = zlib.crc32(content)
        if slots:
            num_tokens = min(len(tokens), len(slots) * BLOCK_SIZE)
            handover.image = KVImage("", slots, generations[: len(slots)], num_tokens)
        self._leaving.append((time.monotonic() + self._export_s, handover))

    def finish(self, request_id: str) -> None:
        self._slots.pop(request_id, None)

    def pop_handovers(self) -> list[Handover]:
        now_s = time.monotonic()
        ready = [handover for ready_s, handover in self._leaving if ready_s <= now_s]
        self._leaving = [entry for entry in self._leaving if entry[0] > now_s]
        return ready

    def _import(self, arena: Arena, image: KVImage, tokens: list[int]) -> int:
        """Return how many tokens arrive."""
        time.sleep(self._import_s)
        num_tokens = min(image.num_tokens, len(tokens))
        contents = _contents(tokens[:num_tokens])
        for i, (slot, generation) in enumerate(zip(image.slots, image.generations)):
            if not 0 <= slot < arena.num_slots:
                return i * BLOCK_SIZE
            found = ctypes.string_at(arena.address(slot), CONTENT_BYTES)
            if int(arena.generations[slot]) != generation:
                return i * BLOCK_SIZE
            is_longer = i == len(contents) - 1 and found[4:] > contents[i][4:]  # by tokens that were lost on the way
            assert found == contents[i] or is_longer, f"slot {slot} of generation {generation} holds another block"
        return num_tokens


def _contents(tokens: list[int]) -> list[bytes]:
    """Return what the slots of a text hold."""
    ends = [min(end + BLOCK_SIZE, len(tokens)) for end in range(0, len(tokens), BLOCK_SIZE)]
    return [zlib.crc32(repr(tokens[:end]).encode()).to_bytes(4, "little") + end.to_bytes(4, "big") for end in ends]
