# SPDX-License-Identifier: Apache-2.0
"""Structured output and reasoning budgets are exact: with speculation, chunks, batches and preemption each text equals
that of plain decoding alone, and it conforms to its grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.reasoning import ReasoningState
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from tests.exactness.engines import (
    CHUNKS,
    NUM_DRAFTS,
    Run,
    Texts,
    build,
    check_drafts,
    config,
    proposer_of,
)
from tests.exactness.requests import HEADS, Text, run_all, run_alone
from tests.thinking_model import CALL_START, END, START, save_thinking_model

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", "zzz"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"enum": [1, 20]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
CALL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TAGS = {
    "structures": [
        {"begin": " = ", "schema": CALL, "end": ";"},
        {"begin": " = [", "schema": {"enum": [1, 2]}, "end": "]"},
    ],
    "triggers": [" = "],
}
FORMAT = {
    "format": {
        "type": "tags_with_separator",
        "tags": [
            {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": CALL}, "end": "</f>"}
        ],
        "separator": ",",
        "at_least_one": True,
        "stop_after_first": True,
    }
}
ALLOWED = list(range(267, 395, 2))
WITHOUT_LETTERS = [token_id for token_id in range(4096) if token_id not in (267, 283, 284, 289)]
OPEN, UNDECIDED = ReasoningState.OPEN, ReasoningState.UNDECIDED


def guided(**kind: Any) -> dict[str, Any]:
    return {"guided_decoding": GuidedDecodingParams(**kind)}


# Sampling parameters and the reasoning state at the start, by name.
REQUESTS: dict[str, tuple[dict[str, Any], ReasoningState]] = {
    "json": ({"temperature": 0.0, **guided(json=SCHEMA)}, ReasoningState.CLOSED),
    "json_warm": ({"seed": 1, "n": 2, "logprobs": 1, **guided(json=SCHEMA)}, ReasoningState.CLOSED),
    "json_penalties": (
        {"seed": 2, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_p": 0.9, **guided(json=SCHEMA)},
        ReasoningState.CLOSED,
    ),
    "tree": ({"seed": 1, "top_k": 20, "logit_bias": {85: 3.0, 328: 3.0}, **guided(json=TREE)}, ReasoningState.CLOSED),
    "regex": ({"seed": 4, **guided(regex=r"[a-z]{3,12}-\d{2,6}(\.[A-Z]{1,3})?")}, ReasoningState.CLOSED),
    "regex_min_tokens": ({"seed": 5, "min_tokens": 12, **guided(regex=r"[a-z ]{1,60}")}, ReasoningState.CLOSED),
    "regex_ignore_eos": ({"seed": 6, "ignore_eos": True, **guided(regex=r"[a-z ]*")}, ReasoningState.CLOSED),
    "choice": ({"seed": 7, **guided(choice=["return value", "return values", "total"])}, ReasoningState.CLOSED),
    "choice_min_tokens": ({"seed": 7, "min_tokens": 30, **guided(choice=["yes", "no"])}, ReasoningState.CLOSED),
    "lark": ({"seed": 8, **guided(grammar='start: "f(" %json {"type": "integer"} ")" <|end|>')}, ReasoningState.CLOSED),
    "gbnf": (
        {"seed": 9, **guided(grammar='root ::= item item item\nitem ::= "- " [a-z] [a-z] [a-z]? "\\n"')},
        ReasoningState.CLOSED,
    ),
    "stop": ({"seed": 10, "stop": ['"'], **guided(json_object=True)}, ReasoningState.CLOSED),
    "bad_word": (
        {"seed": 1, "bad_words_token_ids": [[267], [283], [284], [289]], **guided(json=SCHEMA)},
        ReasoningState.CLOSED,
    ),
    "cut": ({"seed": 11, "max_tokens": 4, **guided(json=SCHEMA)}, ReasoningState.CLOSED),
    "tags": ({"temperature": 0.0, **guided(structural_tag=TAGS)}, ReasoningState.CLOSED),
    "format": ({"seed": 12, **guided(structural_tag=FORMAT)}, ReasoningState.CLOSED),
    "allowed": ({"seed": 17, "temperature": 1.5, "allowed_token_ids": ALLOWED, "ignore_eos": True}, OPEN),
    "allowed_json": (
        {"seed": 18, "temperature": 1.3, "allowed_token_ids": WITHOUT_LETTERS, **guided(json=SCHEMA)},
        ReasoningState.CLOSED,
    ),
    "allowed_thinks": (
        {"seed": 19, "allowed_token_ids": ALLOWED, "reasoning_max_tokens": 6, **guided(regex=r"[a-z]{2,9}\.?")},
        OPEN,
    ),
    "allowed_end": (
        {"seed": 20, "allowed_token_ids": [*ALLOWED, EOS], "min_tokens": 9, "logit_bias": {EOS: 100.0}},
        ReasoningState.CLOSED,
    ),
    "thinks": ({"seed": 13, "logit_bias": {END: 24.0}, "temperature": 1.3, **guided(json=SCHEMA)}, OPEN),
    "thinks_briefly": ({"temperature": 0.0, "reasoning_max_tokens": 7, **guided(choice=["yes", "no"])}, OPEN),
    "may_think": (
        {"temperature": 0.0, "logit_bias": {START: 100.0}, "reasoning_max_tokens": 5, **guided(json=CALL)},
        UNDECIDED,
    ),
    "does_not_think": ({"temperature": 0.0, "reasoning_max_tokens": 5, **guided(json=CALL)}, UNDECIDED),
    "budgets": ({"seed": 14, "reasoning_max_tokens": 9, "response_max_tokens": 6, "ignore_eos": True}, OPEN),
    "short_answer": ({"seed": 15, "response_max_tokens": 8, **guided(json_object=True)}, ReasoningState.CLOSED),
    "thinks_and_calls": (
        {
            "seed": 21,
            "temperature": 1.3,
            "logit_bias": {CALL_START: 17.5},
            **guided(grammar=f'start: <[{CALL_START}]> "f(" %json {{"type": "integer"}} ")"'),
        },
        OPEN,
    ),
    "calls_within_budget": (
        {
            "seed": 22,
            "logit_bias": {CALL_START: 17.5},
            "reasoning_max_tokens": 40,
            "response_max_tokens": 6,
            "ignore_eos": True,
        },
        OPEN,
    ),
    "must_not_call": (
        {"seed": 23, "logit_bias": {CALL_START: 100.0}, "reasoning_max_tokens": 5, **guided(choice=["yes", "no"])},
        OPEN,
    ),
}
CALLS = ("thinks_and_calls", "calls_within_budget", "must_not_call")


def thinking(folder: Path, *args: Any, **kwargs: Any) -> Any:
    return replace(config(*args, **kwargs), model=str(folder), reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_thinking_model(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[GenerationRequest]:
    return make_grammar_requests(tokenizer)


def make_grammar_requests(tokenizer: Tokenizer) -> list[GenerationRequest]:
    """Return the requests of REQUESTS."""
    return [
        GenerationRequest(
            name,
            tokenizer.encode(HEADS[i % 4]),
            SamplingParams(**{"max_tokens": 100, **params}),
            reasoning=state,
            may_call_tools=name in CALLS,
        )
        for i, (name, (params, state)) in enumerate(REQUESTS.items())
    ]


@pytest.fixture(scope="module")
def plain(folder: Path, requests: list[GenerationRequest]) -> Texts:
    """Plain decoding, one request at a time."""
    return run_alone(build(thinking(folder)), requests)


def valid(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


CHECKS: dict[str, Callable[[str], bool]] = {
    "json": valid(SCHEMA),
    "json_penalties": valid(SCHEMA),
    "tree": valid(TREE),
    "regex": matches(r"[a-z]{3,12}-\d{2,6}(\.[A-Z]{1,3})?"),
    "regex_min_tokens": matches(r"[a-z ]{1,60}"),
    "regex_ignore_eos": matches(r"[a-z ]+"),
    "choice": matches("return values?|total"),
    "choice_min_tokens": matches("yes|no"),
    "allowed_json": valid(SCHEMA),
    "allowed_thinks": lambda text: re.fullmatch(r"[a-z]{2,9}\.?", text.split("</think>")[1]) is not None,
    "lark": matches(r"f\(-?\d+\)"),
    "gbnf": matches(r"(- [a-z]{2,3}\n){3}"),
    "format": matches(r"(?s)<f>\{.*\}</f>"),
    "thinks": lambda text: valid(SCHEMA)(text.split("</think>")[1]),
    "thinks_briefly": matches(r"(?s).*</think>(yes|no)"),
    "may_think": lambda text: text.startswith("<think>") and valid(CALL)(text.split("</think>")[1]),
    "does_not_think": valid(CALL),
    "thinks_and_calls": matches(r"(?s)(?!.*</think>).+<tool_call>f\(-?\d+\)"),
    "must_not_call": matches(r"(?s).+</think>(yes|no)"),
}


def as_text(tokenizer: Tokenizer, text: Text) -> str:
    ids = [token_id for token_id in text.token_ids if token_id not in (EOS, 6)]
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", CHECKS)
def test_outputs_conform_to_their_grammars(tokenizer: Tokenizer, plain: Texts, name: str) -> None:
    text = as_text(tokenizer, plain[name, 0])
    assert CHECKS[name](text), text


def test_outputs_end_where_their_grammars_do(plain: Texts) -> None:
    ends = {name: text.finish_reason for (name, _), text in plain.items()}
    endless = {"regex_ignore_eos", "cut", "tags", "budgets", "allowed", "short_answer", "calls_within_budget"}
    assert {name for name, reason in ends.items() if reason == "length"} == endless
    assert plain["choice_min_tokens", 0].token_ids[-1] != EOS
    assert len(plain["choice_min_tokens", 0].token_ids) < 30
    assert len(plain["regex_min_tokens", 0].token_ids) >= 12
    assert plain["stop", 0].stop_reason == '"'
    assert plain["json_warm", 0].token_ids != plain["json_warm", 1].token_ids


def test_budgets_are_kept_to_the_token(plain: Texts) -> None:
    budgets = plain["budgets", 0].token_ids
    assert (budgets.index(END), len(budgets)) == (9, 9 + 1 + 6)
    assert plain["thinks_briefly", 0].token_ids.index(END) == 7
    may_think = plain["may_think", 0].token_ids
    assert (may_think[0], may_think.index(END)) == (START, 6)
    assert len(plain["short_answer", 0].token_ids) == 8


def test_call_ends_the_reasoning_and_counts_as_the_response(plain: Texts) -> None:
    tokens = plain["calls_within_budget", 0].token_ids
    assert 0 < tokens.index(CALL_START) < 40 and len(tokens) == tokens.index(CALL_START) + 6
    assert plain["thinks_and_calls", 0].token_ids.index(CALL_START) > 0
    assert CALL_START not in plain["must_not_call", 0].token_ids
    assert plain["must_not_call", 0].token_ids.index(END) == 5


def test_nothing_but_allowed_tokens_is_emitted_except_for_a_forced_end_of_the_reasoning(plain: Texts) -> None:
    emitted = {name: plain[name, 0].token_ids for name in REQUESTS if name.startswith("allowed")}
    assert set(emitted["allowed"]) <= set(ALLOWED) and len(emitted["allowed"]) == 100
    assert set(emitted["allowed_json"]) <= {*WITHOUT_LETTERS, EOS}
    assert set(emitted["allowed_thinks"]) - set(ALLOWED) == {END}
    assert emitted["allowed_thinks"].index(END) == 6
    assert set(emitted["allowed_end"]) <= {*ALLOWED, EOS}
    assert emitted["allowed_end"].index(EOS) == 9 and plain["allowed_end", 0].finish_reason == "stop"


def check_speculation(
    folder: Path, requests: list[GenerationRequest], plain: Texts, method: str, run: Run, chunk: int, num_drafts: int
) -> None:
    engine = build(thinking(folder, "ngram", num_drafts, chunk), proposer_of(method, plain, num_drafts))
    assert run(engine, requests) == plain
    check_forbidden_drafts(engine, method, num_drafts)


@pytest.mark.parametrize(
    ("method", "run", "chunk", "num_drafts"),
    [("ngram", run_all, 7, 5), ("oracle", run_all, 7, 1), ("oracle", run_all, 64, 3), ("oracle", run_alone, 7, 16)],
)
def test_speculation(
    folder: Path, requests: list[GenerationRequest], plain: Texts, method: str, run: Run, chunk: int, num_drafts: int
) -> None:
    check_speculation(folder, requests, plain, method, run, chunk, num_drafts)


@pytest.mark.nightly
@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("run", [run_all, run_alone])
@pytest.mark.parametrize("method", ["ngram", "oracle"])
def test_speculation_everywhere(
    folder: Path, requests: list[GenerationRequest], plain: Texts, method: str, run: Run, chunk: int, num_drafts: int
) -> None:
    check_speculation(folder, requests, plain, method, run, chunk, num_drafts)


@pytest.mark.parametrize(("prefix_caching", "num_drafts"), [(False, 3), (True, 16)])
def test_forced_preemption(
    folder: Path, requests: list[GenerationRequest], plain: Texts, prefix_caching: bool, num_drafts: int
) -> None:
    cfg = thinking(folder, "ngram", num_drafts, 7, num_blocks=24, prefix_caching=prefix_caching)
    engine = build(cfg, proposer_of("oracle", plain, num_drafts))
    assert run_all(engine, requests) == plain
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks
    check_forbidden_drafts(engine, "oracle", num_drafts)


def test_plain_decoding_in_a_batch(folder: Path, requests: list[GenerationRequest], plain: Texts) -> None:
    assert run_all(build(thinking(folder)), requests) == plain


def test_relaxed_acceptance_conforms_to_the_grammar(
    folder: Path, requests: list[GenerationRequest], plain: Texts, tokenizer: Tokenizer
) -> None:
    engine = build(thinking(folder, "ngram", 5, verify_strategy="topp_relaxed"), proposer_of("oracle", plain, 5))
    texts = run_all(engine, requests)
    for name, check in CHECKS.items():
        if texts[name, 0].finish_reason == "stop":
            assert check(as_text(tokenizer, texts[name, 0])), name


def test_grammars_are_refused_if_all_drafts_are_accepted(folder: Path, requests: list[GenerationRequest]) -> None:
    engine = build(thinking(folder, "ngram", 3, accept_policy="accept_all"))
    for request, field in ((requests[0], "guided_json"), (requests[-2], "response_max_tokens")):
        with pytest.raises(InvalidRequestError, match="accept_all") as caught:
            engine.add_request(request)
        assert caught.value.field == field
    assert not engine.has_unfinished()


def test_drafts_that_are_accepted_unread_are_allowed_too(
    folder: Path, requests: list[GenerationRequest], plain: Texts
) -> None:
    (request,) = [request for request in requests if request.request_id == "allowed"]
    engine = build(thinking(folder, "ngram", 3, accept_policy="accept_all"), proposer_of("oracle", plain, 3))
    assert set(run_all(engine, [request])["allowed", 0].token_ids) <= set(ALLOWED)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert stats.num_forbidden_draft_tokens > 0


def check_forbidden_drafts(engine: Engine, method: str, num_drafts: int) -> None:
    """Assert that drafts were accepted and rejected, and that others were forbidden before verification."""
    stats = engine.stats()
    check_drafts(engine, "oracle" if method == "oracle" and num_drafts < 16 else method, num_drafts)
    assert stats.num_forbidden_draft_tokens > 0
