# SPDX-License-Identifier: Apache-2.0
"""Legs that run on the owner's own engine, without Redis."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastdeploy.core.errors import (
    EngineDeadError,
    FastDeployError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from fastdeploy.core.outputs import ErrorInfo, TokenDelta
from fastdeploy.ipc.connection import EngineConnection
from fastdeploy.ipc.streams import DeltaStream
from fastdeploy.scheduler.owned_request import LOCAL_CLAIMANT
from fastdeploy.scheduler.request_states import Refused, Ticket, Tokens, leg_id

logger = logging.getLogger("fastdeploy.cluster")

OnMessage = Callable[[Tokens | Refused], None]


class LocalLegs:
    """Runs tickets on the engine; what comes back are messages of `LOCAL_CLAIMANT`."""

    def __init__(self, connection: EngineConnection, on_message: OnMessage) -> None:
        """Run tickets through `connection`."""
        self._connection = connection
        self._on_message = on_message
        self._legs: dict[str, _Leg] = {}

    def __len__(self) -> int:
        """Return the number of legs that run."""
        return len(self._legs)

    def run(self, ticket: Ticket) -> None:
        """Begin a leg; nothing happens if the engine has ended, of which the owner is told otherwise."""
        request = ticket.engine_request()
        leg = _Leg(request.request_id, ticket, self._on_message, self._drop)
        self._legs[request.request_id] = leg
        try:
            self._connection.run(request, leg)
        except EngineDeadError:
            self._drop(request.request_id)
        except Exception:
            logger.exception("request %s cannot be given to the engine", ticket.request.request_id)
            leg.fail(RequestFailedError("internal error"))

    def abort(self, owner: str, number: int, leg: int) -> None:
        """End a leg; nothing comes back of it any more."""
        request_id = leg_id(owner, number, leg)
        if (found := self._legs.pop(request_id, None)) is not None:
            found.is_aborted = True
            self._connection.abort(request_id)

    def _drop(self, request_id: str) -> None:
        self._legs.pop(request_id, None)


class _Leg(DeltaStream):
    """Passes deltas on instead of keeping them."""

    def __init__(self, request_id: str, ticket: Ticket, on_message: OnMessage, on_end: Callable[[str], None]) -> None:
        self._resumed = ticket.resumed
        super().__init__(request_id, sum(tokens is not None for tokens in ticket.resumed))
        self.is_aborted = False
        self._source = ticket.number, ticket.leg, LOCAL_CLAIMANT.node, LOCAL_CLAIMANT.incarnation, 0
        self._on_message, self._on_end = on_message, on_end

    def put(self, delta: TokenDelta) -> None:
        self.num_open -= delta.finish_reason is not None
        if self.num_open == 0:
            self._on_end(self.request_id)
        if not self.is_aborted:
            self._on_message(Tokens(*self._source, delta.first_index, delta))

    def put_tokens(
        self, index: int, token_ids: list[int], draft_sources: list[str], seed: int, first_index: int
    ) -> None:
        if not self.is_aborted:
            delta = TokenDelta(self.request_id, index, token_ids, draft_sources, seed=seed, first_index=first_index)
            self._on_message(Tokens(*self._source, first_index, delta))

    def fail(self, error: FastDeployError) -> None:
        """Pass on why the engine does not run this leg; the owner is told otherwise if the engine has ended."""
        self._on_end(self.request_id)
        match error:
            case _ if self.is_aborted:
                return
            case EngineDeadError():
                return
            case InvalidRequestError(field=field, message=message):
                self._on_message(Refused(*self._source, "invalid", field, message))
            case QueueFullError():
                self._on_message(Refused(*self._source, "room", "", str(error)))
            case _:
                for index, tokens in enumerate(self._resumed):
                    if tokens is not None:
                        self.put(_failed(self.request_id, index, len(tokens), str(error)))


def _failed(request_id: str, index: int, first_index: int, message: str) -> TokenDelta:
    """Return the end of a choice that the engine failed to begin, through a fault of its own."""
    error = ErrorInfo("internal_error", message)
    return TokenDelta(request_id, index, finish_reason="error", error=error, first_index=first_index)
