# SPDX-License-Identifier: Apache-2.0
"""Every field of FastDeploy, vLLM and OpenAI has its class, and the tables of the documentation come from the code."""

from __future__ import annotations

import msgspec
import pytest

from fastdeploy.entrypoints.openai.field_rules import REFUSED, WITHOUT_EFFECT
from fastdeploy.entrypoints.openai.openapi import describe_fields
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields
from scripts.make_request_tables import fresh_pages

SHARED = """model frequency_penalty presence_penalty prompt_logprobs include_draft_logprobs
    include_logprobs_decode_token
    temp_scaled_logprobs top_p_normalized_logprobs max_tokens n seed stop stream stream_options temperature top_p user
    response_format request_id disaggregate_info top_k min_p min_tokens include_stop_str_in_output bad_words
    bad_words_token_ids repetition_penalty stop_token_ids logits_processors_args guided_json guided_regex guided_choice
    guided_grammar return_token_ids prompt_token_ids max_streaming_response_tokens mm_hashes completion_token_ids
    trace_context collect_metrics logit_bias metadata store session_id repetition_detection stream_interval watermarking
    return_token_offsets return_mm_kwargs return_prompt_text routed_experts_prompt_start prompt_embeds media_io_kwargs
    ec_transfer_params kv_transfer_params vllm_xargs documents"""
CHAT = """messages tools logprobs top_logprobs max_completion_tokens chat_template_kwargs chat_template structural_tag
    reasoning_max_tokens response_max_tokens disable_chat_template audio function_call functions modalities
    parallel_tool_calls prediction prompt_cache_key prompt_cache_retention reasoning_effort safety_identifier
    service_tier tool_choice verbosity web_search_options"""
COMPLETION = "prompt best_of echo logprobs suffix"
FIELDS = {ChatCompletionRequest: f"{SHARED} {CHAT}".split(), CompletionRequest: f"{SHARED} {COMPLETION}".split()}


@pytest.mark.parametrize("model", FIELDS)
def test_every_field_of_fastdeploy_vllm_and_openai_is_honoured_without_effect_or_refused(
    model: type[GenerationFields],
) -> None:
    known = {spec.name for spec in msgspec.structs.fields(model)}
    classes = [known, set(WITHOUT_EFFECT), set(REFUSED)]
    assert [name for name in FIELDS[model] if sum(name in one for one in classes) != 1] == []


@pytest.mark.parametrize("model", FIELDS)
def test_every_field_is_described(model: type[GenerationFields]) -> None:
    assert sorted(describe_fields(model)) == sorted(spec.name for spec in msgspec.structs.fields(model))


def test_tables_of_the_documentation_are_fresh() -> None:
    for path, page in fresh_pages().items():
        assert path.read_text() == page, "run python -m scripts.make_request_tables"
