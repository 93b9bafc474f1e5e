# SPDX-License-Identifier: Apache-2.0
"""Creates the constraint of each choice of a request."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from fastdeploy.core.constraint import TokenArray
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.reasoning import ReasoningFormat, ReasoningState
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.structured_output.constraint import ConstraintParams, ConstraintState, OutputConstraint
from fastdeploy.structured_output.form_compiler import FormCompiler
from fastdeploy.structured_output.grammar import GrammarCompiler, GrammarState, num_bitmask_words
from fastdeploy.structured_output.trial_process import Verdict


class StructuredOutputManager:
    """Creates the constraints of requests that have a form, a token budget or a list of allowed ids."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        reasoning_format: ReasoningFormat | None,
        backend: str = "auto",
    ) -> None:
        """Start the compiler of forms.

        Args:
            tokenizer: None if the model has none; forms are refused then.
            vocab_size: number of token ids.
            eos_token_ids: the model's end tokens.
            reasoning_format: how the model marks its reasoning; None if it does not reason.
            backend: `off` refuses forms.
        """
        self._tokenizer = tokenizer
        self._num_words = num_bitmask_words(vocab_size)
        self._eos_token_ids = tuple(eos_token_ids)
        self._format = reasoning_format
        self._compiler: FormCompiler | None = None
        if tokenizer is not None and backend != "off":
            self._compiler = FormCompiler(partial(GrammarCompiler, tokenizer, vocab_size))
            weakref.finalize(self, self._compiler.close)

    def prepare(self, request: GenerationRequest) -> Future[None] | None:
        """Start to compile the request's form, if it has one.

        Returns:
            A future, or None without a form. While the caller keeps the future and once it is done, `make_constraints`
            does not wait. When no request's future of a form is left, the form is not compiled.

        Raises:
            QueueFullError: too many forms of the client are waiting.
        """
        if request.params.form is None or self._compiler is None:
            return None
        return self._compiler.submit(request)[1]

    def make_constraints(self, request: GenerationRequest) -> list[OutputConstraint | None]:
        """Return one constraint per choice; None for requests without one.

        Raises:
            InvalidRequestError: the form or budget cannot be used; names its field.
            QueueFullError: too many forms of the client are waiting, or the machine is too busy to compile the form.
        """
        params = request.params
        if params.reasoning_max_tokens is not None and self._format is None:
            raise InvalidRequestError("reasoning_max_tokens", "requires --reasoning-parser")
        field = constraint_field(params)
        if field is None and params.allowed_token_ids is None:
            return [None] * params.n
        reasoning = ReasoningState.CLOSED if field is None else request.reasoning  # allowed ids ignore the markers
        grammar = self._grammar(request)
        constants = self._params(params)
        if reasoning is not ReasoningState.CLOSED:
            constants = self._with_reasoning(constants, field or "", request.may_call_tools, grammar)
        return [OutputConstraint(ConstraintState(constants, reasoning, grammar)) for _ in range(params.n)]

    def _grammar(self, request: GenerationRequest) -> GrammarState | None:
        spec = request.params.form
        if spec is None:
            return None
        if self._compiler is None:
            reason = "has no tokenizer" if self._tokenizer is None else "runs with --guided-decoding-backend off"
            raise InvalidRequestError(spec.field, f"structured output is not available: this server {reason}")
        form, done = self._compiler.submit(request)
        done.result()
        result = form.result
        del form, done  # the traceback of an error keeps this frame
        if isinstance(result, Verdict):
            raise InvalidRequestError(result.field or spec.field + result.path, result.message)
        if isinstance(result, Exception):
            raise result
        return result

    def _params(self, params: SamplingParams) -> ConstraintParams:
        """Return the constants of an output without reasoning."""
        allowed_ids = params.allowed_token_ids
        return ConstraintParams(
            eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
            reasoning_start_id=-1,
            reasoning_end_id=-1,
            reasoning_max_tokens=params.reasoning_max_tokens,
            response_max_tokens=params.response_max_tokens,
            num_words=self._num_words,
            allowed=None if allowed_ids is None else _bitmask_of(allowed_ids, self._num_words),
        )

    def _with_reasoning(
        self, params: ConstraintParams, field: str, may_call_tools: bool, grammar: GrammarState | None
    ) -> ConstraintParams:
        """Add the tokens that begin and end the reasoning."""
        marks, tokenizer = self._format, self._tokenizer
        if marks is None or tokenizer is None:
            raise InvalidRequestError(field, "the prompt leaves the reasoning open, which requires --reasoning-parser")
        call = marks.tool_call_start if may_call_tools else ""
        call_id = _single_token(tokenizer, field, call) if call else -1
        forbidden = params.eos_token_ids if grammar is not None else ()
        if call and grammar is not None and not grammar.allows(call_id):
            forbidden += (call_id,)
        return replace(
            params,
            reasoning_start_id=_single_token(tokenizer, field, marks.start),
            reasoning_end_id=_single_token(tokenizer, field, marks.end),
            tool_call_start_id=call_id,
            not_in_reasoning=forbidden,
        )


def constraint_field(params: SamplingParams) -> str | None:
    """Return the name of the field that constrains the output, None if there is none."""
    if params.form is not None:
        return params.form.field
    if params.response_max_tokens is not None:
        return "response_max_tokens"
    return "reasoning_max_tokens" if params.reasoning_max_tokens is not None else None


def _bitmask_of(token_ids: list[int], num_words: int) -> TokenArray:
    """Return the bitmask that allows these ids, which may be many."""
    is_allowed = np.zeros(32 * num_words, np.uint8)
    is_allowed[token_ids] = 1
    return np.packbits(is_allowed, bitorder="little").view(np.int32)


def _single_token(tokenizer: Tokenizer, field: str, text: str) -> int:
    token_id = tokenizer.find_token(text)
    if token_id is None:
        reason = f"with reasoning, {text!r} must be a single token of the tokenizer; start without --reasoning-parser"
        raise InvalidRequestError(field, reason)
    return token_id
