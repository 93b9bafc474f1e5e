# SPDX-License-Identifier: Apache-2.0
"""The state of an API process that all handlers share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from starlette.types import Scope

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.generation_defaults import GenerationDefaults
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.json_types import shorten
from fastdeploy.detokenize.preprocess import RequestLimits
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.clients import Client, ClientKeys, shown_client
from fastdeploy.entrypoints.openai.errors import ApiError, too_many_requests, unavailable
from fastdeploy.entrypoints.openai.limiter import ConcurrencyLimiter, TokenBucket
from fastdeploy.entrypoints.openai.params import ParamLimits
from fastdeploy.entrypoints.openai.responses import SpeculationNote
from fastdeploy.entrypoints.openai.tool_parser_choice import ToolParserChoice
from fastdeploy.metrics.server_metrics import ServerMetrics
from fastdeploy.scheduler.base import RequestScheduler

ServerStatus = Literal["starting", "ready", "stalled", "draining", "dead"]
_UNAVAILABLE: dict[ServerStatus, tuple[str, str]] = {
    "starting": ("the model is loading", "service_unavailable"),
    "stalled": ("the engine does not respond", "stalled"),
    "draining": ("the server is shutting down", "shutting_down"),
    "dead": ("the engine is dead", "service_unavailable"),
}
"""Message and code of the error with which requests are refused."""


@dataclass
class ApiServer:
    """The state of the API process.

    Attributes:
        scheduler: runs the requests, on this engine or on the nodes of a cluster.
        defaults: sampling parameters from the model's generation_config.json.
        cluster: how this node works with others.
        chat_template: used instead of the tokenizer's; None uses that one.
        tool_parser: the format of tool calls.
        provenance: name of each value that is not a default -> where it came from.
        metrics_folder: where several API processes store their metrics; empty for one process.
        is_draining: the server is shutting down and accepts no new requests.
        keys: the API keys; None on a server without keys.
        known_paths: paths of the routes, which log lines may show.
    """

    config: ServerConfig
    engine_config: EngineConfig
    scheduler: RequestScheduler
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    chat_template: str | None = None
    tool_parser: ToolParserChoice = field(default_factory=ToolParserChoice)
    json_log: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))
    provenance: Mapping[str, str] = field(default_factory=dict)
    metrics_folder: str = ""
    is_draining: bool = False
    known_paths: Collection[str] = ()

    def __post_init__(self) -> None:
        config, metrics_folder = self.config, self.metrics_folder
        names = [key.name for key in config.keys]
        self.metrics = ServerMetrics(
            lambda: self.scheduler.stats,
            self.description,
            metrics_folder,
            self.json_log,
            names,
            self.cluster.is_clustered,
            self.served_names[0],
        )
        self.keys = ClientKeys(config.keys) if config.keys else None
        self.limiter = ConcurrencyLimiter(
            -(-config.max_concurrency // config.workers),  # each API process admits its share
            -(-self.max_client_sequences // config.workers),
            config.max_waiting_time,
            self.metrics.inside,
            self.metrics.sequences_inside,
            self.metrics.clients.change_waiting,
        )
        self._buckets = {
            key.name: TokenBucket(key.tokens_per_minute / config.workers)
            for key in config.keys
            if key.tokens_per_minute is not None
        }
        self.registry = self.metrics.registry
        self.recorder = self.metrics.requests
        path = self.engine_config.model
        self._names = {*self.served_names, path, PurePath(path).name, "default"}

    @property
    def param_limits(self) -> ParamLimits:
        """What the server's flags allow in the parameters of requests."""
        return ParamLimits(self.engine_config.max_logprobs, self.config.max_output_tokens)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The served names of the model."""
        return self.config.served_model_name

    def response_model(self, requested: str | None) -> str:
        """Return the name of the model in a response: the requested one if it is a served name, else the first one."""
        return requested if requested in self.served_names and requested is not None else self.served_names[0]

    @property
    def limits(self) -> RequestLimits:
        """Limits of the model; the engine must be ready."""
        assert self.scheduler.ready is not None
        ready = self.scheduler.ready
        max_entries, model_context = self.engine_config.max_logprob_entries, ready.description.get("model_context", 0)
        return RequestLimits(ready.max_model_len, ready.vocab_size, max_entries, model_context)

    @property
    def status(self) -> ServerStatus:
        """The state of the server; `stalled` if the engine process is stopped or hangs."""
        if self.scheduler.dead_error is not None:
            return "dead"
        if self.is_draining:
            return "draining"
        if self.scheduler.ready is None:
            return "starting"
        return "stalled" if self.scheduler.is_stalled else "ready"

    def check_available(self) -> None:
        """Raise ApiError 503 unless requests can be served."""
        status = self.status
        if status != "ready":
            raise unavailable(*_UNAVAILABLE[status])

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the served name, the model's path or its last part, or `default`."""
        if name is not None and name not in self._names:
            served = ", ".join(map(repr, self.served_names))
            message = f"model: {shorten(name)} is not served here; this server serves {served}"
            raise ApiError(404, message, type="not_found_error", param="model", code="model_not_found")

    def check_admin(self, client: Client) -> None:
        """Raise ApiError 403 if some keys are administrators' and the client's is not."""
        if self.keys is not None and self.keys.has_admin and not client.is_admin:
            message = "needs the API key of an administrator (`admin: true` in --api-key-file)"
            raise ApiError(403, message, type="permission_error", code="admin_required")

    @property
    def max_client_sequences(self) -> int:
        """Maximum number of sequences that one client may have in all API processes."""
        share = self.engine_config.scheduler.max_client_share
        return self.config.max_concurrency if share is None else max(1, int(self.config.max_concurrency * share))

    def check_num_sequences(self, client: Client, requests: Sequence[GenerationRequest]) -> None:
        """Check that a request could be admitted if nothing else ran.

        Raises:
            InvalidRequestError: it has more sequences than its client may have in flight.
        """
        num_sequences = sum(request.params.n for request in requests)
        limit, name = self.max_client_sequences, "--max-concurrency"
        if limit < self.config.max_concurrency:
            name += " and --max-client-share"
        if client.max_sequences is not None and client.max_sequences < limit:
            limit, name = client.max_sequences, "max_sequences of the API key"
        if num_sequences > limit:
            expected = f"expected at most {limit} sequences (prompts times n) in a request"
            raise InvalidRequestError("n", f"{expected}, got {num_sequences}; the limit is {name}")

    def take_prompt_tokens(self, client: Client, num_tokens: int) -> None:
        """Charge the tokens of a request's prompts to its client.

        Raises:
            ApiError: 429, the client has used its tokens per minute.
        """
        bucket = self._buckets.get(client.name)
        wait_s = bucket.take(num_tokens) if bucket is not None else 0.0
        if wait_s:
            message = f"this API key may use {client.tokens_per_minute} tokens per minute; try again in {wait_s:.1f} s"
            raise too_many_requests(message, "rate_limit", "rate_limit_exceeded", wait_s)

    def token_bucket(self, client: Client) -> TokenBucket | None:
        """Return what counts the output tokens of a client with a limit; None if it has none."""
        return self._buckets.get(client.name)

    def record_refusal(self, scope: Scope, error: ApiError) -> None:
        """Count and log that a request is refused."""
        assert error.reason is not None
        path = scope["path"]
        shown = path if path in self.known_paths else "another path"
        what = f"{error.status} {error.code} for {shown} from {shown_client(scope)}"
        self.metrics.refusals.record(error.reason, what)

    def description(self) -> Mapping[str, Any]:
        """Return what the engine reports about itself; empty until the model is loaded."""
        return self.scheduler.ready.description if self.scheduler.ready is not None else {}

    def num_cache_writes(self, num_prompt_tokens: int, num_cached_tokens: int) -> int:
        """Return how many tokens of a prompt were written to the prefix cache: whole blocks that it did not have."""
        cache = self.engine_config.cache
        if not cache.enable_prefix_caching:
            return 0
        return max(0, num_prompt_tokens // cache.block_size * cache.block_size - num_cached_tokens)

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
