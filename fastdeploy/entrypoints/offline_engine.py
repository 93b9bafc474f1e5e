# SPDX-License-Identifier: Apache-2.0
"""What scripts for vLLM ask of `LLM.llm_engine` beside the methods of `LLM`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from fastdeploy.entrypoints.shared_engine import SharedEngine


class OfflineEngine:
    """The requests of an `LLM`, in all threads together."""

    def __init__(self, engine: SharedEngine) -> None:
        self._engine = engine

    def get_num_unfinished_requests(self) -> int:
        """Return the number of prompts that have been begun and have not ended."""
        return self._engine.num_unfinished()

    def has_unfinished_requests(self) -> bool:
        """Return whether there are any."""
        return self._engine.num_unfinished() > 0

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests, by `RequestOutput.request_id`, with finish reason `abort`; unknown ids are ignored."""
        self._engine.abort([request_ids] if isinstance(request_ids, str) else list(request_ids))

    def __getattr__(self, name: str) -> NoReturn:
        known = ", ".join(name for name in vars(OfflineEngine) if not name.startswith("_"))
        raise AttributeError(
            f"llm_engine.{name} does not exist: llm_engine has {known}; "
            "requests are started by LLM.generate and LLM.chat, counters are in LLM.get_metrics"
        )
