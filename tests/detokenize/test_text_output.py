# SPDX-License-Identifier: Apache-2.0
"""Stop strings: the engine's scanner and the text assembler agree, whatever the token boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.stop_strings import StopStringScanner
from fastdeploy.detokenize.text_output import TextAssembler
from tests.detokenize.tokenizers_for_tests import make_tokenizer

PROMPT = "the END of "


def run_engine(kind: str, text: str, params: SamplingParams, step: int = 1) -> tuple[list[str], str | None]:
    """Simulate an engine that emits `text` in steps of `step` tokens; return the text deltas and the stop string."""
    tokenizer = make_tokenizer(kind)
    prompt_ids = tokenizer.encode(PROMPT)
    scanner = StopStringScanner(tokenizer, prompt_ids, params)
    assembler = TextAssembler(tokenizer, prompt_ids, params)
    token_ids, stop = [], None
    for token_id in tokenizer.encode(text):
        token_ids.append(token_id)
        stop = scanner.push(token_id)
        if stop is not None:
            break
    deltas = [TokenDelta("r", 0, token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    deltas = deltas or [TokenDelta("r", 0)]
    deltas[-1].finish_reason, deltas[-1].stop_reason = ("length", None) if stop is None else ("stop", stop)
    return [assembler.push(delta) for delta in deltas], stop


@pytest.mark.parametrize("step", [1, 3, 50])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "stop_reason"),
    [
        ("quick brown fox STOP and more", ["STOP"], "quick brown fox ", "STOP"),
        ("quick brown fox", ["brown fox jumps"], "quick brown fox", None),
        ("a fox, the dog", ["the", "x, t"], "a fo", "x, t"),
        ("a fox, the dog", ["ox", "fox"], "a ", "fox"),
        ("aaab", ["aab"], "a", "aab"),
        ("STOPSTOP", ["STOP"], "", "STOP"),
    ],
)
def test_text_ends_at_the_stop_string(
    step: int, text: str, stop: list[str], expected: str, stop_reason: str | None
) -> None:
    deltas, reason = run_engine("byte_level", text, SamplingParams(stop=stop), step)
    assert ("".join(deltas), reason) == (expected, stop_reason)


def test_stop_string_is_included_on_request_and_text_after_it_is_not() -> None:
    params = SamplingParams(stop=["ov"], include_stop_str_in_output=True)
    deltas, _ = run_engine("byte_level", "fox jumps over the dog", params)
    assert "".join(deltas) == "fox jumps ov"


@pytest.mark.parametrize("keep", [False, True])
def test_text_of_a_stop_token_id_is_included_only_on_request(keep: bool) -> None:
    tokenizer = make_tokenizer("byte_level")
    token_ids = tokenizer.encode("fox jumps")
    params = SamplingParams(stop_token_ids=token_ids[-1:], include_stop_str_in_output=keep)
    last = TokenDelta("r", 0, token_ids, finish_reason="stop", stop_reason=token_ids[-1])
    kept = tokenizer.decode(token_ids if keep else token_ids[:-1])
    assert TextAssembler(tokenizer, [], params).push(last) == kept
    assert kept.startswith("fox") and (kept == "fox jumps") == keep


def test_last_token_of_a_complete_structured_output_is_part_of_the_text() -> None:
    tokenizer = make_tokenizer("byte_level")
    last = TokenDelta("r", 0, tokenizer.encode("fox jumps"), finish_reason="stop", is_complete=True)
    assert TextAssembler(tokenizer, [], SamplingParams()).push(last) == "fox jumps"


def test_stop_string_in_the_prompt_or_across_its_end_does_not_stop() -> None:
    deltas, reason = run_engine("byte_level", "the text", SamplingParams(stop=["END", "of the"]))
    assert ("".join(deltas), reason) == ("the text", None)


def test_possible_start_of_a_stop_string_is_held_back() -> None:
    tokenizer = make_tokenizer("byte_level")
    assembler = TextAssembler(tokenizer, [], SamplingParams(stop=["STOP"]))
    held = [assembler.push(TokenDelta("r", 0, [token_id])) for token_id in tokenizer.encode("xSTO")]
    assert "".join(held) == "x"
    assert assembler.push(TokenDelta("r", 0, tokenizer.encode("X"))) == "STOX"


def test_stop_string_within_min_tokens_does_not_stop_then_or_later() -> None:
    num_first = len(make_tokenizer("byte_level").encode("STOP"))
    params = SamplingParams(stop=["STOP", "a very long stop string"], min_tokens=num_first)
    deltas, reason = run_engine("byte_level", "STOP the fox STOP", params)
    assert ("".join(deltas), reason) == ("STOP the fox ", "STOP")


TEXT = st.text(alphabet="abSTO é🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="abSTO é🙂", min_size=1, max_size=4), max_size=3)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=TEXT, stops=STOPS, keep=st.booleans(), step=st.integers(1, 4))
def test_assembled_text_equals_the_plain_definition(
    kind: str, text: str, stops: list[str], keep: bool, step: int
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep)
    deltas, reason = run_engine(kind, text, params, step)
    tokenizer = make_tokenizer(kind)
    prompt_ids = tokenizer.encode(PROMPT)
    decoded = tokenizer.decode(prompt_ids + tokenizer.encode(text))[len(tokenizer.decode(prompt_ids)) :]
    ends = [(decoded.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in decoded]
    if not ends:
        assert ("".join(deltas), reason) == (decoded, None)
    else:
        end, minus_length, stop = min(ends)
        assert ("".join(deltas), reason) == (decoded[: end if keep else end + minus_length], stop)
