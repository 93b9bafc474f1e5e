# SPDX-License-Identifier: Apache-2.0
"""The state of an API process that all handlers share, and the limit on concurrent requests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from prometheus_client import Gauge

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import GenerationDefaults
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.detokenize.preprocess import RequestLimits
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.errors import ApiError, too_many_requests, unavailable
from fastdeploy.entrypoints.openai.responses import SpeculationNote
from fastdeploy.ipc.connection import EngineConnection
from fastdeploy.metrics.server_metrics import ServerMetrics

ServerStatus = Literal["starting", "ready", "stalled", "draining", "dead"]
_UNAVAILABLE: dict[ServerStatus, tuple[str, str]] = {
    "starting": ("the model is loading", "service_unavailable"),
    "stalled": ("the engine does not respond", "stalled"),
    "draining": ("the server is shutting down", "shutting_down"),
    "dead": ("the engine is dead", "service_unavailable"),
}
"""Message and code of the error with which requests are refused."""


class ConcurrencyLimiter:
    """Admits at most `limit` requests at a time; others wait up to `max_wait_s` seconds (-1: no limit) before a 429."""

    def __init__(self, limit: int, max_wait_s: float, inside: Gauge) -> None:
        self._limit = limit
        self._inside = inside
        self._max_wait_s = None if max_wait_s == -1 else max_wait_s
        self._semaphore = asyncio.Semaphore(limit)
        self.num_inside = 0

    @contextlib.asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Count as one of the running requests until the block ends.

        Raises:
            ApiError: 429, too many requests are running.
        """
        if self._semaphore.locked() and self._max_wait_s == 0:
            raise self._too_many()
        try:
            await asyncio.wait_for(self._semaphore.acquire(), self._max_wait_s or None)
        except TimeoutError:
            raise self._too_many() from None
        self.num_inside += 1
        self._inside.inc()
        try:
            yield
        finally:
            self.num_inside -= 1
            self._inside.dec()
            self._semaphore.release()

    def _too_many(self) -> ApiError:
        return too_many_requests(f"{self._limit} requests are running, the maximum (--max-concurrency)")


@dataclass
class ApiServer:
    """The state of the API process.

    Attributes:
        client: connection to the engine.
        defaults: sampling parameters from the model's generation_config.json.
        chat_template: used instead of the tokenizer's; None uses that one.
        provenance: name of each value that is not a default -> where it came from.
        metrics_folder: where several API processes store their metrics; empty for one process.
        is_draining: the server is shutting down and accepts no new requests.
    """

    config: ServerConfig
    engine_config: EngineConfig
    client: EngineConnection
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    chat_template: str | None = None
    json_log: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))
    provenance: Mapping[str, str] = field(default_factory=dict)
    metrics_folder: str = ""
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(lambda: self.client.stats, self.description, self.metrics_folder, self.json_log)
        limit = -(-self.config.max_concurrency // self.config.workers)  # each API process admits its share
        self.limiter = ConcurrencyLimiter(limit, self.config.max_waiting_time, self.metrics.inside)
        self.registry = self.metrics.registry
        self.recorder = self.metrics.requests
        path = self.engine_config.model
        self._names = {self.config.served_model_name, path, PurePath(path).name, "default"}

    @property
    def model_name(self) -> str:
        """The served name, which responses report."""
        return self.config.served_model_name

    @property
    def limits(self) -> RequestLimits:
        """Limits of the model; the engine must be ready."""
        assert self.client.ready is not None
        return RequestLimits(self.client.ready.max_model_len, self.client.ready.vocab_size)

    @property
    def status(self) -> ServerStatus:
        """The state of the server; `stalled` if the engine process is stopped or hangs."""
        if self.client.dead_error is not None:
            return "dead"
        if self.is_draining:
            return "draining"
        if self.client.ready is None:
            return "starting"
        return "stalled" if self.client.is_stalled else "ready"

    def check_available(self) -> None:
        """Raise ApiError 503 unless requests can be served."""
        status = self.status
        if status != "ready":
            raise unavailable(*_UNAVAILABLE[status])

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the served name, the model's path or its last part, or `default`."""
        if name is not None and name not in self._names:
            message = f"model: {name!r} is not served here; this server serves {self.model_name!r}"
            raise ApiError(404, message, type="not_found_error", param="model", code="model_not_found")

    def description(self) -> Mapping[str, Any]:
        """Return what the engine reports about itself; empty until the model is loaded."""
        return self.client.ready.description if self.client.ready is not None else {}

    @property
    def system_fingerprint(self) -> str:
        """Digest of what the bits of a logit depend on: equal fingerprints give equal texts."""
        numerics = repr(self.description().get("fingerprint", {}))
        return "fp_" + hashlib.blake2b(numerics.encode(), digest_size=6).hexdigest()

    def speculation_note(self) -> SpeculationNote | None:
        """Return the settings of speculation if the text may differ from plain decoding, or drafts are rejected."""
        speculation = self.description().get("speculation", {})
        if not speculation.get("lossy") and speculation.get("accept_policy", "normal") == "normal":
            return None
        return SpeculationNote(
            method=speculation.get("method"),
            verify_strategy=speculation.get("verify_strategy"),
            accept_policy=speculation.get("accept_policy"),
            lossy=speculation.get("lossy"),
        )
