# SPDX-License-Identifier: Apache-2.0
"""Compiles the grammars of requests in a separate thread and creates the constraint of each choice."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.faults import fault_point
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.reasoning import ReasoningFormat, ReasoningState
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.structured_output.constraint import ConstraintParams, ConstraintState, OutputConstraint
from fastdeploy.structured_output.grammar import GrammarCompiler, GrammarState, num_bitmask_words

MAX_CACHED_GRAMMARS = 64
COMPILER_STACK_BYTES = 256 << 20  # a chain of references needs 3 kB per link, and the longest has about 10,000 links


class StructuredOutputManager:
    """Creates the constraints of requests that have a grammar or a token budget.

    Grammars are compiled in a thread whose stack is large enough for the deepest grammar. The thread first reads the
    vocabulary, which can take seconds, while the weights are loaded. The latest results, errors included, are cached.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        reasoning_format: ReasoningFormat | None,
        backend: str = "auto",
    ) -> None:
        """Start the compiler's thread.

        Args:
            tokenizer: None if the model has none; grammars are refused then.
            vocab_size: number of token ids.
            eos_token_ids: the model's end tokens.
            reasoning_format: how the model marks its reasoning; None if it does not reason.
            backend: `off` refuses grammars.
        """
        self._tokenizer = tokenizer
        self._num_words = num_bitmask_words(vocab_size)
        self._eos_token_ids = tuple(eos_token_ids)
        self._format = reasoning_format
        self._compiler: Future[GrammarCompiler] | None = None
        if tokenizer is not None and backend != "off":
            self._thread = _start_thread(COMPILER_STACK_BYTES)
            self._compiler = self._thread.submit(GrammarCompiler, tokenizer, vocab_size)
        self._grammars: OrderedDict[tuple[str, str, str], Future[GrammarState]] = OrderedDict()

    def prepare(self, request: GenerationRequest) -> Future[GrammarState] | None:
        """Start to compile the request's grammar, if it has one; once it is done, `make_constraints` does not wait."""
        spec = request.params.guided_decoding
        if spec is None or self._compiler is None:
            return None
        return self._compile(request.request_id, spec, self._compiler)

    def make_constraints(self, request: GenerationRequest) -> list[OutputConstraint | None]:
        """Return one constraint per choice; None for requests without one.

        Raises:
            InvalidRequestError: the grammar or budget cannot be used; names its field.
        """
        params = request.params
        if params.reasoning_max_tokens is not None and self._format is None:
            raise InvalidRequestError("reasoning_max_tokens", "requires a server with --reasoning-parser")
        field = constraint_field(params)
        if field is None:
            return [None] * params.n
        state = ConstraintState(self._params(request, field), request.reasoning, self._grammar(request))
        return [OutputConstraint(state) for _ in range(params.n)]

    def _grammar(self, request: GenerationRequest) -> GrammarState | None:
        spec = request.params.guided_decoding
        if spec is None:
            return None
        if self._compiler is None:
            reason = "has no tokenizer" if self._tokenizer is None else "runs with --guided-decoding-backend off"
            raise InvalidRequestError(spec.field, f"structured output is not available: this server {reason}")
        return self._compile(request.request_id, spec, self._compiler).result()

    def _compile(
        self, request_id: str, spec: GuidedDecodingParams, compiler: Future[GrammarCompiler]
    ) -> Future[GrammarState]:
        def compile_now() -> GrammarState:
            fault_point("compile", request_id)
            return compiler.result().compile(spec)

        key = (spec.field, spec.kind, json.dumps(getattr(spec, spec.kind)))
        if key not in self._grammars:
            self._grammars[key] = self._thread.submit(compile_now)
            if len(self._grammars) > MAX_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(key)
        return self._grammars[key]

    def _params(self, request: GenerationRequest, field: str) -> ConstraintParams:
        params, is_closed = request.params, request.reasoning is ReasoningState.CLOSED
        start_id, end_id = (-1, -1) if is_closed else self._reasoning_token_ids(field)
        return ConstraintParams(
            eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
            reasoning_start_id=start_id,
            reasoning_end_id=end_id,
            reasoning_max_tokens=params.reasoning_max_tokens,
            response_max_tokens=params.response_max_tokens,
            num_words=self._num_words,
        )

    def _reasoning_token_ids(self, field: str) -> tuple[int, int]:
        """Return the tokens that start and end the reasoning."""
        if self._format is None or self._tokenizer is None:
            raise InvalidRequestError(field, "the prompt leaves the reasoning open, which requires --reasoning-parser")
        tokenizer = self._tokenizer
        return _single_token(tokenizer, field, self._format.start), _single_token(tokenizer, field, self._format.end)


def constraint_field(params: SamplingParams) -> str | None:
    """Return the name of the field that constrains the output, None if there is none."""
    if params.guided_decoding is not None:
        return params.guided_decoding.field
    if params.response_max_tokens is not None:
        return "response_max_tokens"
    return "reasoning_max_tokens" if params.reasoning_max_tokens is not None else None


def _single_token(tokenizer: Tokenizer, field: str, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequestError(field, f"with reasoning, {text!r} must be a single token of the tokenizer")
    return ids[0]


def _start_thread(stack_bytes: int) -> ThreadPoolExecutor:
    """Start a thread with a stack of this size, of which only the used part costs memory."""
    before = threading.stack_size(stack_bytes)
    try:
        executor = ThreadPoolExecutor(1, "grammar")
        executor.submit(int).result()  # starts it
    finally:
        threading.stack_size(before)
    return executor
