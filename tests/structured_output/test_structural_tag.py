# SPDX-License-Identifier: Apache-2.0
"""Which texts a structural tag allows, token by token."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.structured_output.grammar import GrammarCompiler
from fastdeploy.structured_output.structural_tag import structural_tag_to_lark

NUMBER = {"type": "integer"}
JSON = {"type": "json_schema", "json_schema": NUMBER}


@cache
def compiler() -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size)


def verdict(tag: dict[str, Any], text: str) -> str:
    """Return whether the text, with special tokens encoded as such, is refused, incomplete, complete, or may end."""
    tokenizer, grammars = compiler()
    state = grammars.compile(GuidedDecodingParams(structural_tag=tag))
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        state = state.advance(token_id)
        if state.error:
            return "refused"
    return "complete" if state.is_terminated else "may end" if state.is_accepting else "incomplete"


def tag(begin: str, end: Any, content: dict[str, Any] = JSON) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: dict[str, Any], triggers: list[str], **options: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **options}}


STRUCTURES = {
    "triggers": ["<f=", "<g"],
    "structures": [
        {"begin": "<f=a>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"},
        {"begin": "<g>", "schema": {"type": "boolean"}, "end": "</g>"},
    ],
}
FORMAT = triggered(tag("<f=a>", "</f>"), tag("<g>", ["</g>", "!"]), triggers=["<f=", "<g"])
SPECIAL = triggered(tag("<|user|>n=", "<|end|>"), triggers=["<|user|>"])
LIST = {"format": {"type": "tags_with_separator", "tags": [tag("(", ")")], "separator": ", "}}


@pytest.mark.parametrize(
    ("given", "text", "expected"),
    [
        (STRUCTURES, "", "may end"),
        (STRUCTURES, "free text with < and <f", "may end"),
        (STRUCTURES, "text <f=", "incomplete"),
        (STRUCTURES, "text <f=a>12</f> more <g>true</g>", "may end"),
        (STRUCTURES, 'text <f=b>"x"</f>', "may end"),
        (STRUCTURES, "text <f=c>", "refused"),
        (STRUCTURES, 'text <f=a>"x"', "refused"),
        (STRUCTURES, "text <f=a>12</g>", "refused"),
        (FORMAT, "a <f=a>3</f> b <g>4! c", "may end"),
        (FORMAT, "a <g>4?", "refused"),
        (triggered(tag("<f>", "</f>"), triggers=["<f>"], at_least_one=True), "only text", "incomplete"),
        (triggered(tag("<f>", "</f>"), triggers=["<f>"], at_least_one=True), "text <f>1</f>", "may end"),
        (triggered(tag("<f>", "</f>"), triggers=["<f>"], stop_after_first=True), "text <f>1</f>", "complete"),
        (SPECIAL, "text <|user|>n=7", "incomplete"),
        (SPECIAL, "text <|user|>n=7<|end|> text", "may end"),
        (SPECIAL, "text <|user|>m", "refused"),
        (SPECIAL, "text <|end|>", "refused"),
        (LIST, "", "may end"),
        (LIST, "(1), (2)", "may end"),
        (LIST, "(1) (2)", "refused"),
        ({"format": tag("<t>", "</t>", {"type": "any_text"})}, "<t>any </x text</t>", "complete"),
        ({"format": {"type": "const_string", "value": 'a "quoted" \\ text'}}, 'a "quoted" \\ text', "complete"),
        ({"format": {"type": "regex", "pattern": "a/b\\/[0-9]"}}, "a/b/7", "complete"),
        ({"format": {"type": "or", "elements": [JSON, {"type": "const_string", "value": "none"}]}}, "none", "complete"),
        ({"format": {"type": "sequence", "elements": [JSON, {"type": "any_text"}]}}, "12 and more", "may end"),
    ],
    ids=str,
)
def test_texts_that_a_tag_allows(given: dict[str, Any], text: str, expected: str) -> None:
    assert verdict(given, text) == expected


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([], "structural_tag"),
        ({}, "structural_tag.structures"),
        ({**STRUCTURES, "triggers": []}, "structural_tag.triggers"),
        ({**STRUCTURES, "triggers": [""]}, "structural_tag.triggers"),
        ({**STRUCTURES, "structures": [{"begin": "<f=a>", "end": ""}]}, "structural_tag.structures[0].schema"),
        ({**STRUCTURES, "structures": [{"begin": "<f=a>", "schema": {}}]}, "structural_tag.structures[0].end"),
        ({"format": "x"}, "structural_tag.format"),
        (
            {"format": {"type": "json_schema", "json_schema": {"x-guidance": None}}},
            "structural_tag.format.schema.x-guidance",
        ),
        (
            {"format": {"type": "json_schema", "json_schema": {"x-guidance": 5}}},
            "structural_tag.format.schema.x-guidance",
        ),
        ({"format": {"type": "qwen_xml_parameter"}}, "structural_tag.format.type"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "structural_tag.format.excludes"),
        ({"format": {"type": "or", "elements": [JSON, 3]}}, "structural_tag.format.elements[1]"),
        (triggered(tag("x", "y"), triggers=["x"], at_least_one=1), "structural_tag.format.at_least_one"),
    ],
    ids=str,
)
def test_malformed_tag_is_refused_with_the_path_of_the_fault(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        structural_tag_to_lark(GuidedDecodingParams(structural_tag=given), {})
    assert caught.value.field == field
