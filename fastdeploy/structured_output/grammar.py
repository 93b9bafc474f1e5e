# SPDX-License-Identifier: Apache-2.0
"""Grammars of structured output, compiled by llguidance and checked before a request is admitted."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import is_lark_syntax

from fastdeploy.core.constraint import TokenArray
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.panics import convert_panics
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.structured_output.structural_tag import JSON_OPTIONS, structural_tag_to_lark

MAX_GBNF_CHARS = 1 << 16  # GBNF is parsed in Python
_NO_TOKEN_ALLOWED = "NoExtensionBias"  # llguidance's error where no token can follow
MAX_MESSAGE_CHARS = 400
MAX_RULES = 1000  # beyond this, expanding terminals that refer to one another can take minutes
MAX_PROPERTIES = 1000  # of one object; compiling them takes about 0.2 s
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # at most about 15 ms for one bitmask
    step_max_items=50_000,
    max_lexer_states=50_000,  # of up to 2 kB each
    max_grammar_size=30_000,
    verbose_errors=False,
)
_RULE = re.compile(r"^[ \t]*[?!]?\w+[ \t]*(?:\[[^\]\n]*\])?[ \t]*(?:\.[ \t]*-?\d+)?[ \t]*:", re.MULTILINE)
_TEMPERATURE = re.compile(r"^[ \t]*[?!]?\w+[ \t]*\[[^\]\n]*\btemperature\b[ \t]*=", re.MULTILINE)


class TokenizerAdapter:
    """A tokenizer with the interface that llguidance requires: the bytes of every token, and an encoder of bytes.

    llguidance requires an end token. It gets an additional id after the last one, because the constraint decides which
    of the model's tokens end a request, and when.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Read the bytes of ids 0 .. vocab_size - 1."""
        self._tokenizer = tokenizer
        self._special = frozenset(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._id_of = {
            token: i for i, token in reversed(list(enumerate(self.tokens))) if token and i not in self._special
        }
        self._max_token_bytes = max(map(len, self._id_of), default=0)
        self.tokens.append(b"<end of output>")
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self.special_token_ids = [*sorted(self._special), vocab_size]

    @property
    def special_ids(self) -> dict[str, int]:
        """Return the ids of the special tokens by their text."""
        return {self.tokens[token_id].decode(errors="replace"): token_id for token_id in sorted(self._special)}

    def __call__(self, text: bytes) -> list[int]:
        """Return ids whose bytes are exactly `text`.

        The tokenizer encodes the text. If it finds a special token in the text or adds a space at the front, the text
        is encoded greedily instead: the longest token that matches, again and again.
        """
        ids = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        is_plain = all(token_id < self.eos_token_id and token_id not in self._special for token_id in ids)
        if is_plain and b"".join(self.tokens[token_id] for token_id in ids) == text:
            return ids
        return self._encode_greedily(text)

    def _encode_greedily(self, text: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            lengths = range(min(self._max_token_bytes, len(text) - start), 0, -1)
            length = next((n for n in lengths if text[start : start + n] in self._id_of), 0)
            if length == 0:
                break
            ids.append(self._id_of[text[start : start + length]])
            start += length
        return ids


def num_bitmask_words(vocab_size: int) -> int:
    """Return the words of a bitmask: one bit for every id, and one for the end token that llguidance requires."""
    return (vocab_size + 1 + 31) // 32


class GrammarState:
    """The state of a grammar after some tokens. It is immutable: `advance` copies the matcher."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    @convert_panics
    def error(self) -> str:
        """Return why no token can follow; "" if one can."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

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
    def advance(self, token_id: int) -> GrammarState:
        """Return the state after one more token; it has an error if the token is not allowed."""
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token_id)
        return GrammarState(matcher)

    @convert_panics
    def fill_bitmask(self, bitmask: TokenArray) -> None:
        """Write the bitmask of the allowed ids, [words] int32; all zero if the state has an error."""
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        if self._matcher.is_error():
            bitmask[:] = 0

    @convert_panics
    def forced_tokens(self) -> TokenArray:
        """Return the tokens of the text that the grammar forces to follow."""
        return np.array(self._matcher.deep_copy().compute_ff_tokens(), np.int32)


class GrammarCompiler:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Prepare for token ids 0 .. vocab_size - 1."""
        self._adapter = TokenizerAdapter(tokenizer, vocab_size)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self._adapter))

    @convert_panics
    def compile(self, spec: GuidedDecodingParams) -> GrammarState:
        """Compile a grammar and return its initial state.

        Raises:
            InvalidRequestError: the grammar is invalid, too large, or uses something unsupported; names the field.
        """
        try:
            source = self._source(spec)
            state = GrammarState(llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS))
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(spec.field, _one_line(str(error))) from None
        bitmask = np.zeros(num_bitmask_words(self._adapter.eos_token_id), np.int32)
        if not state.error:
            state.fill_bitmask(bitmask)
            bitmask.view(np.uint32)[-1] &= np.uint32(0xFFFFFFFF ^ (1 << self._adapter.eos_token_id % 32))
        if not bitmask.any() and state.error.partition(" ")[0] in ("", _NO_TOKEN_ALLOWED):
            raise InvalidRequestError(spec.field, "allows no output that this tokenizer can encode")
        if state.error:
            raise InvalidRequestError(spec.field, state.error)
        return state

    def _source(self, spec: GuidedDecodingParams) -> str:
        """Return the grammar in the notation of llguidance."""
        match spec.kind:
            case "json":
                return _json_schema(spec.field, spec.json)
            case "json_object":
                return _json_schema(spec.field, '{"type": "object"}')
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(spec.regex or "")
            case "choice":
                return llguidance.LLMatcher.grammar_from_regex("|".join(map(_escaped, spec.choice or ())))
            case "structural_tag":
                _check_size(spec.field, json.loads(spec.structural_tag))
                lark = structural_tag_to_lark(spec.field, spec.structural_tag, self._adapter.special_ids)
                return llguidance.grammar_from("lark", lark)
        return _context_free(spec.field, spec.grammar or "")


def _json_schema(field: str, text: str) -> str:
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(field, "expected a JSON schema, which is an object or true")
    _check_size(field, schema)
    defaults: Any = JSON_OPTIONS  # a type of the library that only its stubs have
    return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults, {"lenient": False})


def _check_size(field: str, schema: Any) -> None:
    """Refuse objects with many properties: compiling them takes quadratic time, which would delay every step."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            properties = part.get("properties")
            if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
                found = f"an object has {len(properties)}"
                raise InvalidRequestError(field, f"expected at most {MAX_PROPERTIES} properties; {found}")
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _context_free(field: str, text: str) -> str:
    if len(text) > MAX_GBNF_CHARS and not is_lark_syntax(text):
        raise InvalidRequestError(field, f"expected at most {MAX_GBNF_CHARS} characters of GBNF, got {len(text)}")
    if _TEMPERATURE.search(text):
        raise InvalidRequestError(
            field, "the rule attribute temperature is not supported; use the request's temperature"
        )
    lark = llguidance.grammar_from("grammar", text)
    num_rules = len(_RULE.findall(lark))
    if num_rules > MAX_RULES:
        raise InvalidRequestError(field, f"expected at most {MAX_RULES} rules, got {num_rules}")
    return lark


def _escaped(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", lambda match: "\\" + match.group(), text)


def _one_line(message: str) -> str:
    return " ".join(message.split())[:MAX_MESSAGE_CHARS]
