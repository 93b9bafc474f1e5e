# SPDX-License-Identifier: Apache-2.0
"""Requests that the engine prepares: their grammars are compiled, and their blocks copied, beside the steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import GenerationRequest, without_marks
from fastdeploy.core.handover import Handover


class Preparing(Protocol):
    """What is needed of an engine."""

    def prepare(self, request: GenerationRequest) -> Future[Any] | None: ...
    def cancel(self, request_id: str) -> None: ...


@dataclass(eq=False)
class PreparedRequest:
    """A request that is not in the engine yet.

    Attributes:
        future: done when it is prepared; a grammar is compiled as long as a request keeps its future.
        is_added: whether it is to be added when it is prepared.
        is_reported: whether its client was told that it is prepared.
    """

    client: bytes
    request: GenerationRequest
    future: Future[Any] | None
    is_added: bool
    is_reported: bool = False

    @property
    def is_done(self) -> bool:
        """Return whether adding it does not wait."""
        return self.future is None or self.future.done()

    def without_form(self) -> GenerationRequest:
        """Return the request as it can be added at once, in order to be aborted."""
        return replace(self.request, params=self.request.params.without_form(), image=None)

    def handover(self) -> Handover:
        """Return what another engine needs to begin it."""
        resumed = self.request.resumed
        return Handover(self.request.request_id, [[]] * self.request.params.n if resumed is None else resumed)


class PreparedRequests:
    """The requests of all clients that are not in the engine yet."""

    def __init__(self, engine: Preparing) -> None:
        self._engine = engine
        self._requests: dict[str, PreparedRequest] = {}

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._requests)

    def __iter__(self) -> Iterator[PreparedRequest]:
        """Iterate in order of arrival; meanwhile, requests may be removed."""
        return iter([*self._requests.values()])

    def take_done(self) -> list[PreparedRequest]:
        """Return the requests that are prepared now; those that are not to be added yet are kept."""
        done = [prepared for prepared in self._requests.values() if prepared.is_done and not prepared.is_reported]
        for prepared in done:
            self._take(prepared)
        return done

    @property
    def are_waiting(self) -> bool:
        """Return whether any of them is still being prepared."""
        return any(not prepared.is_reported for prepared in self._requests.values())

    def add(self, client: bytes, request: GenerationRequest, is_added: bool) -> PreparedRequest | None:
        """Begin to prepare a request, unless its client has done so.

        Returns:
            The request if it is prepared already; else `take_done` will return it.

        Raises:
            InvalidRequestError: another request with this id is being prepared.
            RequestFailedError: an internal error.
        """
        prepared = self._requests.get(request.request_id)
        if prepared is None:
            future = self._engine.prepare(request)
            prepared = self._requests[request.request_id] = PreparedRequest(client, request, future, is_added)
        elif is_added and not prepared.is_added and prepared.client == client:
            prepared.request, prepared.is_added, prepared.is_reported = request, True, False
        else:
            raise in_flight_error(request.request_id)
        if not prepared.is_done:
            return None
        self._take(prepared)
        return prepared

    def remove(self, request_id: str) -> PreparedRequest | None:
        """Forget a request and release what was prepared for it; return it, None if it is unknown."""
        prepared = self._requests.pop(request_id, None)
        if prepared is not None:
            self._engine.cancel(request_id)
        return prepared

    def _take(self, prepared: PreparedRequest) -> None:
        prepared.is_reported = True
        if prepared.is_added:
            del self._requests[prepared.request.request_id]


def in_flight_error(request_id: str) -> InvalidRequestError:
    """Return the error of a request whose id is in use."""
    return InvalidRequestError("request_id", f"{without_marks(request_id)!r} is in flight already")
