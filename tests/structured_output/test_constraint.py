# SPDX-License-Identifier: Apache-2.0
"""Constraints on tokenizers of every kind: which tokens are allowed, and what ends a request."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningState
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS
from fastdeploy.entrypoints.openai.parsers.tool_grammar import ToolCallGrammar
from fastdeploy.structured_output.constraint import OutputConstraint
from fastdeploy.structured_output.grammar import GrammarState
from fastdeploy.structured_output.manager import StructuredOutputManager
from fastdeploy.structured_output.vocabulary import TokenizerAdapter
from tests.detokenize.tokenizers_for_tests import make_tokenizer, save_tokenizer

DEEP = '{"format":' + '{"type":"sequence","elements":[' * 240 + '{"type":"regex","pattern":"a"}' + "]}" * 240 + "}"
KINDS = ("byte_level", "metaspace", "byte_fallback")
PRINT = r"print\([a-z]{2,9}, [a-z]{2,5}=.{1,5}\)"


@cache
def manager(kind: str = "byte_level", parser: str = "") -> StructuredOutputManager:
    tokenizer = make_tokenizer(kind)
    return StructuredOutputManager(tokenizer, tokenizer.vocab_size, eos_token_ids(kind), REASONING_FORMATS.get(parser))


def eos_token_ids(kind: str = "byte_level") -> list[int]:
    """Return two ids that the tests use as end tokens."""
    return sorted(make_tokenizer(kind).special_ids)[-2:]


def constraint(kind: str = "byte_level", **params: Any) -> OutputConstraint:
    (first, *_) = manager(kind).make_constraints(GenerationRequest("a", [1], SamplingParams(**params)))
    assert first is not None
    return first


def guided(**spec: Any) -> GuidedDecodingParams:
    return GuidedDecodingParams(**spec)


def allowed(constraint: OutputConstraint, kind: str = "byte_level") -> set[int]:
    """Return the allowed ids."""
    return allowed_by(constraint, make_tokenizer(kind))


def allowed_by(constraint: OutputConstraint, tokenizer: Tokenizer) -> set[int]:
    """Return the allowed ids of this tokenizer."""
    vocab_size = tokenizer.vocab_size
    bitmasks = np.zeros((1, (vocab_size + 31) // 32), np.int32)
    assert constraint.fill_bitmasks([], bitmasks) == [True]
    bits = np.unpackbits(bitmasks[0].view(np.uint8), bitorder="little")
    return {token_id for token_id in np.flatnonzero(bits).tolist() if token_id < vocab_size}


def encode(kind: str, text: str) -> list[int]:
    """Return tokens whose bytes are exactly `text`."""
    return adapter(kind)(text.encode())


@cache
def adapter(kind: str) -> TokenizerAdapter:
    tokenizer = make_tokenizer(kind)
    return TokenizerAdapter(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["plain words", " leading", "naïve 日本 \u2028", "a</s>b", "<0x41>", "▁"])
def test_forced_text_is_encoded_to_the_byte_and_never_with_special_tokens(kind: str, text: str) -> None:
    tokenizer, ids = make_tokenizer(kind), encode(kind, text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert not set(ids) & tokenizer.special_ids


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_drafts_agree_on_every_token_along_random_outputs(kind: str) -> None:
    tokenizer, ends = make_tokenizer(kind), set(eos_token_ids(kind))
    for seed in range(8):
        random = np.random.default_rng(seed)
        automaton, text = constraint(kind, guided_decoding=guided(regex=r"(the|END)? [a-e ]{2,9}(\n[é好f]+)+")), b""
        for _ in range(25):
            ids = allowed(automaton, kind)
            assert ids and not ids & (tokenizer.special_ids - ends)
            probe = random.integers(0, tokenizer.vocab_size, 40)
            assert [automaton.num_valid_tokens([i]) for i in probe.tolist()] == [int(i in ids) for i in probe.tolist()]
            token_id = int(random.choice(sorted(ids)))
            text += tokenizer.token_bytes(token_id)
            if automaton.accept_token(token_id):
                break
        assert re.match(rb"(the|END)? [a-e ]", text)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_verification_are_masked_as_if_their_drafts_were_accepted(kind: str) -> None:
    draft = encode(kind, "print(name, end=")
    words = (make_tokenizer(kind).vocab_size + 31) // 32
    ahead, masks = constraint(kind, guided_decoding=guided(regex=PRINT)), np.zeros((len(draft) + 1, words), np.int32)
    assert ahead.num_valid_tokens(draft) == len(draft)
    assert ahead.fill_bitmasks(draft, masks) == [True] * (len(draft) + 1)
    token_by_token = constraint(kind, guided_decoding=guided(regex=PRINT))
    for row in range(len(draft) + 1):
        one = np.zeros((1, words), np.int32)
        token_by_token.fill_bitmasks(draft[:0], one)
        assert np.array_equal(one[0], masks[row]), row
        if row < len(draft):
            token_by_token.accept_token(int(draft[row]))


def test_draft_is_valid_up_to_its_first_forbidden_token_and_checking_changes_no_state() -> None:
    automaton = constraint(guided_decoding=guided(choice=["the word", "the world"]))
    good, bad = encode("byte_level", "the wor"), encode("byte_level", "x")
    before = allowed(automaton)
    assert automaton.num_valid_tokens([*good, *bad, *good]) == len(good)
    assert automaton.num_valid_tokens(bad) == 0
    assert allowed(automaton) == before


def test_all_end_tokens_are_allowed_exactly_where_the_grammar_accepts() -> None:
    automaton, ends = constraint(guided_decoding=guided(regex="[a-z]{2,4}")), set(eos_token_ids())
    for letter, accepts in (("a", False), ("b", True), ("c", True)):
        automaton.accept_token(encode("byte_level", letter)[0])
        assert (allowed(automaton) & ends == ends) is accepts
        assert bool(allowed(automaton) & ends) is accepts
    assert automaton.accept_token(eos_token_ids()[1]) == "stop"


def test_a_complete_grammar_ends_the_request_without_an_end_token() -> None:
    automaton, ids = constraint(guided_decoding=guided(choice=["yes", "no"])), encode("byte_level", "no")
    assert [automaton.accept_token(token_id) for token_id in ids] == [*[None] * (len(ids) - 1), "stop"]
    assert automaton.num_valid_tokens(ids) == 0


def test_ignored_end_tokens_are_never_allowed() -> None:
    automaton = constraint(guided_decoding=guided(regex="[a-z]*"), ignore_eos=True)
    assert not allowed(automaton) & set(eos_token_ids())


def test_an_end_token_may_be_part_of_a_grammar() -> None:
    end = eos_token_ids()[0]
    automaton = constraint(guided_decoding=guided(grammar=f'start: "a" <[{end}]>'))
    automaton.accept_token(encode("byte_level", "a")[0])
    assert allowed(automaton) == {end}
    assert automaton.accept_token(end) == "stop"


def test_forced_tokens_are_valid() -> None:
    automaton = constraint(guided_decoding=guided(regex="the words are given: [a-z]+"))
    forced = automaton.forced_tokens(100)
    assert len(forced) > 2
    assert automaton.num_valid_tokens(forced) == len(forced)
    assert automaton.forced_tokens(2) == forced[:2]


def test_choices_have_states_of_their_own() -> None:
    params = SamplingParams(n=2, guided_decoding=guided(choice=["aa", "bb"]))
    one, two = manager().make_constraints(GenerationRequest("a", [1], params))
    assert one is not None and two is not None
    one.accept_token(encode("byte_level", "a")[0])
    assert allowed(one) != allowed(two)


def test_output_cannot_end_before_its_reasoning_does() -> None:
    tokenizer = make_tokenizer("byte_level")
    start, end, marker = sorted(tokenizer.special_ids)
    marks = ReasoningFormat(tokenizer.token_text(start), tokenizer.token_text(marker))
    params = SamplingParams(guided_decoding=guided(choice=["yes"]))
    request = GenerationRequest("a", [1], params, reasoning=ReasoningState.OPEN)
    (automaton,) = StructuredOutputManager(tokenizer, tokenizer.vocab_size, [end], marks).make_constraints(request)
    assert automaton is not None
    assert set(range(tokenizer.vocab_size)) - allowed(automaton) == {end}
    automaton.accept_token(marker)
    assert allowed(automaton) <= set(encode("byte_level", "y")) | set(encode("byte_level", "yes"))


def test_allowed_ids_alone_are_the_mask_and_end_tokens_are_not_added() -> None:
    automaton = constraint(allowed_token_ids=[7, 3, 7])
    assert allowed(automaton) == {3, 7}
    assert automaton.num_valid_tokens([3, 7, 4, 3]) == 2
    assert [automaton.accept_token(token_id) for token_id in (3, 7)] == [None, None]
    assert allowed(automaton) == {3, 7}
    assert automaton.forced_tokens(4) == []


def test_allowed_ids_need_neither_a_tokenizer_nor_a_reasoning_parser() -> None:
    request = GenerationRequest("a", [1], SamplingParams(allowed_token_ids=[99]), reasoning=ReasoningState.OPEN)
    (automaton,) = StructuredOutputManager(None, 100, [2], None).make_constraints(request)
    assert automaton is not None
    assert [automaton.num_valid_tokens([token_id]) for token_id in (98, 99, 2)] == [0, 1, 0]


def test_allowed_ids_and_a_form_allow_what_both_do() -> None:
    ids = {letter: encode("byte_level", letter)[0] for letter in "abcd"}
    form = guided(regex="[abc]{2}")
    automaton = constraint(guided_decoding=form, allowed_token_ids=[ids["b"], ids["c"], ids["d"]])
    assert allowed(automaton) == {ids["b"], ids["c"]}
    nothing = constraint(guided_decoding=form, allowed_token_ids=[ids["d"]])
    assert allowed(nothing) == set()
    assert nothing.num_valid_tokens([ids["a"]]) == 0


def test_tokens_that_a_form_forces_are_drafts_only_as_far_as_they_are_allowed() -> None:
    forced = constraint(guided_decoding=guided(regex="the words are given")).forced_tokens(100)
    others = [token_id for token_id in range(make_tokenizer("byte_level").vocab_size) if token_id != forced[2]]
    automaton = constraint(guided_decoding=guided(regex="the words are given"), allowed_token_ids=others)
    assert forced.index(forced[2]) == 2
    assert automaton.forced_tokens(100) == forced[:2]


def test_only_a_forced_end_of_the_reasoning_is_allowed_though_it_is_not_listed() -> None:
    tokenizer = make_tokenizer("byte_level")
    start, end, marker = sorted(tokenizer.special_ids)
    marks = ReasoningFormat(tokenizer.token_text(start), tokenizer.token_text(marker))
    params = SamplingParams(reasoning_max_tokens=1, allowed_token_ids=[5, 6])
    request = GenerationRequest("a", [1], params, reasoning=ReasoningState.OPEN)
    (automaton,) = StructuredOutputManager(tokenizer, tokenizer.vocab_size, [end], marks).make_constraints(request)
    assert automaton is not None
    masks = [allowed(automaton)]
    for token_id in (5, marker):
        automaton.accept_token(token_id)
        masks.append(allowed(automaton))
    assert masks == [{5, 6}, {marker}, {5, 6}]


def calling(tokenizer: Tokenizer, may_call_tools: bool = True, **params: Any) -> OutputConstraint:
    """Return the constraint of an output that begins within Qwen3's reasoning."""
    marks = REASONING_FORMATS["qwen3"]
    given = StructuredOutputManager(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1], marks)
    request = GenerationRequest(
        "a", [1], SamplingParams(**params), reasoning=ReasoningState.OPEN, may_call_tools=may_call_tools
    )
    (automaton,) = given.make_constraints(request)
    assert automaton is not None
    return automaton


@pytest.mark.parametrize("is_special", [True, False])
def test_call_within_the_reasoning_begins_the_response(tmp_path: Path, is_special: bool) -> None:
    tokenizer = tokenizer_with_marks(tmp_path, is_special)
    (call,) = tokenizer.encode("<tool_call>")
    special_ids = {"<tool_call>": call} if is_special else {}
    hermes = ToolCallGrammar(FORMATS["hermes"], {"f": {"type": "object"}}, special_ids)
    for grammar in (hermes.required(), hermes.within_text(), hermes.optional('"yes"')):
        form = guided(grammar=grammar, source="tools")
        automaton, closed = calling(tokenizer, guided_decoding=form), calling(tokenizer, guided_decoding=form)
        closed.accept_token(tokenizer.encode("</think>")[0])
        for token_id in tokenizer.encode("the quick"):
            assert automaton.accept_token(token_id) is None
        draft = [call, *tokenizer.encode('\n{"name": "f", "arguments": {')]
        assert automaton.num_valid_tokens([*draft, call]) == len(draft)
        for token_id in draft:
            automaton.accept_token(token_id)
            closed.accept_token(token_id)
        assert allowed_by(automaton, tokenizer) == allowed_by(closed, tokenizer)


def test_call_within_the_reasoning_is_forbidden_where_the_response_must_not_be_one(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_marks(tmp_path)
    (call,) = tokenizer.encode("<tool_call>")
    end = tokenizer.vocab_size - 1
    ids = set(range(tokenizer.vocab_size))
    choice = guided(choice=["yes"])
    assert ids - allowed_by(calling(tokenizer, guided_decoding=choice), tokenizer) == {end, call}
    assert ids - allowed_by(calling(tokenizer, False, guided_decoding=choice), tokenizer) == {end}


def test_budgets_take_a_call_within_the_reasoning_for_the_response(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_marks(tmp_path)
    (call,), (end,), word = (tokenizer.encode(text) for text in ("<tool_call>", "</think>", "a"))
    automaton = calling(tokenizer, reasoning_max_tokens=2, response_max_tokens=3)
    assert [automaton.accept_token(token_id) for token_id in (*word, call, *word, *word)] == [
        None,
        None,
        None,
        "length",
    ]
    automaton = calling(tokenizer, False, reasoning_max_tokens=2, response_max_tokens=3)
    for token_id in (*word, call):
        automaton.accept_token(token_id)
    assert allowed_by(automaton, tokenizer) == {end} and automaton.forced_tokens(4) == [end]


def test_start_of_a_call_must_be_a_token_if_it_can_end_the_reasoning(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(save_tokenizer(tmp_path, special_tokens=["<think>", "</think>"]))
    with pytest.raises(InvalidRequestError, match=r"'<tool_call>' must be .* start without --reasoning-parser"):
        calling(tokenizer, reasoning_max_tokens=2)
    assert calling(tokenizer, False, reasoning_max_tokens=2)


def tokenizer_with_marks(folder: Path, is_special: bool = True) -> Tokenizer:
    """Return a tokenizer that has Qwen3's marks as tokens, special ones or others."""
    save_tokenizer(folder, special_tokens=["<think>", "</think>", "<tool_call>", "</tool_call>", "<end>"])
    if not is_special:
        data = json.loads((folder / "tokenizer.json").read_text())
        for token in data["added_tokens"]:
            token["special"] = token["special"] and "_call" not in token["content"]
        (folder / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.from_pretrained(folder)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("guided_json", {"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
    ("guided_json", {"json": {"type": "object", "x-guidance": {"lenient": True}, "not": {}}}, "not"),
    ("guided_json", {"json": {"type": "string", "format": 5}}, "Expected string for 'format', got 5"),
    ("guided_json", {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    ("guided_json", {"json": {"$ref": "https://example.com/x"}}, "example.com"),
    ("guided_json", {"json": "[1]"}, "expected a JSON schema"),
    (
        "guided_json",
        {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1001)}}},
        "at most 1000 properties; an object has 1001",
    ),
    ("guided_regex", {"regex": "a(?=b)"}, "look-around"),
    ("guided_regex", {"regex": "("}, "unclosed group"),
    ("guided_grammar", {"grammar": "start: start"}, "allows no output"),
    ("guided_grammar", {"grammar": "start: other"}, "unknown name"),
    ("guided_grammar", {"grammar": "root ::= [a"}, "GBNF"),
    (
        "guided_grammar",
        {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(1001))},
        "at most 1000 rules",
    ),
    ("structural_tag", {"structural_tag": DEEP}, "at most 64 levels"),
    ("guided_grammar", {"grammar": "root ::= " + '"a" ' * 20000}, "65536 characters of GBNF"),
    ("guided_grammar", {"grammar": "start: a\na[temperature=0.5]: /b/"}, "temperature"),
]


@pytest.mark.parametrize(("field", "spec", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_invalid_grammar_is_refused_with_its_field(field: str, spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        constraint(guided_decoding=guided(**spec))
    assert caught.value.field == field
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("grammar", ['?start: "ab"', 'start : "ab"', 'root ::= "ab"'])
def test_grammars_are_told_apart_by_their_rules(grammar: str) -> None:
    tokens = encode("byte_level", "ab")
    automaton = constraint(guided_decoding=guided(grammar=grammar))
    assert automaton.num_valid_tokens([*tokens, *tokens]) == len(tokens)


def test_a_text_that_cannot_be_completed_has_an_error_in_words() -> None:
    schema = {
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^a$": {"type": "integer"}},
        "additionalProperties": False,
        "required": ["a"],
    }
    automaton = constraint(guided_decoding=guided(json={"type": "object", **schema}))
    for token_id in encode("byte_level", '{"a":1, '):  # only a second `a` could follow
        automaton.accept_token(token_id)
    automaton.fill_bitmasks([], np.zeros((1, (make_tokenizer("byte_level").vocab_size + 31) // 32), np.int32))
    assert automaton.error == "nothing can follow in the grammar, although the text is not complete"


def test_long_chain_of_references_is_compiled() -> None:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)}  # overflows a stack of the usual size
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, "a3000": {"type": "integer"}}}
    automaton = constraint(guided_decoding=guided(json=schema))
    assert set(encode("byte_level", "7")) <= allowed(automaton)


def test_budgets_and_grammars_need_a_reasoning_parser_and_a_tokenizer() -> None:
    def refused(given: StructuredOutputManager, reasoning: ReasoningState, **params: Any) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            given.make_constraints(GenerationRequest("a", [1], SamplingParams(**params), reasoning=reasoning))
        return str(caught.value)

    thinking = manager(parser="qwen3")
    assert "--reasoning-parser" in refused(manager(), ReasoningState.CLOSED, reasoning_max_tokens=3)
    assert "'<think>'" in refused(thinking, ReasoningState.OPEN, reasoning_max_tokens=3)
    assert "guided_regex" in refused(thinking, ReasoningState.UNDECIDED, guided_decoding=guided(regex="a"))
    off = StructuredOutputManager(make_tokenizer("byte_level"), 100, [], None, backend="off")
    assert "--guided-decoding-backend off" in refused(off, ReasoningState.CLOSED, guided_decoding=guided(regex="a"))
    none = StructuredOutputManager(None, 100, [], None)
    assert "no tokenizer" in refused(none, ReasoningState.CLOSED, guided_decoding=guided(regex="a"))
    assert none.make_constraints(GenerationRequest("a", [1], SamplingParams(n=2))) == [None, None]


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    constraint(guided_decoding=guided(regex="once|twice"))
    monkeypatch.setattr(GrammarState, "fill_bitmask", None)
    constraint(guided_decoding=guided(regex="once|twice"))
    with pytest.raises(TypeError):
        constraint(guided_decoding=guided(regex="once|twice|thrice"))
