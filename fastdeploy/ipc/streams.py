# SPDX-License-Identifier: Apache-2.0
"""The received deltas of a request, until their reader takes them."""

from __future__ import annotations

import asyncio

from fastdeploy.core.errors import FastDeployError, InvalidRequestError
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.ipc.merge import join_delta, join_tokens

MAX_UNREAD = 2**15  # tokens and top log-probabilities that may wait for a client that does not read
MAX_COUNTED = 20  # log-probabilities of a token that count besides its own; max_logprob_entries limits all of a request


class DeltaStream:
    """The received, unread deltas of one request: at most one per choice.

    Attributes:
        num_open: choices that are not finished.
        num_unread: unread tokens and log-probabilities, of which at most MAX_COUNTED per token count.
        drops_itself: whether its connection drops it at its end, because no reader does.
    """

    def __init__(self, request_id: str, num_choices: int) -> None:
        self.request_id = request_id
        self.num_open = num_choices
        self.num_unread = 0
        self.drops_itself = False
        self.deltas: dict[int, TokenDelta] = {}
        self.error: FastDeployError | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for the next delta or error

    def put(self, delta: TokenDelta) -> None:
        self.num_open -= delta.finish_reason is not None
        entry = delta.logprobs[0] if delta.logprobs else None
        num_others = 0 if entry is None else min(len(entry.top) + len(entry.requested), MAX_COUNTED)
        self.num_unread += len(delta.token_ids) * (1 + num_others)
        unread = self.deltas.setdefault(delta.index, delta)
        if unread is not delta:
            join_delta(unread, delta)

    def put_tokens(
        self, index: int, token_ids: list[int], draft_sources: list[str], seed: int, first_index: int
    ) -> None:
        """Add a plain delta."""
        self.num_unread += len(token_ids)
        unread = self.deltas.get(index)
        if unread is None:
            self.deltas[index] = TokenDelta(
                self.request_id, index, token_ids, draft_sources, seed=seed, first_index=first_index
            )
        else:
            join_tokens(unread, token_ids, draft_sources)

    def fail(self, error: FastDeployError) -> None:
        self.error = error
        self.wake()

    async def get(self, loop: asyncio.AbstractEventLoop) -> list[TokenDelta]:
        """Wait for a delta or an error; return all unread deltas."""
        while not self.deltas and self.error is None:
            self._reader = loop.create_future()
            await self._reader
        deltas, self.deltas, self.num_unread = self.deltas, {}, 0
        return list(deltas.values())

    def wake(self) -> None:
        """Wake the reader."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def unread_error(stream: DeltaStream) -> InvalidRequestError:
    """Return the error of a request whose client does not read."""
    return InvalidRequestError("stream", f"ended: the client left {stream.num_unread} tokens unread")
