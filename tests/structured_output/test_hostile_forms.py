# SPDX-License-Identifier: Apache-2.0
"""Whatever a form is, it is accepted or refused, and the next form is compiled."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.structured_output.constraint import OutputConstraint
from fastdeploy.structured_output.manager import StructuredOutputManager
from tests.detokenize.tokenizers_for_tests import make_tokenizer
from tests.structured_output.hostile_forms import hostile_form

MAX_GROWTH_MIB = 512
NUM_STEPS = 20
LINE = "start: T\nT: /a/\n"
TIME_OUT = "of processor time"


@cache
def manager() -> StructuredOutputManager:
    tokenizer = make_tokenizer("byte_level")
    return StructuredOutputManager(tokenizer, tokenizer.vocab_size, [1], None)


def constraint(**form: Any) -> OutputConstraint:
    params = SamplingParams(guided_decoding=GuidedDecodingParams(**form))
    (automaton,) = manager().make_constraints(GenerationRequest("r", [1], params))
    assert automaton is not None
    return automaton


def refusal(**form: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        constraint(**form)
    return caught.value


def resident_mib() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmRSS"))


def follow(automaton: OutputConstraint, random: Random) -> None:
    """Accept random allowed tokens until the output is complete or NUM_STEPS long, or no token is allowed."""
    vocab_size = make_tokenizer("byte_level").vocab_size
    bitmasks = np.zeros((1, (vocab_size + 31) // 32), np.int32)
    for _ in range(NUM_STEPS):
        automaton.fill_bitmasks([], bitmasks)
        ids = np.flatnonzero(np.unpackbits(bitmasks[0].view(np.uint8), bitorder="little"))
        if not len(ids):
            assert automaton.error
            return
        forced = automaton.forced_tokens(4)
        assert automaton.num_valid_tokens(forced) == len(forced)
        if automaton.accept_token(int(random.choice(ids.tolist()))):
            return


def check_forms(seeds: range) -> None:
    assert constraint(regex="good")
    before, outcomes = resident_mib(), {"accepted": 0, "refused": 0}
    for seed in seeds:
        random = Random(seed)
        form = hostile_form(random)
        try:
            automaton = constraint(**form)
        except InvalidRequestError as error:
            assert error.message and error.field.startswith(("guided_", "structural_tag")), (seed, error)
            outcomes["refused"] += 1
        else:
            follow(automaton, random)
            outcomes["accepted"] += 1
    assert constraint(regex=f"good{seeds.stop}")
    assert resident_mib() - before < MAX_GROWTH_MIB
    assert min(outcomes.values()) > len(seeds) // 10, outcomes  # else the generator is no test of both


def test_hostile_forms_are_accepted_or_refused_and_the_next_form_is_compiled() -> None:
    check_forms(range(80))


@pytest.mark.nightly
def test_a_thousand_hostile_forms() -> None:
    check_forms(range(1000, 2000))


@pytest.mark.parametrize("run", [" ", "\t", "\n", " \n", "a", "a ", "start ", "start\n", "[", "a[", "a.", "a.1 "])
def test_checks_of_grammars_are_linear_in_long_runs(run: str) -> None:
    """A quadratic one would take more than the trial's time for these 60,000 characters."""
    run *= 60_000 // len(run)
    for start in ("", LINE, LINE + "a"):
        try:
            constraint(grammar=start + run)
        except InvalidRequestError as error:
            assert TIME_OUT not in error.message


def test_four_thousand_spaces_are_no_grammar() -> None:
    assert (
        refusal(grammar=" " * 4000).message == "failed to convert the grammar from GBNF to Lark: No 'root' rule found"
    )
    assert constraint(grammar=LINE + " " * 4000)
    assert constraint(grammar='root ::= "a"' + " " * 4000)


@pytest.mark.parametrize("number", [2147483648, 999_983, 1.23456, 1234.56e10, 123456e-30])
def test_multiple_of_has_at_most_five_digits(number: float) -> None:
    error = refusal(json={"type": "array", "items": {"type": "number", "multipleOf": number}})
    assert error.field == "guided_json"
    assert "multipleOf: expected a number of at most 5 significant digits" in error.message


@pytest.mark.parametrize("number", [65_536, 0.01, 1e6, 2500.5, 1])
def test_multiple_of_five_digits_is_compiled(number: float) -> None:
    assert constraint(json={"type": "number", "multipleOf": number})


def test_limits_of_schemas_hold_within_structural_tags() -> None:
    for schema in ({"multipleOf": 1234567}, '{"multipleOf": 1234567}'):
        error = refusal(structural_tag={"format": {"type": "json_schema", "json_schema": schema}})
        assert (error.field, "5 significant digits" in error.message) == ("structural_tag.format.schema", True)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("depth", [65, 950, 50_000])
def test_json_is_refused_where_it_is_nested_too_deeply(depth: int, as_text: bool) -> None:
    text = '{"not":' * depth + "{}" + "}" * depth
    given: Any = text
    if not as_text:
        given = {}
        for _ in range(depth):
            given = {"not": given}
    error = refusal(json=given[:120_000] if depth == 50_000 and as_text else given)
    assert error.field == "guided_json"
    assert "at most 64 levels" in error.message


def test_json_of_sixty_four_levels_is_accepted() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(31):
        schema = {"anyOf": [schema]}
    assert constraint(json=schema)


def test_long_forced_texts_end_the_request_and_no_step_encodes_them() -> None:
    assert "forces a text of 5000 bytes, more than 4096" in refusal(choice=["x" * 5000]).message
    assert constraint(choice=["x" * 4096])
    automaton = constraint(regex="b|cx{5000}")
    (letter,) = make_tokenizer("byte_level").encode("c", add_special_tokens=False)
    automaton.accept_token(letter)
    assert automaton.fill_bitmasks([], np.zeros((1, 10), np.int32)) == [True]
    assert automaton.forced_tokens(4) == []
    assert automaton.error == "forces a text of 5000 bytes, more than 4096"
