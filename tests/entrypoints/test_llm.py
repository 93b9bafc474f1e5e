# SPDX-License-Identifier: Apache-2.0
"""The offline `LLM` on the demonstration model: inputs, outputs, and the effect of each sampling parameter."""

from __future__ import annotations

import io
import math
import re
from itertools import pairwise
from typing import Any

import pytest
from tqdm import tqdm

from fastdeploy import LLM, SamplingParams
from fastdeploy.core.errors import ConfigError, ContextLengthError, InvalidRequestError
from fastdeploy.core.faults import InjectedFault, arm
from fastdeploy.core.outputs import CompletionOutput, ErrorInfo, RequestOutput
from tests.core.test_json_types import nested

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef "


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        model="demo",
        max_model_len=256,
        seed=1,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "adaptive": False},
    )


def complete(llm: LLM, prompt: Any = PROMPT, **params: Any) -> CompletionOutput:
    values = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
    outputs = llm.generate(prompt, SamplingParams(**values), use_tqdm=False)
    assert isinstance(outputs, list)
    return outputs[0].outputs[0]


def test_every_kind_of_prompt_gives_the_same_text(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    texts = {complete(llm, p).text for p in (PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids})}
    assert len(texts) == 1


def test_lists_keep_their_order_and_their_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (5, 1, 3)]
    outputs = llm.generate(["a = 1", "b = 2", "c = 3"], params, use_tqdm=False)
    assert [(o.prompt, len(o.outputs[0].token_ids)) for o in outputs] == [("a = 1", 5), ("b = 2", 1), ("c = 3", 3)]


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    output = complete(llm)
    assert llm.tokenizer.decode(output.token_ids) == output.text
    assert output.finish_reason == "length"


def test_choice_zero_of_n_equals_the_choice_of_n_1(llm: LLM) -> None:
    outputs = llm.generate(PROMPT, SamplingParams(n=3, seed=7, max_tokens=16), use_tqdm=False)
    assert isinstance(outputs, list)
    choices = outputs[0].outputs
    assert [c.index for c in choices] == [0, 1, 2]
    assert len({c.seed for c in choices}) == 3 and choices[0].seed == 7
    assert choices[0].token_ids == complete(llm, temperature=1.0, seed=7, max_tokens=16, ignore_eos=False).token_ids
    again = complete(llm, temperature=1.0, seed=choices[2].seed, max_tokens=16, ignore_eos=False)
    assert again.token_ids == choices[2].token_ids


def test_reported_seed_replays_a_request_without_one(llm: LLM) -> None:
    first = complete(llm, temperature=1.0)
    second = complete(llm, temperature=1.0)
    assert first.seed != second.seed
    assert complete(llm, temperature=1.0, seed=first.seed).token_ids == first.token_ids


def test_stop_string_ends_the_text_before_it_or_with_it(llm: LLM) -> None:
    text = complete(llm).text
    stop = text[len(text) // 2 :][:2]
    stopped = complete(llm, stop=stop)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == text[: text.index(stop)]
    assert complete(llm, stop=[stop], include_stop_str_in_output=True).text == text[: text.index(stop)] + stop


def test_stop_token_ends_the_tokens(llm: LLM) -> None:
    tokens = complete(llm).token_ids
    stop = tokens[-1]
    output = complete(llm, stop_token_ids=[stop])
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_min_tokens_delays_the_end(llm: LLM) -> None:
    first = complete(llm).token_ids[0]
    assert len(complete(llm, stop_token_ids=[first]).token_ids) == 1
    held = complete(llm, stop_token_ids=[first], min_tokens=6)
    assert first not in held.token_ids[:6]


def test_bad_words_never_appear(llm: LLM) -> None:
    text = complete(llm).text
    word = max(text.split(), key=len)
    assert word not in complete(llm, bad_words=[word]).text


def test_only_allowed_ids_are_emitted(llm: LLM) -> None:
    assert set(complete(llm, allowed_token_ids=[300, 305, 310]).token_ids) <= {300, 305, 310}


def test_max_tokens_zero_gives_the_prompt_alone(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, temperature=0.0, prompt_logprobs=1) for count in (0, 1)]
    scored, expected = (llm.generate("def f(", one)[0] for one in params)
    output = scored.outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert scored.finished and scored.prompt_logprobs == expected.prompt_logprobs


def test_more_alternatives_need_the_keyword_of_the_engine(llm: LLM) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidRequestError, match=rf"{name}: expected an integer in \[0, 20\] \(--max-logprobs\)"):
            complete(llm, **{name: -1})


def test_requested_ids_are_reported_at_every_position(llm: LLM) -> None:
    logprobs = complete(llm, logprob_token_ids=[300, 4000], max_tokens=9).logprobs
    assert logprobs is not None and len(logprobs) == 9
    top = complete(llm, logprobs=20, logprob_token_ids=[300, 4000], max_tokens=9).logprobs
    assert top is not None
    for few, many in zip(logprobs, top):
        assert {300, 4000} <= set(few) and len(few) in (2, 3)
        assert all(many[token_id] == entry for token_id, entry in few.items())
        assert many[4000].logprob < 0 and many[4000].rank > 1


def test_the_whole_vocabulary_and_its_limit() -> None:
    wide = LLM(model="demo", max_model_len=64, max_logprobs=-1, max_logprob_entries=20_000)
    (result,) = wide.generate([5, 6], SamplingParams(logprobs=-1, prompt_logprobs=30, max_tokens=2), use_tqdm=False)
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs[1]) in (30, 31)
    (first, second) = result.outputs[0].logprobs
    assert sorted(first) == sorted(second) == list(range(4096))
    assert sum(math.exp(entry.logprob) for entry in first.values()) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(InvalidRequestError, match=r"at most 20000 log-probabilities .* got up to 20485"):
        wide.generate([5, 6], SamplingParams(logprobs=-1, max_tokens=5), use_tqdm=False)


def test_large_bias_forces_a_token(llm: LLM) -> None:
    assert set(complete(llm, logit_bias={300: 100.0}).token_ids) == {300}


def test_repetition_penalty_changes_the_text(llm: LLM) -> None:
    assert complete(llm, repetition_penalty=2.0).token_ids != complete(llm).token_ids


def test_prompts_of_lower_priority_values_begin_first() -> None:
    llm = LLM(model="demo", max_model_len=64, max_num_seqs=1, seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prompts, ended = ["a = 1", "b = 2", "c = 3"], []
    for update in llm.generate(prompts, params, stream=True, priority=[2, 0, -1]):
        if update.finished:
            ended.append(update.prompt)
    assert ended == ["c = 3", "b = 2", "a = 1"]
    messages = [[{"role": "user", "content": text}] for text in prompts]
    outputs = llm.chat(messages, params, use_tqdm=False, priority=[2, 1, 0])
    assert isinstance(outputs, list)
    queued = [output.metrics.queue_s for output in outputs if output.metrics]
    assert queued == sorted(queued, reverse=True)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1], r"priority: expected an integer, or a list with one integer per prompt \(2\), got 1"),
        (True, r"priority: expected an integer in \[-2147483648, 2147483647\], got True"),
        ("ab", r"priority: expected an integer, or a list with one integer per prompt \(2\), got 'ab'"),
        ([1, 0.5], r"priority\[1\]: expected an integer in \[-2147483648, 2147483647\], got 0.5"),
    ],
)
def test_wrong_priorities_are_refused_and_start_nothing(llm: LLM, priority: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["a", "b"], SamplingParams(), use_tqdm=False, priority=priority)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("call", ["generate", "chat"])
def test_one_progress_bar_counts_prompts_and_shows_tokens_per_second(llm: LLM, call: str) -> None:
    bars, text = [], io.StringIO()

    def make_bar(**options: Any) -> tqdm[Any]:
        bars.append(tqdm(file=text, mininterval=0.0, **options))
        return bars[-1]

    prompts: Any = ["a", "b"] if call == "generate" else [[{"role": "user", "content": "a"}]] * 2
    getattr(llm, call)(prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=make_bar)
    assert [(bar.n, bar.total) for bar in bars] == [(2, 2)]
    assert re.search(r"Processed prompts: 100%.* 2/2 .*, [0-9.]+ output tokens/s\]", text.getvalue())


def test_progress_bar_is_on_by_default_and_can_be_switched_off(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_tokens=1)
    llm.generate("a", params)
    assert "Processed prompts: 100%" in capsys.readouterr().err
    llm.generate("a", params, use_tqdm=False)
    list(llm.generate("a", params, stream=True))
    assert capsys.readouterr().err == ""


def test_tokenizer_of_the_model_has_the_methods_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(PROMPT)
    assert ids == llm.tokenizer.encode(PROMPT)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], tokenize=False)
    assert complete(llm, prompt=prompt).text  # a rendered conversation is a prompt


def test_results_say_whether_they_have_ended_and_what_was_cached(llm: LLM) -> None:
    states = []
    prompt = [*range(300, 500)]
    for _ in range(2):
        for update in llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True), stream=True):
            states.append((update.finished, update.outputs[0].finished(), update.num_cached_tokens))
    assert states[0] == (False, False, None)
    assert states[-1] == (True, True, 192)


def test_stream_yields_growing_texts_that_end_with_the_complete_one(llm: LLM) -> None:
    texts = []
    for update in llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), stream=True):
        texts.append(update.outputs[0].text)
    assert len(texts) > 1
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == complete(llm, max_tokens=12).text


def test_closed_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True), stream=True)
    next(iter(stream))
    stream.close()  # type: ignore[union-attr]
    assert not llm.engine.has_unfinished()
    llm.engine.check_integrity()


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert isinstance(outputs, list)
    rendered = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert outputs[0].prompt_token_ids == llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert len(outputs[0].outputs[0].token_ids) > 0


def prompts_of(llm: LLM, messages: Any, **kwargs: Any) -> list[str | None]:
    outputs = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, **kwargs)
    assert isinstance(outputs, list)
    return [output.prompt for output in outputs]


def test_chat_accepts_templates_tools_and_variables(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    source = (
        "{{ tools[0].function.name if tools else '-' }} {{ kind }}"
        "{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
    )
    conversations = [[{"role": "developer", "content": "x"}], [{"role": "user", "content": "x"}]]
    options: dict[str, Any] = {"chat_template": source, "chat_template_kwargs": {"kind": "a"}}
    assert prompts_of(llm, conversations, tools=tools, **options) == ["now a system x", "now a user x"]
    assert prompts_of(llm, conversations[0], **options) == ["- a system x"]


def test_chat_continues_the_last_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    source = "{% for m in messages %}{{ m.content }};{% endfor %}{{ add_generation_prompt }}"
    assert prompts_of(llm, messages, chat_template=source, continue_final_message=True) == ["a;b "]
    assert prompts_of(llm, messages, chat_template=source) == ["a;b ;True"]


def test_errors_of_chat_name_invalid_messages_and_tools(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].role: expected"):
        prompts_of(llm, [{"role": 5, "content": "x"}])
    with pytest.raises(InvalidRequestError, match=r"tools\[0\].type: expected function"):
        prompts_of(llm, [{"role": "user", "content": "x"}], tools=[{"name": "f"}])


def test_texts_that_are_not_valid_unicode_are_refused_by_field(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: expected valid Unicode, got the lone surrogate"):
        llm.generate(["fine", "a\ud800"], SamplingParams(), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content: expected valid Unicode"):
        prompts_of(llm, [{"role": "user", "content": "a\ud800"}])
    template = "{{ x | tojson }}"
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError, match="messages: expected valid Unicode"):
        prompts_of(llm, messages, chat_template=template, chat_template_kwargs={"x": "\ud800"})
    with pytest.raises(InvalidRequestError, match="the chat template uses more than 256 containers in each other"):
        prompts_of(llm, messages, chat_template=template, chat_template_kwargs={"x": nested(2000)})
    assert not llm.engine.has_unfinished()


def test_text_that_is_far_too_long_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"prompt: expected 1 to .* characters \(.*\), got 8000000"):
        llm.generate("x" * 8_000_000, SamplingParams(), use_tqdm=False)


def test_speculation_is_reported(llm: LLM) -> None:
    metrics = complete(llm, prompt="x = 1\nx = 1\nx = 1\nx = 1\nx = ", logit_bias={}, max_tokens=40).speculate_metrics
    assert metrics is not None and metrics.num_steps > 0
    assert metrics.accepted_tokens + metrics.rejected_tokens == metrics.drafted_tokens > 0
    assert metrics.source == {"ngram": metrics.drafted_tokens}
    assert metrics.average_accept_length == pytest.approx(39 / metrics.num_steps)


def test_invalid_request_in_a_list_starts_none(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.generate(["fine", [10**6]], SamplingParams(), use_tqdm=False)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            {"text": "x"},
            "prompts: unknown key 'text'; expected prompt, prompt_token_ids, add_special_tokens, cache_salt",
        ),
        ({"prompt": "x", "multi_modal_data": {}}, "prompts: unknown key 'multi_modal_data'"),
        ({"prompt": None}, 'prompts: expected "prompt" or "prompt_token_ids"'),
        ({"prompt": "x", "cache_salt": 5}, "prompts: expected a text as cache_salt, got 5"),
        ({"prompt": "x", "cache_salt": ""}, "prompts.cache_salt: expected 1 to 128 characters, got 0"),
        ({"prompt": "x", "cache_salt": "s" * 129}, "prompts.cache_salt: expected 1 to 128 characters, got 129"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "prompts.cache_salt: expected valid Unicode"),
    ],
)
def test_prompt_of_unknown_type_is_refused(llm: LLM, prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, SamplingParams(), use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_token_ids_are_the_prompt_where_its_text_is_given_as_well(llm: LLM) -> None:
    ids = llm.tokenizer.encode("a = 1")
    prompt = {"prompt": "as it was", "prompt_token_ids": ids, "multi_modal_data": None}
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert (output.prompt, output.prompt_token_ids) == ("as it was", ids)


def test_prefixes_are_shared_only_between_prompts_of_the_same_salt(llm: LLM) -> None:
    ids, params = [*range(600, 760)], SamplingParams(max_tokens=1)
    cached = []
    for salt in ("a", "b", "a"):
        (output,) = llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, params, use_tqdm=False)
        assert isinstance(output, RequestOutput)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 128]


def test_error_of_an_unknown_argument_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(model="demo", max_model_length=10)


def test_a_context_beyond_the_models_limit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^max_model_len: 8192 is more than the model's limit of 2048 tokens$"):
        LLM(model="demo", max_model_len="8K")


def test_what_limits_the_context_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    LLM(model="demo", max_num_seqs=1, num_gpu_blocks_override=4)
    assert "context 256 of the model's 2048: what the KV cache holds" in caplog.text
    LLM(model="demo", max_num_seqs=1, num_gpu_blocks_override=4, max_model_len=512)
    assert "the KV cache is smaller than the context of 512 tokens: requests are limited to 256 tokens" in caplog.text


def test_fault_points_are_armed_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_DEBUG", "1")
    monkeypatch.setenv("FD_FAULT", "commit:raise@offline-1,tokenise:raise@offline-3")
    try:
        llm = LLM(model="demo", max_model_len=64, seed=1)
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        outputs = llm.generate(["a = 1", "b = 2", "c = 3"], params, use_tqdm=False)
        assert isinstance(outputs, list)
        choices = [output.outputs[0] for output in outputs]
        assert [choice.finish_reason for choice in choices] == ["length", "error", "length"]
        assert choices[1].error == ErrorInfo("internal_error", "internal error")
        with pytest.raises(InjectedFault):  # nothing has been started: this is the caller's own exception
            llm.generate("d = 4", params, use_tqdm=False)
        assert len(complete(llm, max_tokens=4).token_ids) == 4
    finally:
        arm(())


def test_flags_replace_values_of_the_checkpoints_files(llm: LLM) -> None:
    other = LLM("demo", hf_overrides={"rope_theta": 50.0}, override_generation_config={"max_new_tokens": 3, "top_k": 1})
    params = other.get_default_sampling_params()
    assert (params.max_tokens, params.top_k) == (3, 1)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    texts = [model.generate(PROMPT, greedy)[0].outputs[0].text for model in (llm, other)]
    assert texts[0] != texts[1] and len(other.generate(PROMPT)[0].outputs[0].token_ids) == 3
    fingerprints = [model.engine.describe()["fingerprint"]["checkpoint"] for model in (llm, other)]
    assert fingerprints[0] != fingerprints[1]
