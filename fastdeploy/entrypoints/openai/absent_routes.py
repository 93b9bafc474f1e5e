# SPDX-License-Identifier: Apache-2.0
"""What is said of routes and methods that are not there: always 404 or 405, with what to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fastdeploy.entrypoints.openai.errors import ApiError

_TEXT = "this server makes text; use /v1/chat/completions"
_WEIGHTS = "weights are loaded once; to change them, start a new server and end this one"
_EXPERTS = "experts do not move between ranks while the server runs"
ABSENT = {
    "/v1/embeddings": "this server has no embeddings",
    "/v1/reward": "this server has no reward models",
    "/pooling": "this server has no pooling models",
    "/classify": "this server has no pooling models",
    "/score": "this server has no pooling models",
    "/v1/score": "this server has no pooling models",
    "/rerank": "this server has no pooling models",
    "/v1/rerank": "this server has no pooling models",
    "/v1/moderations": "this server has no moderation models",
    "/v1/responses": "conversations are not stored; use /v1/chat/completions",
    "/v1/assistants": "conversations are not stored; use /v1/chat/completions",
    "/v1/threads": "conversations are not stored; use /v1/chat/completions",
    "/v1/messages": "this server speaks OpenAI's protocol; use /v1/chat/completions",
    "/v1/audio": _TEXT,
    "/v1/images": _TEXT,
    "/v1/videos": _TEXT,
    "/v1/realtime": _TEXT,
    "/v1/files": "this server stores no files; `fastdeploy run-batch` reads and writes them",
    "/v1/batches": "`fastdeploy run-batch` runs batches of requests",
    "/v1/fine_tuning": "this server does not train",
    "/v1/load_lora_adapter": "this server has no LoRA adapters",
    "/v1/unload_lora_adapter": "this server has no LoRA adapters",
    "/v1/pause": "requests are held back by --max-concurrency; SIGTERM drains",
    "/v1/resume": "requests are held back by --max-concurrency; SIGTERM drains",
    "/v1/is_paused": "requests are held back by --max-concurrency; see /load",
    "/v1/sleep": _WEIGHTS,
    "/v1/wakeup": _WEIGHTS,
    "/v1/update_weights": _WEIGHTS,
    "/update_model_weight": _WEIGHTS,
    "/clear_load_weight": _WEIGHTS,
    "/rearrange_experts": _EXPERTS,
    "/get_per_expert_tokens_stats": _EXPERTS,
    "/check_redundant": _EXPERTS,
    "/controller/scheduler": "there is no controller port; see /load",
    "/controller/reset_scheduler": "there is no controller port; see /load",
    "/docs": "see docs/guide/serving.md",
    "/openapi.json": "see docs/guide/serving.md",
}
"""Routes of FastDeploy, vLLM and OpenAI that this server has not, and what to know about each."""


def no_route(path: str, known: Iterable[str]) -> ApiError:
    """Return the 404 for a path: why it is not there, or the nearest one that is."""
    for absent, reason in ABSENT.items():
        if path == absent or path.startswith(absent + "/"):
            return ApiError(404, f"{absent}: {reason}", type="not_found_error", code="not_found")
    nearest = difflib.get_close_matches(path[:64], known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return ApiError(404, f"{path[:64]}: no such route{hint}", type="not_found_error", code="not_found")


def wrong_method(method: str, path: str, allowed: str) -> ApiError:
    """Return the 405 that names the methods which a path has."""
    message = f"{path[:64]}: expected {allowed}, got {method[:16]}"
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
