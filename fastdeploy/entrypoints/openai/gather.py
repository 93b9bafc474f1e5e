# SPDX-License-Identifier: Apache-2.0
"""What a stream's chunks hold beside text: several steps at once if asked, and where each token came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate
from fastdeploy.entrypoints.openai.logprobs import token_name
from fastdeploy.ipc.merge import merge_deltas


class ChunkGatherer:
    """Holds back what is new of a choice until it has enough tokens for a chunk, or has ended."""

    def __init__(self, num_tokens: int) -> None:
        """Gather at least `num_tokens` tokens; a step that emits several may bring more."""
        self._num_tokens = num_tokens
        self._held: dict[int, ChoiceUpdate] = {}

    def push(self, updates: Iterable[ChoiceUpdate]) -> list[ChoiceUpdate]:
        """Return what is ready, the held parts before it included."""
        if self._num_tokens == 1:
            return list(updates)
        return [joined for update in updates if self._is_ready(joined := self._join(update))]

    def _join(self, update: ChoiceUpdate) -> ChoiceUpdate:
        held = self._held.setdefault(update.index, update)
        if held is not update:
            held.text += update.text
            merge_deltas([held.delta], update.delta)
        return held

    def _is_ready(self, held: ChoiceUpdate) -> bool:
        if held.delta.finish_reason is None and len(held.delta.token_ids) < self._num_tokens:
            return False
        del self._held[held.index]
        return True


def describe_tokens(tokenizer: Tokenizer, delta: TokenDelta) -> list[dict[str, Any]]:
    """Return each token's id, its text (`bytes:...` for half characters), and where it came from.

    `origin` is draft or target, `source` the proposer of a draft.
    """
    return [
        {"id": token_id, "text": token_name(tokenizer, token_id), **_origin(source)}
        for token_id, source in zip(delta.token_ids, delta.sources(), strict=True)
    ]


def _origin(source: str | None) -> dict[str, str]:
    return {"origin": "target"} if source is None else {"origin": "draft", "source": source}
