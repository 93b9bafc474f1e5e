# SPDX-License-Identifier: Apache-2.0
"""Under a grammar of calls, parsers accept whatever a model writes; tested with a model of random tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import llguidance
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.parsers.argument_grammar import json_expression
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS, JSON_ARRAY
from fastdeploy.entrypoints.openai.parsers.tool_grammar import ToolCallGrammar
from fastdeploy.entrypoints.openai.parsers.tool_parser import Schemas
from tests.detokenize.tokenizers_for_tests import save_tokenizer
from tests.entrypoints.message_texts import CALLS, SCHEMAS, TWO_CALLS

ALL_FORMATS = {**FORMATS, "array": JSON_ARRAY}
TEXTS = {**TWO_CALLS, "array": '[{"name": "weather", "parameters": {"city": "Łódź", "days": 2}}]'}
TEXTS["ernie"] = TEXTS["hermes"]
MARKERS = sorted({marker for format_name in FORMATS.values() for marker in format_name.markers})
END = 1  # the id of </s>
NUMBERS: Schemas = {
    name: {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 99}, "city": {"enum": ["Rome", "Łódź"]}},
        "required": ["days"],
        "additionalProperties": False,
    }
    for name in ("weather", "tides")
}


class Model:
    """A tokenizer with the markers as special tokens or as text, and a model of random tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_pretrained(folder)
        self.special_ids = self.tokenizer.find_special_ids(MARKERS)
        self._vocabulary = llguidance.LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=END)

    def start(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._vocabulary, llguidance.grammar_from("grammar", grammar))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self.start(grammar)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def write(self, grammar: str, seed: int) -> str:
        """Return a text of tokens sampled uniformly from the allowed ones."""
        rng, matcher, ids = random.Random(seed), self.start(grammar), list[int]()
        while not matcher.is_stopped():
            allowed = [token_id for token_id, bias in enumerate(matcher.compute_logit_bias()) if bias]
            ids.append(rng.choice(allowed))
            assert matcher.consume_token(ids[-1])
        return self.tokenizer.decode([token_id for token_id in ids if token_id != END], skip_special_tokens=False)


@pytest.fixture(scope="module", params=["special", "text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    return Model(save_tokenizer(folder, special_tokens=MARKERS if request.param == "special" else ()))


@pytest.mark.parametrize("format_name", ALL_FORMATS)
def test_required_calls_always_parse(model: Model, format_name: str) -> None:
    parts = ToolCallGrammar(ALL_FORMATS[format_name], NUMBERS, model.special_ids, max_calls=2)
    counts = set()
    for seed in range(20):
        message, parser = Message(), MessageParser(None, ALL_FORMATS[format_name].make_parser(NUMBERS))
        text = model.write(parts.required(), seed)
        message.add(parser.push(text, True))
        assert message.content == "" and message.calls, text
        counts.add(len(message.calls))
        for call in message.calls:
            arguments = json.loads(call.arguments)
            assert call.name in NUMBERS and 0 <= arguments.pop("days") <= 99
            assert arguments in ({}, {"city": "Rome"}, {"city": "Łódź"})
    assert counts == {1, 2}


@pytest.mark.parametrize("format_name", ALL_FORMATS)
def test_calls_in_the_trained_format_are_allowed(model: Model, format_name: str) -> None:
    grammar = ToolCallGrammar(ALL_FORMATS[format_name], SCHEMAS, model.special_ids)
    assert model.accepts(grammar.required(), TEXTS[format_name])
    assert model.accepts(grammar.within_text(), TEXTS[format_name])
    assert model.accepts(grammar.optional(json_expression({"type": "integer"})), TEXTS[format_name])
    assert model.accepts(grammar.optional(json_expression({"type": "integer"})), "12")
    assert model.accepts(grammar.within_text(), "It is <b>sunny</b>.\n")
    assert not model.accepts(grammar.required(), "It is sunny")
    assert not model.accepts(grammar.optional(json_expression({"type": "integer"})), "It is sunny")


@pytest.mark.parametrize("format_name", FORMATS)
def test_strict_arguments_within_a_text_follow_their_schema(model: Model, format_name: str) -> None:
    wrong = TEXTS[format_name].replace("days", "year")
    text = wrong if FORMATS[format_name].is_unmarked else f"Let me see: {wrong}"
    assert not model.accepts(ToolCallGrammar(FORMATS[format_name], SCHEMAS, model.special_ids).within_text(), text)
    assert model.accepts(
        ToolCallGrammar(FORMATS[format_name], SCHEMAS, model.special_ids).within_text(), text.replace("year", "days")
    )


def test_call_without_its_first_marker_follows_its_schema_as_well(model: Model) -> None:
    grammar = ToolCallGrammar(FORMATS["qwen3_coder"], SCHEMAS, model.special_ids).within_text()
    call = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
    assert model.accepts(grammar, f"Well: {call} {call}\nDone. {TEXTS['qwen3_coder']}")
    assert not model.accepts(grammar, call.replace("city", "town"))
    assert not model.accepts(grammar, call.replace("weather", "tides"))
    assert not model.accepts(grammar, "write <function=")


ANSWERS: Schemas = {
    "answer": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "sure": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        },
        "$defs": {"tag": {"enum": ["x", "y"]}},
        "required": ["sure"],
        "additionalProperties": False,
    }
}


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ("sure=True", True),
        ("text='a)\\\\', sure=False", True),
        ('text="it\'s", sure=True, unit=\'F\', note=None, tags=["x", "y"]', True),
        ("sure=True, note='x'", True),
        ("text='a'", False),
        ("", False),
        ("sure=1", False),
        ("sure=True,", False),
        ("sure=True, text='a'", False),
        ("sure=True, unit='K'", False),
        ('sure=True, tags=["z"]', False),
        ("text='\\x', sure=True", False),
    ],
)
def test_python_arguments_follow_their_schema(model: Model, arguments: str, is_allowed: bool) -> None:
    grammar = ToolCallGrammar(FORMATS["pythonic"], ANSWERS, model.special_ids).required()
    assert model.accepts(grammar, f"[answer({arguments})]") is is_allowed


@pytest.mark.parametrize(
    ("format_name", "call"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=unit>\nF\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>unit</arg_key>\n<arg_value>F</arg_value>\n</tool_call>"),
        ("pythonic", "[f(unit='F')]"),
    ],
)
def test_arguments_without_a_schema_are_free_and_alternatives_of_a_text_are_not(
    model: Model, format_name: str, call: str
) -> None:
    def accepts(schema: dict[str, Any]) -> bool:
        return model.accepts(ToolCallGrammar(FORMATS[format_name], {"f": schema}, model.special_ids).required(), call)

    assert accepts({"type": "object"})
    assert not accepts({"type": "object", "additionalProperties": False})
    assert accepts({"properties": {"unit": {"type": "string", "enum": ["C", "F"]}}})
    assert not accepts({"properties": {"unit": {"type": "string", "enum": ["C", "K"]}}})
    if format_name != "pythonic":
        assert accepts({"properties": {"unit": {"$ref": "#/$defs/unit"}}, "$defs": {"unit": {"enum": ["C", "F"]}}})
        assert not accepts({"properties": {"unit": {"const": "C"}}})


def test_parameter_that_python_cannot_name_is_refused() -> None:
    grammar = ToolCallGrammar(FORMATS["pythonic"], {"f": {"properties": {"a b": {}}}}, {})
    with pytest.raises(InvalidRequestError, match="pythonic calls cannot express a parameter named 'a b'"):
        grammar.required()


@pytest.mark.parametrize(
    ("format_name", "marker"), [("pythonic", "<|python_start|>"), ("llama3_json", "<|python_tag|>")]
)
def test_text_with_strict_tools_has_no_marker_of_a_call(model: Model, format_name: str, marker: str) -> None:
    grammar = ToolCallGrammar(FORMATS[format_name], SCHEMAS, model.special_ids).within_text()
    assert model.accepts(grammar, "So: [1] {2}") and model.accepts(grammar, TEXTS[format_name])
    assert not model.accepts(grammar, f"So: {marker}{TEXTS[format_name]}")
    assert not model.accepts(grammar, "[1]" if format_name == "pythonic" else "{1}")


@pytest.mark.parametrize("tag", ["</parameter>", "<parameter="])
def test_text_of_a_parameter_contains_no_tag_that_would_end_it(model: Model, tag: str) -> None:
    grammar = ToolCallGrammar(FORMATS["qwen3_coder"], SCHEMAS, model.special_ids).required()
    call = f"<tool_call>\n<function=weather>\n<parameter=city>\na {tag} b\n</parameter>\n</function>\n</tool_call>"
    assert not model.accepts(grammar, call)
    assert model.accepts(grammar, call.replace(f"a {tag}", "</function> <parameter"))


@pytest.mark.parametrize("format_name", FORMATS)
def test_maximum_number_of_calls_is_enforced(model: Model, format_name: str) -> None:
    one = ToolCallGrammar(FORMATS[format_name], SCHEMAS, model.special_ids, max_calls=1)
    two = ToolCallGrammar(FORMATS[format_name], SCHEMAS, model.special_ids, max_calls=2)
    assert not model.accepts(one.required(), TEXTS[format_name]) and model.accepts(two.required(), TEXTS[format_name])


def test_the_texts_are_parsed_as_expected() -> None:
    message = Message()
    message.add(MessageParser(None, JSON_ARRAY.make_parser(SCHEMAS)).push(TEXTS["array"], True))
    assert message.calls == CALLS[:1]
