# SPDX-License-Identifier: Apache-2.0
"""Fetches the images of tickets by the connector that reaches the node that keeps them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import KVImage
from fastdeploy.kv_cache.connectors.base import Connector, TransferError
from fastdeploy.scheduler.agent_engine import AgentEngine, decode_image
from fastdeploy.scheduler.agent_legs import Leg, make_request
from fastdeploy.scheduler.messages import NodeRecord
from fastdeploy.scheduler.request_states import Image, Ticket

BASE_S = 2.0
BYTES_PER_S = 1e8  # a transfer that is slower than this is given up: memory is ten times as fast
MAX_FAILURES = 3  # in a row, after which a peer is skipped for a while
SKIP_S = 30.0
TARGET = "target"  # the part of a slot without which nothing is imported
NO_CONNECTOR = "none"

logger = logging.getLogger("fastdeploy.agent")


class Transfers:
    """Fetches images; what cannot be fetched is computed.

    Attributes:
        transferred_bytes: by connector and direction (`in`, `out`).
        seconds: spent in transfers, and their number, by connector.
        failures: by connector and reason.
        recomputed_tokens: tokens of images that were not imported, by reason.
    """

    def __init__(
        self, engine: AgentEngine, connectors: Sequence[Connector], layouts: Mapping[str, str], slot_bytes: int
    ) -> None:
        """Begin without peers.

        Args:
            layouts: digest of each part of a slot of this node.
            slot_bytes: size of a slot.
        """
        self.transferred_bytes: dict[str, dict[str, int]] = defaultdict(lambda: {"in": 0, "out": 0})
        self.seconds: dict[str, tuple[float, int]] = {}
        self.failures: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.recomputed_tokens: dict[str, int] = defaultdict(int)
        self._engine, self._connectors = engine, connectors
        self._layouts, self._slot_bytes = layouts, slot_bytes
        self._num_failures: dict[str, int] = defaultdict(int)  # in a row, by peer
        self._skipped_until: dict[str, float] = {}
        self._unlike: set[str] = set()  # nodes that were warned of

    async def fetch(self, ticket: Ticket, record: NodeRecord | None) -> GenerationRequest | None:
        """Fetch and import the image of a ticket.

        Args:
            record: of the node that keeps the image; None if that is not known.

        Returns:
            The request, which can be added without delay; None if nothing was imported.
        """
        assert ticket.image is not None
        connector, num_tokens = None, 0
        try:
            image = decode_image(ticket.image.content)
            num_tokens = image.num_tokens
            record = self._check(ticket.image, record)
            connector = self._choose(ticket.image, record)
            peer = _peer(ticket.image)
            num_bytes = len(image.slots) * self._slot_bytes
            start_s = time.monotonic()
            async with asyncio.timeout(BASE_S + num_bytes / BYTES_PER_S):
                image = await connector.fetch(peer, record.endpoints[connector.name], image)
                request = make_request(ticket, image=image)
                num_imported = await self._engine.prepare(request)
        except (TransferError, TimeoutError) as error:
            self._engine.cancel_prepared(make_request(ticket).request_id)
            reason = error.reason if isinstance(error, TransferError) else "timeout"
            self._fail(ticket.image, connector, reason, num_tokens, str(error) or "it took too long")
            return None
        self._num_failures.pop(peer, None)
        seconds, count = self.seconds.get(connector.name, (0.0, 0))
        self.seconds[connector.name] = seconds + time.monotonic() - start_s, count + 1
        self.transferred_bytes[connector.name]["in"] += num_bytes * min(num_imported, num_tokens) // max(1, num_tokens)
        self._count_recomputed("incomplete", num_tokens - num_imported)
        return request

    def keep_only(self, records: Mapping[str, NodeRecord]) -> None:
        """Forget the peers that are gone."""
        peers = {f"{name}:{record.incarnation}" for name, record in records.items()}
        for connector in self._connectors:
            connector.keep_only(peers)
        self._num_failures = defaultdict(int, {p: n for p, n in self._num_failures.items() if p in peers})
        self._skipped_until = {peer: until for peer, until in self._skipped_until.items() if peer in peers}

    def count_handed_over(self, leg: Leg, image: KVImage | None) -> None:
        """Count the bytes of an image that this node has made, and the computed tokens that are not in it."""
        if image is not None:
            for connector in self._connectors[:1]:
                self.transferred_bytes[connector.name]["out"] += len(image.slots) * self._slot_bytes
        if leg.has_tokens:  # so that all of its context is computed but the last token
            self._count_recomputed("no_slots", leg.num_context_tokens - 1 - (image.num_tokens if image else 0))

    def _check(self, image: Image, record: NodeRecord | None) -> NodeRecord:
        """Return the record of the node that keeps an image, if its slots can be read here."""
        if record is None or record.incarnation != image.incarnation:
            raise TransferError("gone", f"node {image.node} no longer keeps it")
        if self._skipped_until.get(_peer(image), 0.0) > time.monotonic():
            raise TransferError("skipped", f"node {image.node} has failed {MAX_FAILURES} times")
        if record.layouts.get(TARGET) != self._layouts.get(TARGET):
            if image.node not in self._unlike:
                self._unlike.add(image.node)
                logger.warning("the KV cache of node %s has another layout: its prompts are computed again", image.node)
            raise TransferError("layout", "its layout is another one")
        return record

    def _choose(self, image: Image, record: NodeRecord) -> Connector:
        for connector in self._connectors:
            endpoint = record.endpoints.get(connector.name)
            if endpoint is not None and connector.reaches(record.host, endpoint):
                return connector
        if image.node not in self._unlike:
            self._unlike.add(image.node)
            names = ", ".join(connector.name for connector in self._connectors)
            logger.warning("node %s is not reached by %s: its prompts are computed again", image.node, names)
        raise TransferError("unreachable", "no connector reaches the node")

    def _fail(self, image: Image, connector: Connector | None, reason: str, num_tokens: int, message: str) -> None:
        name = NO_CONNECTOR if connector is None else connector.name
        self.failures[name][reason] += 1
        self._count_recomputed(reason, num_tokens)
        logger.info("an image of node %s is not fetched (%s): %s", image.node, reason, message)
        if connector is None:
            return
        peer = _peer(image)
        self._num_failures[peer] += 1
        if self._num_failures[peer] >= MAX_FAILURES:
            del self._num_failures[peer]
            self._skipped_until[peer] = time.monotonic() + SKIP_S

    def _count_recomputed(self, reason: str, num_tokens: int) -> None:
        if num_tokens > 0:
            self.recomputed_tokens[reason] += num_tokens


def _peer(image: Image) -> str:
    return f"{image.node}:{image.incarnation}"
