# SPDX-License-Identifier: Apache-2.0
"""The form of an output as an automaton over its tokens: first its reasoning and the budget for it, then its grammar.

States are never changed, a step makes a new one; so drafts are tried and dropped without undoing anything, and a state
remembers its mask and its last successor: what the filter of drafts has computed, the verification uses.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy.core.constraint import TokenArray, TokenConstraint
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.reasoning import ReasoningFormat, ReasoningState
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.structured_output.grammar import GrammarCompiler, GrammarState, num_mask_words

MAX_CACHED_GRAMMARS = 64
COMPILER_STACK_BYTES = 256 << 20  # a chain of references takes 3 kB a link, and the longest has about 10,000


@dataclass(frozen=True)
class ConstraintRules:
    """What does not change while a request runs.

    Attributes:
        end_ids: tokens that end the request; none if it ignores them.
        start_id, end_id: tokens around the reasoning; -1 where there is none to come.
        reasoning_max_tokens, response_max_tokens: budgets; None is no limit.
        num_words: of a mask.
    """

    end_ids: tuple[int, ...]
    start_id: int
    end_id: int
    reasoning_max_tokens: int | None
    response_max_tokens: int | None
    num_words: int

    def mask_of(self, ids: Collection[int]) -> TokenArray:
        """Return the mask of these ids alone."""
        words = np.zeros(self.num_words, np.int32)
        set_bits(words, ids)
        return words


def set_bits(words: TokenArray, ids: Collection[int]) -> None:
    """Let these ids survive a mask."""
    view = words.view(np.uint32)
    for token_id in ids:
        view[token_id // 32] |= np.uint32(1 << (token_id % 32))


def has_bit(words: TokenArray, token_id: int) -> bool:
    """True if the mask lets this id survive; ids beyond it never do."""
    return token_id // 32 < len(words) and bool((int(words[token_id // 32]) >> (token_id % 32)) & 1)


@dataclass(frozen=True)
class _Place:
    """Where an output stands.

    Attributes:
        grammar: its state; None if the answer may have any form.
        num_reasoning: tokens of reasoning so far; num_answer: tokens of the answer.
        ending: the finish reason if nothing may follow.
    """

    rules: ConstraintRules
    reasoning: ReasoningState
    grammar: GrammarState | None
    num_reasoning: int = 0
    num_answer: int = 0
    ending: str | None = None

    def after(self, token_id: int) -> _Place:
        """Return the place behind one more token."""
        if self.ending is not None:
            return self
        if self.reasoning is ReasoningState.OPEN:
            if token_id == self.rules.end_id:
                return replace(self, reasoning=ReasoningState.CLOSED)
            return replace(self, num_reasoning=self.num_reasoning + 1)
        if self.reasoning is ReasoningState.UNDECIDED and token_id == self.rules.start_id:
            return replace(self, reasoning=ReasoningState.OPEN)
        return self._answered(token_id)

    def mask(self) -> TokenArray | None:
        """Return the mask of the ids that may follow, None for all."""
        if self.ending is not None:
            return None  # a row behind the end, whose token nobody reads
        rules = self.rules
        if self.reasoning is ReasoningState.OPEN:
            if self.must_close:
                return rules.mask_of([rules.end_id])
            return self._mask_of_reasoning()
        if self.grammar is None:
            return None
        words = np.empty(rules.num_words, np.int32)
        self.grammar.write_mask(words)
        if self.grammar.is_accepting:
            set_bits(words, rules.end_ids)
        if self.reasoning is ReasoningState.UNDECIDED:
            set_bits(words, [rules.start_id])
        return words

    @property
    def must_close(self) -> bool:
        """True where the reasoning has spent its budget."""
        budget = self.rules.reasoning_max_tokens
        return self.reasoning is ReasoningState.OPEN and budget is not None and self.num_reasoning >= budget

    def _mask_of_reasoning(self) -> TokenArray | None:
        """Keep the output from ending before the answer that must have a form."""
        if self.grammar is None or not self.rules.end_ids:
            return None
        return ~self.rules.mask_of(self.rules.end_ids)

    def _answered(self, token_id: int) -> _Place:
        grammar, count = self.grammar, self.num_answer + 1
        ending = None if self.rules.response_max_tokens != count else "length"
        if grammar is not None:
            if grammar.is_accepting and token_id in self.rules.end_ids:
                ending = "stop"
            else:
                grammar = grammar.after(token_id)
                ending = "stop" if grammar.is_complete else ending
        return replace(self, reasoning=ReasoningState.CLOSED, grammar=grammar, num_answer=count, ending=ending)


class _Step:
    """A place with what has been computed for it."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self._mask: tuple[TokenArray | None] | None = None
        self._next: tuple[int, _Step] | None = None

    def mask(self) -> TokenArray | None:
        if self._mask is None:
            self._mask = (self.place.mask(),)
        return self._mask[0]

    def after(self, token_id: int) -> _Step:
        if self._next is None or self._next[0] != token_id:
            self._next = (token_id, _Step(self.place.after(token_id)))
        return self._next[1]

    def allows(self, token_id: int) -> bool:
        if self.place.ending is not None:
            return False
        mask = self.mask()
        return mask is None or has_bit(mask, token_id)


class OutputConstraint(TokenConstraint):
    """The automaton of one choice: see core.constraint.TokenConstraint."""

    def __init__(self, place: _Place) -> None:
        self._step = _Step(place)
        self.error = ""

    def num_allowed(self, draft: Sequence[int]) -> int:
        """Return how many of the draft's first tokens may follow, one after the other."""
        step = self._step
        for count, token_id in enumerate(draft):
            if not step.allows(token_id):
                return count
            step = step.after(token_id)
        return len(draft)

    def forced_tokens(self, limit: int) -> list[int]:
        """Return the text that the grammar forces, or the marker that ends a reasoning whose budget is spent."""
        place = self._step.place
        if place.must_close:
            return [place.rules.end_id][:limit]
        if place.grammar is None or place.reasoning is not ReasoningState.CLOSED or place.ending is not None:
            return []
        forced = place.grammar.forced_tokens()[:limit].tolist()
        return forced[: self.num_allowed(forced)]

    def fill_masks(self, draft: Sequence[int], masks: TokenArray) -> list[bool]:
        """Write the mask of each row; return which rows are constrained."""
        step, constrained = self._step, []
        for row, token_id in enumerate([*draft, None]):
            mask = step.mask()
            constrained.append(mask is not None)
            if mask is not None:
                masks[row] = mask[: masks.shape[1]]
            if step.place.grammar is not None:
                self.error = self.error or step.place.grammar.error
            if token_id is not None:
                step = step.after(token_id)
        return constrained

    def push(self, token_id: int) -> str | None:
        """Take an emitted token; return the finish reason if it must be the last one."""
        self._step = self._step.after(token_id)
        return self._step.place.ending


def thread_with_stack(num_bytes: int) -> ThreadPoolExecutor:
    """Return a thread with a stack of this size, of which only what is used costs memory."""
    before = threading.stack_size(num_bytes)
    try:
        executor = ThreadPoolExecutor(1, "grammar")
        executor.submit(int).result()  # starts it
    finally:
        threading.stack_size(before)
    return executor


class ConstraintFactory:
    """Gives each choice of a request its automaton, if the request asks for any.

    Grammars are compiled in a thread that reads the vocabulary while the weights are loaded, which takes seconds if it
    is large, and whose stack holds the deepest grammar. The latest ones are kept, and so is why one was refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        end_ids: Sequence[int],
        reasoning_format: ReasoningFormat | None,
        backend: str = "auto",
    ) -> None:
        """Prepare for one model.

        Args:
            tokenizer: None if the model has none: then there are no grammars.
            vocab_size: ids below it exist.
            end_ids: the model's end tokens.
            reasoning_format: how the model marks its reasoning; None if it does not reason.
            backend: `off` refuses grammars.
        """
        self._tokenizer = tokenizer
        self._num_words = num_mask_words(vocab_size)
        self._end_ids = tuple(end_ids)
        self._format = reasoning_format
        self._backend = backend
        self._compiler: Future[GrammarCompiler] | None = None
        if tokenizer is not None and backend != "off":
            self._thread = thread_with_stack(COMPILER_STACK_BYTES)
            self._compiler = self._thread.submit(GrammarCompiler, tokenizer, vocab_size)
        self._grammars: OrderedDict[tuple[str, str, str], Future[GrammarState]] = OrderedDict()

    def prepare(self, request: GenerationRequest) -> Future[GrammarState] | None:
        """Begin to compile the request's grammar, if it has one; `make` waits no longer when the result is done."""
        spec = request.params.guided_decoding
        return None if spec is None or self._compiler is None else self._compiled(spec, self._compiler)

    def make(self, request: GenerationRequest) -> list[OutputConstraint | None]:
        """Return one automaton per choice; None where nothing is asked for.

        Raises:
            InvalidRequestError: naming the field that cannot be honoured.
        """
        params = request.params
        if params.reasoning_max_tokens is not None and self._format is None:
            raise InvalidRequestError("reasoning_max_tokens", "needs a server with --reasoning-parser")
        field = asking_field(params)
        if field is None:
            return [None] * params.n
        place = _Place(self._rules(request, field), request.reasoning, self._grammar(request))
        return [OutputConstraint(place) for _ in range(params.n)]

    def _grammar(self, request: GenerationRequest) -> GrammarState | None:
        spec = request.params.guided_decoding
        if spec is None:
            return None
        if self._compiler is None:
            why = "has no tokenizer" if self._tokenizer is None else "runs with --guided-decoding-backend off"
            raise InvalidRequestError(spec.field, f"structured output is not available: this server {why}")
        return self._compiled(spec, self._compiler).result()

    def _compiled(self, spec: GuidedDecodingParams, compiler: Future[GrammarCompiler]) -> Future[GrammarState]:
        key = (spec.field, spec.kind, json.dumps(getattr(spec, spec.kind)))
        if key not in self._grammars:
            self._grammars[key] = self._thread.submit(lambda: compiler.result().compile(spec))
            if len(self._grammars) > MAX_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(key)
        return self._grammars[key]

    def _rules(self, request: GenerationRequest, field: str) -> ConstraintRules:
        params = request.params
        start_id, end_id = (-1, -1) if request.reasoning is ReasoningState.CLOSED else self._markers(field)
        return ConstraintRules(
            () if params.ignore_eos else self._end_ids,
            start_id,
            end_id,
            params.reasoning_max_tokens,
            params.response_max_tokens,
            self._num_words,
        )

    def _markers(self, field: str) -> tuple[int, int]:
        """Return the tokens around the reasoning."""
        if self._format is None or self._tokenizer is None:
            raise InvalidRequestError(field, "the prompt leaves its reasoning open; that needs --reasoning-parser")
        return self._marker(field, self._format.start), self._marker(field, self._format.end)

    def _marker(self, field: str, text: str) -> int:
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise InvalidRequestError(field, f"together with reasoning it needs a tokenizer with a token {text!r}")
        return ids[0]


def asking_field(params: SamplingParams) -> str | None:
    """Return the field that asks for a constraint, None if none does."""
    if params.guided_decoding is not None:
        return params.guided_decoding.field
    if params.response_max_tokens is not None:
        return "response_max_tokens"
    return "reasoning_max_tokens" if params.reasoning_max_tokens is not None else None
