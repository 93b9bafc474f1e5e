# SPDX-License-Identifier: Apache-2.0
"""Checks new requests: a request that is admitted can run to its end."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import without_marks
from fastdeploy.core.request import GenerationRequest, Prompt, Request
from fastdeploy.core.sampling_params import MATCH, SamplingParams
from fastdeploy.core.seeds import choice_seed, request_seed
from fastdeploy.structured_output.constraint import OutputConstraint
from fastdeploy.structured_output.manager import StructuredOutputManager, constraint_field


class Admission:
    """Checks requests against the engine's limits and creates the ledgers of their choices.

    Args:
        max_model_len: maximum number of tokens of prompt and output together.
        num_cache_tokens: tokens that the whole KV cache holds; no request may need more.
        vocab_size: number of token ids.
        eos_token_ids: the model's end tokens.
        has_tokenizer: whether stop strings are supported.
        structured_output: makes the constraints of outputs; None refuses structured output and reasoning budgets.
        server_seed: determines the seeds of requests without one; None draws them at random.
    """

    def __init__(
        self,
        *,
        max_model_len: int,
        num_cache_tokens: int,
        vocab_size: int,
        eos_token_ids: list[int],
        has_tokenizer: bool,
        speculative: SpeculativeConfig,
        server_seed: int | None = None,
        structured_output: StructuredOutputManager | None = None,
    ) -> None:
        self.max_model_len = min(max_model_len, num_cache_tokens)
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._has_tokenizer = has_tokenizer
        self._speculative = speculative
        self._server_seed = server_seed
        self._structured_output = structured_output or StructuredOutputManager(None, vocab_size, eos_token_ids, None)
        self._num_arrivals = 0

    def prepare(self, request: GenerationRequest) -> Future[Any] | None:
        """Start to compile the request's grammar; once the future is done, `admit` does not wait. None: nor now."""
        return self._structured_output.prepare(request)

    def check(self, request: GenerationRequest, used_ids: Collection[str] = ()) -> list[OutputConstraint | None]:
        """Check a request; wait for its grammar.

        Returns:
            The constraint of each choice, None for those without one.

        Raises:
            InvalidRequestError: names the field and its range.
        """
        self._check(request, used_ids)
        constraints = self._structured_output.make_constraints(request)
        self._check_accept_policy(request.params)
        return constraints

    def admit(self, request: GenerationRequest, used_ids: Collection[str], now_s: float) -> list[Request]:
        """Return one ledger per choice that has not ended.

        Args:
            used_ids: ids of unfinished requests.
            now_s: time of arrival on the engine's clock.

        Raises:
            InvalidRequestError: names the field and its range.
        """
        params = request.params
        constraints = self.check(request, used_ids)
        seed = params.seed if params.seed is not None else request_seed(self._server_seed, self._num_arrivals)
        self._num_arrivals += 1
        if self._speculative.verify_strategy == "greedy" and not params.is_greedy:
            request = replace(request, params=replace(params, temperature=0.0))
        num_prompt = len(request.prompt_token_ids)
        max_total = num_prompt + self._max_output(params, num_prompt)
        max_drafts, prompt = self._max_drafts(params), Prompt(request)
        return [
            Request(
                request,
                index,
                choice_seed(seed, index),
                max_total,
                max_drafts,
                now_s,
                constraints[index],
                prompt,
                tokens,
            )
            for index, tokens in request.open_choices
        ]

    def _check(self, request: GenerationRequest, used_ids: Collection[str]) -> None:
        if request.request_id in used_ids:
            raise InvalidRequestError("request_id", f"{without_marks(request.request_id)!r} is in flight already")
        num_prompt = len(request.prompt_token_ids)
        if not 1 <= num_prompt < self.max_model_len:
            raise InvalidRequestError("prompt", f"expected 1 to {self.max_model_len - 1} tokens, got {num_prompt}")
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self.vocab_size:
            raise InvalidRequestError("prompt", f"expected token ids in [0, {self.vocab_size - 1}]")
        if not request.client_weight > 0:
            raise InvalidRequestError("client_weight", f"expected a positive number, got {request.client_weight}")
        params = request.params
        if request.resumed is not None:
            self._check_resumed(request.resumed, params, num_prompt)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            self._check_ids(name, getattr(params, name) or ())
        for sequence in params.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", sequence)
        if params.stop and not self._has_tokenizer:
            raise InvalidRequestError(
                "stop", "this model has no tokenizer, which stop strings need; use stop_token_ids"
            )

    def _check_resumed(self, resumed: list[list[int] | None], params: SamplingParams, num_prompt: int) -> None:
        if len(resumed) != params.n or all(tokens is None for tokens in resumed):
            raise InvalidRequestError("resumed", f"expected {params.n} entries, of which one or more are not None")
        room = self._max_output(params, num_prompt)
        for tokens in resumed:
            if tokens is not None and len(tokens) > room:
                raise InvalidRequestError("resumed", f"expected at most {room} tokens, got {len(tokens)}")
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
                raise InvalidRequestError("resumed", f"expected token ids in [0, {self.vocab_size - 1}]")

    def _max_output(self, params: SamplingParams, num_prompt: int) -> int:
        room = self.max_model_len - num_prompt
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _check_accept_policy(self, params: SamplingParams) -> None:
        """Refuse forms and budgets if all drafts are accepted, whether they are allowed or not."""
        field = constraint_field(params)
        if field is not None and self._speculative.accept_policy == "accept_all":
            raise InvalidRequestError(field, "is not available with accept_policy accept_all")

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and max(ids) >= self.vocab_size:
            raise InvalidRequestError(name, f"expected token ids in [0, {self.vocab_size - 1}], got {max(ids)}")

    def _max_drafts(self, params: SamplingParams) -> int:
        limit, own = self._speculative.num_speculative_tokens, params.speculative
        if own is None:
            return limit
        if own.method == "off":
            return 0
        if own.method == MATCH and not self._speculative.can_match:
            message = f'"{MATCH}" needs a server that matches (ngram, suffix, or an mtp_strategy), this one does not'
            raise InvalidRequestError("speculative.method", message)
        return limit if own.num_speculative_tokens is None else min(limit, own.num_speculative_tokens)
