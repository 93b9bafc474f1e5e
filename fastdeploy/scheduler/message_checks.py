# SPDX-License-Identifier: Apache-2.0
"""What must be true of a message beyond the types and ranges of its fields, before anything relies on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import TOKEN_IDS
from fastdeploy.scheduler.request_states import (
    MAX_CHOICES,
    Handed,
    Holding,
    Image,
    NodeMessage,
    Refused,
    Ticket,
    Tokens,
)

FINISH_REASONS = (None, "stop", "length", "abort", "error")
REFUSALS = ("invalid", "room")


def check_ticket(ticket: Ticket) -> None:
    """Raise ValueError if this is no ticket that an owner writes; the engine checks the rest as in any request."""
    _check_request(ticket.request)
    num_choices, image = ticket.request.params.n, ticket.image
    _check(len(ticket.resumed) == num_choices, f"expected resumed of {num_choices} choices, got {len(ticket.resumed)}")
    _check(any(tokens is not None for tokens in ticket.resumed), "all its choices have ended")
    _check(ticket.timeout_s is None or math.isfinite(ticket.timeout_s), "expected a finite timeout_s")
    _check(image is None or image.leg < ticket.leg, "its image is not of an earlier leg")


def check_to_owner(messages: Sequence[object]) -> None:
    """Raise ValueError if a node sends no such messages."""
    for message in messages:
        match message:
            case Tokens(delta=delta):
                _check_delta(delta)
            case Handed(image=image):
                _check_image(image, message, message.leg)
            case Refused(kind=kind):
                _check(kind in REFUSALS, "expected invalid or room")
            case Holding(held=held):
                for one in held:
                    _check(len(one.next_indices) <= MAX_CHOICES, f"expected at most {MAX_CHOICES} next_indices")
                    _check_image(one.image, message, one.leg)


def _check_request(request: GenerationRequest) -> None:
    tokens, weight, limit = request.prompt_token_ids, request.client_weight, request.client_max_sequences
    _check(bool(tokens), "expected a prompt")
    _check(_are_token_ids(tokens), "expected token ids in the prompt")
    _check(request.timeout_s is None or math.isfinite(request.timeout_s), "expected a finite timeout_s of the request")
    _check(math.isfinite(weight) and weight > 0, "expected a positive client_weight")
    _check(limit is None or limit >= 1, "expected a positive client_max_sequences")
    _check(request.arrived_s is None, "expected no arrived_s, which another machine's clock says nothing about")
    begins = request.resumed is None and request.image is None and not request.hands_over and not request.export_slots
    _check(begins, "expected a request as a client makes it")


def _check_delta(delta: TokenDelta) -> None:
    """Check the delta of a `Tokens`, of which there is one per step, choice and request: an index, tokens, sources."""
    num_tokens = len(delta.token_ids)
    if not 0 <= delta.index < MAX_CHOICES:
        raise ValueError(f"expected an index in [0, {MAX_CHOICES - 1}]")
    if not _are_token_ids(delta.token_ids):
        raise ValueError("expected token ids in the delta")
    if delta.logprobs is not None and len(delta.logprobs) != num_tokens:
        raise ValueError("expected log-probabilities of each token")
    if delta.finish_reason not in FINISH_REASONS:
        raise ValueError("expected another finish_reason")
    if (delta.error is not None) != (delta.finish_reason == "error"):
        raise ValueError("expected an error with its finish_reason")
    if delta.steps is not None and sum(count for count, _ in delta.steps) != num_tokens:
        raise ValueError("expected steps of all tokens")
    if any(len(sources) > count for count, sources in delta.sources_per_step()):
        raise ValueError("expected at most one source per token")


def _check_image(image: Image | None, sender: NodeMessage | Holding, leg: int) -> None:
    made = (sender.node, sender.incarnation, leg)
    is_own = image is None or (image.node, image.incarnation, image.leg) == made
    _check(is_own, "expected an image that the sender made in this leg")


def _are_token_ids(tokens: list[int]) -> bool:
    return not tokens or (min(tokens) >= TOKEN_IDS.low and max(tokens) <= (TOKEN_IDS.high or 0))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
