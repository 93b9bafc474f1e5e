# SPDX-License-Identifier: Apache-2.0
"""Blocks of requests that move between engines.

An engine that will give up a request copies its blocks to slots of an arena while the prompt is computed, so that
little is left to copy at the end. The engine that continues the request copies them into blocks of its own before it
adds the request. Blocks that do not arrive are computed like any other part of a prompt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import Handover, KVImage
from fastdeploy.core.request import Request
from fastdeploy.kv_cache.arena import Arena
from fastdeploy.kv_cache.manager import KVCacheManager

if TYPE_CHECKING:
    from fastdeploy.spec_decode.drafting.base import Drafter
    from fastdeploy.worker.block_mover import Arrived, BlockMover

TARGET, STATES = "target", "states"  # parts of a slot that cannot be computed without the target

logger = logging.getLogger("fastdeploy.engine")


@dataclass
class _Import:
    """An import that is under way: `num_found` blocks were in the cache, the others are copied.

    Attributes:
        started_s, ended_s: when it began, and when the last block had been copied.
        parts: per copied block, the parts that have arrived; None until somebody asks.
    """

    image: KVImage
    num_tokens: int
    num_found: int
    arrived: Future[Arrived] | None
    started_s: float
    ended_s: float
    parts: list[frozenset[str]] | None = None

    def note_end(self, _: Future[Arrived]) -> None:
        """Take the time, in the thread that copies."""
        self.ended_s = time.monotonic()


@dataclass
class _Export:
    """The slots for a request's blocks, the copies to the first of them, and how far those blocks are filled."""

    slots: list[int]
    generations: list[int]
    copies: list[Future[None]] = field(default_factory=list)
    num_filled: list[list[int]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.num_filled)


class KVTransfer:
    """Moves blocks between the KV cache and arenas.

    Attributes:
        arena: the arena that this engine exports to.
        num_imported_blocks, num_imported_tokens: number of blocks, and of their tokens, that were imported.
        num_failed_blocks: number of blocks by why they, or a part of them, were not imported: the reasons of
            `worker.block_mover.Arrived`, `unknown_arena`, `no_room` (too few free blocks) and `error`.
    """

    def __init__(
        self, kv_cache_manager: KVCacheManager, mover: BlockMover, arena: Arena, drafter: Drafter | None = None
    ) -> None:
        """Start without peers."""
        self.arena = arena
        self.num_imported_blocks = self.num_imported_tokens = 0
        self.num_failed_blocks = Counter[str]()
        self._kv_cache_manager, self._mover, self._drafter = kv_cache_manager, mover, drafter
        self._peers: dict[str, Arena] = {}
        self._imports: dict[str, _Import] = {}
        self._cancelled: set[str] = set()  # imports whose blocks are released when nothing is copied to them any more
        self._exports: dict[Request, _Export] = {}
        self._copies: deque[tuple[Future[None], list[int]]] = deque()
        self._leaving: deque[tuple[list[Future[None]], Handover]] = deque()

    def attach(self, name: str, arena: Arena) -> None:
        """Import from a peer's arena, which images call by this name; `detach` will close it."""
        self.detach(name)
        self._peers[name] = arena
        if not self._mover.can_import(arena, TARGET):
            logger.warning("the layout of the KV cache of %s is another one; its prompts are computed here", name)

    def detach(self, name: str) -> None:
        """Unmap a peer's arena after the copies that have begun; an unknown name is ignored."""
        arena = self._peers.pop(name, None)
        if arena is not None:
            self._mover.close_arena(arena)

    # Import: begin, then adopt or cancel.

    def begin_import(self, request: GenerationRequest) -> Future[Arrived] | None:
        """Start to copy the blocks of a request that will be added.

        Returns:
            A future; once it is done, `adopt` does not wait. None if there is nothing to copy, or no room. Rows of
            a prompt whose log-probabilities are requested must be computed here.
        """
        image = request.image
        if image is None or request.params.prompt_logprobs is not None or request.request_id in self._imports:
            return None
        arena = self._peers.get(image.arena)
        if arena is None:
            self.num_failed_blocks["unknown_arena"] += len(image.slots)
            return None
        if not self._mover.can_import(arena, TARGET):
            self.num_failed_blocks[f"{TARGET}_layout"] += len(image.slots)
            return None
        token_ids = request.prompt_token_ids + request.open_choices[0][1]
        size = self._kv_cache_manager.block_size
        num_tokens = min(image.num_tokens, len(image.slots) * size, len(image.generations) * size, len(token_ids))
        if num_tokens < 1:
            return None
        held = self._kv_cache_manager.begin_import(request.request_id, token_ids, request.cache_salt, num_tokens)
        if held is None:
            self.num_failed_blocks["no_room"] += self._kv_cache_manager.num_blocks_for(num_tokens)
            return None
        found, new = held
        first, end = len(found), len(found) + len(new)
        arrived, now_s = None, time.monotonic()
        if new:
            arrived = self._mover.import_blocks(arena, image.slots[first:end], image.generations[first:end], new)
        imported = self._imports[request.request_id] = _Import(image, num_tokens, first, arrived, now_s, now_s)
        if arrived is not None:
            arrived.add_done_callback(imported.note_end)
        return arrived

    def num_prepared_tokens(self, request_id: str) -> int:
        """Return how many tokens of a request were found in the cache or have arrived; wait for its copies."""
        imported = self._imports.get(request_id)
        if imported is None:
            return 0
        num_blocks = imported.num_found + _num_arrived(self._receive(imported))
        return min(imported.num_tokens, num_blocks * self.block_size)

    def adopt(self, choices: Sequence[Request]) -> None:
        """Let the waiting choices of a new request begin with the blocks that have arrived."""
        request_id = choices[0].request_id
        imported = self._imports.get(request_id)
        if imported is None or request_id in self._cancelled:
            return
        arrived = self._receive(imported)
        num_arrived = _num_arrived(arrived)
        num_blocks = imported.num_found + num_arrived
        del self._imports[request_id]
        manager = self._kv_cache_manager
        manager.end_import(request_id, num_blocks)
        if not num_blocks:
            return
        can_draft = self._adopt_drafting(imported, arrived[:num_arrived], manager.imported_blocks(request_id))
        if not can_draft:
            for choice in choices:
                choice.max_drafts = 0
        num_tokens = min(imported.num_tokens, num_blocks * manager.block_size)
        manager.adopt(choices, num_tokens, publishes=can_draft)
        self.num_imported_blocks += num_arrived
        num_transferred = max(0, num_tokens - imported.num_found * manager.block_size)
        self.num_imported_tokens += num_transferred
        metrics = choices[0].metrics
        metrics.num_transferred_tokens, metrics.transfer_s = num_transferred, imported.ended_s - imported.started_s

    def cancel(self, request_id: str) -> None:
        """Release the imported blocks of a request that will not be added, as soon as nothing is copied to them."""
        imported = self._imports.get(request_id)
        if imported is not None:
            if imported.arrived is not None:
                imported.arrived.cancel()  # unless it has begun
            self._cancelled.add(request_id)
            self._release_cancelled()

    # Export: begin, advance after each step, then hand over or finish.

    def begin_export(self, request: Request, slots: Sequence[int]) -> None:
        """Export the blocks of a request to these slots as they are computed; a slot may be missing at the end.

        The slots begin a new generation. A request that has slots keeps them.

        Raises:
            InvalidRequestError: there is no such slot in the arena, or a slot is listed twice.
        """
        if not slots or request in self._exports:
            return
        if not 0 <= min(slots) <= max(slots) < self.arena.num_slots or len(set(slots)) < len(slots):
            expected = f"different slots in [0, {self.arena.num_slots - 1}]"
            raise InvalidRequestError("export_slots", f"expected {expected}, got {list(slots)}")
        self.arena.generations[list(slots)] += 1
        self._exports[request] = _Export(list(slots), self.arena.generations[list(slots)].tolist())

    def advance(self, request: Request) -> None:
        """Copy the blocks that have been filled since the last call; nothing if the request is not exported."""
        export = self._exports.get(request)
        if export is not None:
            num_stages = self._drafter.num_stages if self._drafter else 0
            num_lagging = max(0, num_stages - 1)  # each stage but the first lags behind by one more token
            self._copy(request, export, max(0, request.num_computed - num_lagging) // self.block_size)

    def hand_over(self, request: Request, handover: Handover) -> None:
        """Copy the last blocks of a request that is about to be removed; `pop_handovers` returns `handover` with them.

        Args:
            request: the first open choice.
        """
        export = self._exports.get(request)
        if export is not None:
            # A request that was preempted has lost its blocks, but not the copies of them.
            num_tokens = max(request.num_computed, export.num_blocks * self.block_size)
            self._copy(request, export, self._kv_cache_manager.num_blocks_for(request.num_computed))
            if slots := export.slots[: export.num_blocks]:
                handover.image = KVImage(
                    arena="",
                    slots=slots,
                    generations=export.generations[: len(slots)],
                    num_tokens=min(num_tokens, len(slots) * self.block_size),
                    num_filled=export.num_filled if self._drafter else [],
                )
        self._leaving.append(([] if export is None else export.copies, handover))

    def finish(self, request: Request) -> None:
        """Forget the export of a request that ends."""
        self._exports.pop(request, None)

    def pop_handovers(self) -> list[Handover]:
        """Release blocks that have been copied; return the requests that can be continued elsewhere."""
        self._release_cancelled()
        while self._copies and self._copies[0][0].done():  # copies are done in order
            self._kv_cache_manager.end_export(self._copies.popleft()[1])
        ready = []
        while self._leaving and all(copied.done() for copied in self._leaving[0][0]):
            copies, handover = self._leaving.popleft()
            errors = [error for copied in copies if (error := copied.exception()) is not None]
            if errors:
                logger.error("the blocks of request %s cannot be exported", handover.request_id, exc_info=errors[0])
                handover.image = None
            ready.append(handover)
        return ready

    @property
    def is_moving(self) -> bool:
        """Whether there are copies to the arena, or for imports that were cancelled."""
        return bool(self._copies or self._leaving or self._cancelled)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._kv_cache_manager.block_size

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if there is an export of a request that does not live, or an import of one that does."""
        live = set(requests)
        assert self._exports.keys() <= live
        assert not (self._imports.keys() - self._cancelled) & {request.request_id for request in live}
        assert self._cancelled <= self._imports.keys()

    def _release_cancelled(self) -> None:
        for request_id in [*self._cancelled]:
            arrived = self._imports[request_id].arrived
            if arrived is None or arrived.done():
                self._cancelled.discard(request_id)
                del self._imports[request_id]
                self._kv_cache_manager.end_import(request_id)

    def _copy(self, request: Request, export: _Export, end: int) -> None:
        """Copy the blocks from the first that is not exported yet to `end`, as far as there are slots."""
        first, end = export.num_blocks, min(end, len(export.slots))
        if first >= end:
            return
        if self._drafter is not None:
            self._fill(self._drafter, request, min(end * self.block_size, request.num_computed))
        block_ids = request.block_ids[first:end]
        export.num_filled += [self._drafter.num_filled(b) if self._drafter else [] for b in block_ids]
        self._kv_cache_manager.begin_export(block_ids)
        copied = self._mover.export_blocks(self.arena, block_ids, export.slots[first:end])
        export.copies.append(copied)
        self._copies.append((copied, block_ids))

    def _fill(self, drafter: Drafter, request: Request, end: int) -> None:
        """Fill the caches of the drafting model; if it fails, the blocks travel without them."""
        try:
            drafter.fill(request, end)
        except Exception:
            logger.exception(
                "the drafting model failed; the blocks of request %s travel without it", request.request_id
            )
            drafter.reset()

    def _receive(self, imported: _Import) -> list[frozenset[str]]:
        """Wait for an import; return the parts that have arrived per copied block, none if the copy failed."""
        if imported.parts is None:
            imported.parts = [] if imported.arrived is None else self._wait(imported.arrived, imported.num_tokens)
        return imported.parts

    def _wait(self, arrived: Future[Arrived], num_tokens: int) -> list[frozenset[str]]:
        try:
            result = arrived.result()
        except Exception:
            logger.exception("blocks cannot be imported; they are computed")
            self.num_failed_blocks["error"] += self._kv_cache_manager.num_blocks_for(num_tokens)
            return []
        self.num_failed_blocks += result.failures
        return result.parts

    def _adopt_drafting(self, imported: _Import, arrived: list[frozenset[str]], block_ids: list[int]) -> bool:
        """Record what the drafting model's caches hold of the imported blocks.

        Returns:
            Whether the request may draft with this model: False if states that it needs are missing.
        """
        if self._drafter is None:
            return True
        needed, nothing = self._drafter.block_regions().keys(), [0] * self._drafter.num_stages
        for i, parts in enumerate(arrived, imported.num_found):
            filled = imported.image.num_filled[i : i + 1]
            is_whole = needed <= parts and len(filled) == 1 and _is_valid(filled[0], nothing, self.block_size)
            self._drafter.set_filled(block_ids[i], filled[0] if is_whole else nothing)
        return STATES not in needed or all(STATES in parts for parts in arrived)


def _num_arrived(parts: list[frozenset[str]]) -> int:
    """Return how many blocks arrived before the first that did not."""
    return next((i for i, names in enumerate(parts) if TARGET not in names), len(parts))


def make_handover(choices: Sequence[Request]) -> Handover:
    """Return what another engine needs to continue the unfinished choices of a request."""
    first = choices[0]
    handover = Handover(first.request_id, [None] * first.params.n, num_cached_tokens=first.metrics.num_cached_tokens)
    for choice in choices:
        handover.resumed[choice.index] = choice.output_token_ids.tolist()
    return handover


def _is_valid(num_filled: list[int], nothing: list[int], block_size: int) -> bool:
    return len(num_filled) == len(nothing) and all(0 <= count <= block_size for count in num_filled)
