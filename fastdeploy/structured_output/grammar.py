# SPDX-License-Identifier: Apache-2.0
"""Grammars of structured output, compiled by llguidance and checked before a request is admitted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import llguidance
import numpy as np

from fastdeploy.core.constraint import TokenArray
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.core.panics import convert_panics
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.structured_output.schema_errors import FormSchemas
from fastdeploy.structured_output.source import LIMITS, make_source, one_line, refusal
from fastdeploy.structured_output.vocabulary import TokenizerAdapter

_NO_TOKEN_ALLOWED = "NoExtensionBias"  # llguidance's error where no token can follow
DEAD_END = "nothing can follow in the grammar, although the text is not complete"
MAX_FORCED_BYTES = 4096  # of text that must follow; encoding it for each row takes up to 15 ms


def num_bitmask_words(vocab_size: int) -> int:
    """Return the words of a bitmask: one bit for every id, and one for the end token that llguidance requires."""
    return (vocab_size + 1 + 31) // 32


@dataclass(frozen=True, eq=False)
class GrammarMemory:
    """The memory of a compiled grammar, which all its states share: it is held while this object exists."""

    client_id: str = ""
    num_bytes: int = 0


class GrammarState:
    """The state of a grammar after some tokens. It is immutable: `advance` copies the matcher."""

    def __init__(self, matcher: llguidance.LLMatcher, memory: GrammarMemory) -> None:
        self._matcher = matcher
        self._memory = memory

    @property
    @convert_panics
    def error(self) -> str:
        """Return why no token can follow; "" if one can."""
        if self._matcher.is_error():
            error = one_line(self._matcher.get_error())
            return DEAD_END if error.startswith(_NO_TOKEN_ALLOWED) else error
        if self._num_forced_bytes <= MAX_FORCED_BYTES:
            return ""
        return f"forces a text of {self._num_forced_bytes} bytes, more than {MAX_FORCED_BYTES}"

    @cached_property
    def _num_forced_bytes(self) -> int:
        """Length of the text that must follow: to compute the bitmask, llguidance encodes all of it."""
        return len(self._matcher.deep_copy().compute_ff_bytes())

    @property
    @convert_panics
    def is_accepting(self) -> bool:
        """Return whether the output may end here."""
        return self._matcher.is_accepting()

    @property
    @convert_panics
    def is_terminated(self) -> bool:
        """Return whether the output is complete, so that no token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @convert_panics
    def allows(self, token_id: int) -> bool:
        """Return whether this token may follow."""
        return self._matcher.deep_copy().validate_tokens([token_id]) == 1

    @convert_panics
    def advance(self, token_id: int) -> GrammarState:
        """Return the state after one more token; it has an error if the token is not allowed."""
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token_id)
        return GrammarState(matcher, self._memory)

    @convert_panics
    def fill_bitmask(self, bitmask: TokenArray) -> None:
        """Write the bitmask of the allowed ids, [words] int32; all zero if the state has an error."""
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        if self.error:
            bitmask[:] = 0

    @convert_panics
    def forced_tokens(self) -> TokenArray:
        """Return the tokens of the text that the grammar forces to follow."""
        return np.array(self._matcher.deep_copy().compute_ff_tokens(), np.int32)


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Attributes:
        vocabulary: the tokenizer's vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Prepare for token ids 0 .. vocab_size - 1."""
        self.vocabulary = TokenizerAdapter(tokenizer, vocab_size)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self.vocabulary))

    def compile(self, spec: StructuredOutputsParams) -> GrammarState:
        """Convert a form to a grammar, compile it and return its initial state.

        Raises:
            InvalidRequestError: the form is invalid, too large, or uses something unsupported; names the field.
        """
        schemas = FormSchemas()
        source = make_source(spec, self.vocabulary.special_ids, schemas)
        try:
            return self.compile_source(spec.field, source, GrammarMemory())
        except InvalidRequestError as error:
            raise refusal(spec, schemas, error.message) from None

    @convert_panics
    def compile_source(self, field: str, source: str, memory: GrammarMemory) -> GrammarState:
        """Compile a grammar in llguidance's notation; raise InvalidRequestError as `compile` does.

        llguidance releases the GIL while it compiles and while it computes a bitmask, so other threads go on.
        """
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        except ValueError as error:
            raise InvalidRequestError(field, one_line(str(error))) from None
        state = GrammarState(matcher, memory)
        bitmask = np.zeros(num_bitmask_words(self.vocabulary.eos_token_id), np.int32)
        if not state.error:
            state.fill_bitmask(bitmask)
            bitmask.view(np.uint32)[-1] &= np.uint32(0xFFFFFFFF ^ (1 << self.vocabulary.eos_token_id % 32))
        if not bitmask.any() and state.error in ("", DEAD_END):
            raise InvalidRequestError(field, "allows no output that this tokenizer can encode")
        if state.error:
            raise InvalidRequestError(field, state.error)
        return state
