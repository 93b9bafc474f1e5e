# SPDX-License-Identifier: Apache-2.0
"""A request as it arrives at the engine; apart from the ledger, so that API processes need no NumPy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from fastdeploy.core.bad_words import ROOT, BadWordAutomaton
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.handover import KVImage
from fastdeploy.core.json_types import check_unicode
from fastdeploy.core.reasoning import ReasoningState
from fastdeploy.core.sampling_params import SamplingParams

MAX_SALT_LENGTH = 128  # characters; every prompt and every block of the prefix cache is marked with the salt
CLIENT_MARK, PROMPT_MARK = "§", "¶"  # not ASCII, so no id that a client chooses contains them


def check_cache_salt(field: str, salt: str) -> None:
    """Check the salt of a request, which is left out if there is none.

    Args:
        field: its name in errors.

    Raises:
        InvalidRequestError: it is empty, too long, or not valid Unicode.
    """
    if not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise InvalidRequestError(field, f"expected 1 to {MAX_SALT_LENGTH} characters, got {len(salt)}")
    check_unicode(field, salt)


def add_client_mark(request_id: str, client: str) -> str:
    """Return an id that is different for each client; `client` must not contain the mark."""
    return f"{client}{CLIENT_MARK}{request_id}"


def add_prompt_number(request_id: str, number: int) -> str:
    """Return the id of one of several prompts of an HTTP request."""
    return f"{number}{PROMPT_MARK}{request_id}"


def without_prompt_number(request_id: str) -> str:
    """Return the id that all prompts of an HTTP request have in common, with the mark of its client."""
    client, mark, rest = request_id.rpartition(CLIENT_MARK)
    return f"{client}{mark}{rest.rpartition(PROMPT_MARK)[2]}"


def without_marks(request_id: str) -> str:
    """Return the id as its client knows it, which names an HTTP request with all of its prompts."""
    return without_prompt_number(request_id).rpartition(CLIENT_MARK)[2]


def is_requested(request_id: str, wanted: Collection[str]) -> bool:
    """Return whether `wanted` contains the id, as its client knows it, of the HTTP request that this is a prompt of."""
    return without_marks(request_id) in wanted


@dataclass
class GenerationRequest:
    """One prompt with its sampling parameters and n choices, as a front end sends it to the engine.

    Attributes:
        request_id: unique among the requests in flight: the client, the prompt's number if its HTTP request has
            several, and the id that the client knows, with a mark after each of the first two.
        prompt_token_ids: at least one token.
        params: sampling parameters; `params.seed` None lets the engine draw one.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        priority: requests of lower values start before others of the same client; equal ones in order of arrival.
        reasoning: whether the output begins inside the reasoning, for reasoning models.
        may_call_tools: whether a tool call ends the reasoning, for models that call tools within it.
        timeout_s: seconds after arrival at which the request is ended with a timeout error; None never.
        resumed: for each choice, the tokens of its output that were emitted before, which count as its output in every
            respect but are not emitted again; None for a choice that has ended. None: the request begins.
        hands_over: whether the engine gives the request up after its first tokens (`Handover`), if they do not end it.
        export_slots: slots of the engine's arena for the blocks of the first open choice, if they are to be exported.
        image: keys and values of the first open choice's first tokens, from an engine that has given the request up.
        client_id: whose request this is: a digest of the API key, or of the address on a server without keys. Work is
            shared between clients in proportion to `client_weight`.
        client_max_sequences: maximum number of sequences of the client in the engine, running and waiting; None is no
            limit.
        client_name: name of the API key, for metrics and log lines; empty for an address.
        arrived_s: when it arrived at the server, on the monotonic clock of this machine, which the engine's times of
            the request count from; None: when the engine gets it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    reasoning: ReasoningState = ReasoningState.CLOSED
    may_call_tools: bool = False
    timeout_s: float | None = None
    resumed: list[list[int] | None] | None = None
    hands_over: bool = False
    export_slots: list[int] = field(default_factory=list)
    image: KVImage | None = None
    client_id: str = ""
    client_weight: float = 1.0
    client_max_sequences: int | None = None
    client_name: str = ""
    arrived_s: float | None = None

    @property
    def open_choices(self) -> list[tuple[int, list[int]]]:
        """The index and the resumed tokens of each choice that has not ended."""
        if self.resumed is None:
            return [(index, []) for index in range(self.params.n)]
        return [(index, tokens) for index, tokens in enumerate(self.resumed) if tokens is not None]

    @cached_property
    def bad_words(self) -> BadWordAutomaton | None:
        """The automaton of the bad words, which the choices share; None without bad words."""
        sequences = self.params.bad_words_token_ids
        return BadWordAutomaton(sequences) if sequences else None

    @cached_property
    def prompt_bad_words_state(self) -> int:
        """The state of `bad_words` after the prompt."""
        return self.bad_words.advance(ROOT, self.prompt_token_ids) if self.bad_words else ROOT
