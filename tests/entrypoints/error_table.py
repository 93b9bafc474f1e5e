# SPDX-License-Identifier: Apache-2.0
"""Wrong requests and the responses that they get; docs/guide/errors.md shows these cases and a test sends each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fastdeploy.entrypoints.openai.errors import ABSENT_ROUTES
from fastdeploy.entrypoints.openai.field_rules import rules_of
from fastdeploy.entrypoints.openai.messages_api.protocol import CountTokensRequest, MessagesRequest
from fastdeploy.entrypoints.openai.protocol import BatchChatCompletionRequest, ChatCompletionRequest, CompletionRequest
from fastdeploy.entrypoints.openai.responses_api.protocol import ResponsesRequest

MAX_MODEL_LEN = 200
COMPLETION: dict[str, Any] = {"model": "default", "prompt": "the", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
NO_FORMAT = "auto needs a server with --tool-call-parser, because its chat template has no call in a known format: "
TOOL = {"type": "function", "function": {"name": "f"}}
RESPONSE: dict[str, Any] = {"model": "default", "input": "hi", "max_output_tokens": 3}
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BATCH = f"{CHATS}/batch"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
VALID = {
    COMPLETIONS: COMPLETION,
    CHATS: CHAT,
    BATCH: {**CHAT, "messages": [CHAT["messages"]]},
    MESSAGES: CHAT,
    COUNT_TOKENS: {"messages": CHAT["messages"]},
    RESPONSES: RESPONSE,
    "/invocations": CHAT,
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/abort_requests": {},
    "/v1/role": {},
}
MODELS: dict[str, type[msgspec.Struct]] = {
    COMPLETIONS: CompletionRequest,
    CHATS: ChatCompletionRequest,
    BATCH: BatchChatCompletionRequest,
    MESSAGES: MessagesRequest,
    COUNT_TOKENS: CountTokensRequest,
    RESPONSES: ResponsesRequest,
}


@dataclass(frozen=True)
class Row:
    """A request that is refused.

    Attributes:
        path, method, body, headers: the request; a body of bytes is sent as it is.
        wrong: what is wrong, in words.
        status, message, param, code: the response; `message` is a part of its message.
    """

    path: str
    wrong: str
    status: int
    message: str
    param: str | None = None
    code: str | None = "invalid_value"
    body: Any = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A short name of the row."""
        return f"{self.method} {self.path} {self.wrong}"[:120]


def shown(value: Any) -> str:
    """Return a value as the table shows it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:50] + "…"


def wrong(path: str, name: str, value: Any, message: str, param: str = "", code: str = "invalid_value") -> Row:
    """Return the row of one wrong field in an otherwise valid body."""
    body = {**VALID[path], name: value}
    return Row(path, f"{name}: {shown(value)}", 400, message, param or name, code, body)


def both(name: str, value: Any, message: str, param: str = "") -> Iterator[Row]:
    """Yield the rows of a field that both endpoints have."""
    for path in (COMPLETIONS, CHATS):
        yield wrong(path, name, value, message, param)


BOTH: list[tuple[Any, ...]] = [
    ("stream_options", {"include_usage": True}, "needs stream: true"),
    ("n", 0, "expected an integer in [1, 128], got 0"),
    ("n", 129, "[1, 128], got 129"),
    ("n", 1.5, "expected int, got float"),
    ("n", True, "expected int, got bool"),
    ("temperature", -1, "expected a number in [0, "),
    ("top_p", 1.5, "expected a number in [0, 1], got 1.5"),
    ("top_k", -2, "expected an integer in [-1, "),
    ("min_p", 2, "expected a number in [0, 1], got 2"),
    ("presence_penalty", 3, "expected a number in [-2, 2]"),
    ("frequency_penalty", -3, "expected a number in [-2, 2]"),
    ("repetition_penalty", 0, "expected a number in [1e-06, 1e+06]"),
    ("seed", 2**70, "expected an integer in [-9223372036854775808, 18446744073709551615]"),
    ("max_tokens", 0, "expected an integer in [1, "),
    ("max_tokens", 10**30, "expected an integer in [1, 2147483647]"),
    ("min_tokens", -1, "expected an integer in [0, "),
    ("min_tokens", 9, "9 is above max_tokens 3"),
    ("stop", ["a"] * 17, "at most 16 strings, got 17"),
    ("stop", [""], "expected non-empty strings"),
    ("stop", "a" * 1025, "expected strings of 1 to 1024 characters, got 1025"),
    ("stop", ["a", "b" * 100000], "expected strings of 1 to 1024 characters, got 100000"),
    ("stop_token_ids", [99999], "expected token ids in [0, 382], got 99999"),
    ("stop_token_ids", [-1], "expected an integer in [0, "),
    ("logit_bias", {"x": 1}, "expected token ids as keys, got 'x'"),
    ("logit_bias", {"99999": 1}, "expected token ids in [0, 382], got 99999"),
    ("logit_bias", {"5": 101}, "expected a number in [-100, 100], got 101"),
    ("logit_bias", {"5": 1, "05": 2}, "token id 5 is given twice"),
    ("bad_words", [""], "expected non-empty strings"),
    ("stop_token_ids", [5] * 4097, "at most 4096 entries, got 4097"),
    ("bad_words", ["a"] * 4097, "at most 4096 entries, got 4097"),
    ("bad_words", ["x y " * 8192], "at most 16384 token ids in all sequences, got "),
    ("bad_words_token_ids", [5] * 16385, "at most 16384 entries, got 16385"),
    ("bad_words_token_ids", [[5] * 8192, [6] * 8193], "at most 16384 token ids in all sequences, got 16385"),
    ("bad_words_token_ids", [[]], "expected non-empty lists"),
    ("bad_words_token_ids", [[3], "a"], "expected lists of token ids"),
    ("bad_words_token_ids", [["a"]], "expected an integer"),
    ("bad_words_token_ids", [[99999]], "expected token ids in [0, 382], got 99999"),
    ("logprob_token_ids", [5], "needs logprobs"),
    ("allowed_token_ids", [], "expected at least one token id; leave it out to allow all"),
    ("allowed_token_ids", [5, 383], "expected token ids in [0, 382], got 383"),
    ("allowed_token_ids", [5, -1], "expected an integer in [0, "),
    ("prompt_logprobs", -1, "expected an integer in [0, 20] (--max-logprobs), got -1"),
    ("prompt_logprobs", 21, "expected an integer in [0, 20] (--max-logprobs), got 21"),
    ("speculative", {"method": "mtp"}, 'expected "off", "match" or nothing', "speculative.method"),
    ("speculative", {"mode": "off"}, "unknown key; known keys: method, num_speculative_tokens", "speculative.mode"),
    ("speculative", {"num_speculative_tokens": 17}, "[0, 16]", "speculative.num_speculative_tokens"),
    ("logits_processors_args", {"x": 1}, "unknown key 'x'; known keys: logit_bias, thinking_budget"),
    ("logits_processors_args", {"logit_bias": 3}, "expected a mapping of token ids"),
    ("logits_processors_args", {"logit_bias": {"x": 1}}, "expected token ids as keys"),
    ("response_format", {"type": "yaml"}, "expected one of text, json_object, json_schema, structural_tag",
     "response_format.type"),
    ("response_format", {"type": "json_schema"}, "expected an object with name and schema",
     "response_format.json_schema"),
    ("response_format", {"type": "json_object", "schema": {}}, "unknown key; known keys: type",
     "response_format.schema"),
    ("guided_json", "{", "is not valid JSON"),
    ("guided_regex", "", "expected a non-empty string"),
    ("guided_choice", [], "expected a non-empty list of non-empty strings"),
    ("guided_grammar", "", "expected a non-empty string"),
    ("structural_tag", "x", "is not valid JSON"),
    ("request_id", "", "expected 1 to 128 printable ASCII"),
    ("request_id", "a\nb", "expected 1 to 128 printable ASCII"),
    ("request_id", "a" * 129, "expected 1 to 128 printable ASCII"),
    ("truncate_prompt_tokens", 0, "expected -1 or at least 1, got 0"),
    ("truncate_prompt_tokens", -2, "expected an integer in [-1, "),
    ("truncation_side", "middle", "expected left or right, got 'middle'"),
    ("truncation_side", "left", "needs truncate_prompt_tokens"),
    ("priority", 2**31, "expected an integer in [-2147483648, 2147483647]"),
    ("metadata", {"enable_thinking": False}, "expected a mapping to texts; settings are fields of their own"),
    ("metadata", "x", "expected a mapping to texts"),
    ("timeout", 0, "expected a number in [0.001, 1e+09], got 0"),
    ("timeout", -1.5, "expected a number in [0.001, 1e+09], got -1.5"),
    ("max_streaming_response_tokens", 0, "expected an integer of at least 1, got 0"),
]  # fmt: skip

ONE: list[Row] = [
    wrong(COMPLETIONS, "prompt", None, "is missing"),
    wrong(COMPLETIONS, "prompt", "", "expected 1 to 199 tokens"),
    wrong(COMPLETIONS, "prompt", [], "not empty and not mixed"),
    wrong(COMPLETIONS, "prompt", ["a", 1], "not empty and not mixed"),
    wrong(COMPLETIONS, "prompt", [[]], "expected 1 to 199 tokens"),
    wrong(COMPLETIONS, "prompt", [99999], "expected token ids in [0, 382], got 99999"),
    wrong(COMPLETIONS, "prompt", [2**80], "expected token ids in [0, 382]"),
    wrong(COMPLETIONS, "prompt", [5] * 200, "expected 1 to 199 tokens", code="context_length_exceeded"),
    wrong(COMPLETIONS, "prompt_token_ids", [1], "cannot be combined with prompt"),
    wrong(COMPLETIONS, "best_of", 2, "expected n, which is 1"),
    wrong(COMPLETIONS, "logprobs", 21, "expected an integer in [0, 20] (--max-logprobs), got 21"),
    wrong(COMPLETIONS, "logprobs", -1, "expected an integer in [0, 20] (--max-logprobs), got -1"),
    wrong(COMPLETIONS, "suffix", "x", "this model has no tokens for fill-in-the-middle prompts"),
    Row(COMPLETIONS, "min_tokens: 200, max_tokens: 200", 400, "expected at most", "min_tokens",
        body={**COMPLETION, "min_tokens": 200, "max_tokens": 200}),
    Row(COMPLETIONS, "n: 100 with 20 prompts", 400, "expected at most 1024 choices for all prompts, got 2000", "n",
        body={**COMPLETION, "n": 100, "prompt": ["a"] * 20}),
    Row(COMPLETIONS, "logit_bias differs in logits_processors_args", 400, "logit_bias has another value for token id 5",
        "logits_processors_args",
        body={**COMPLETION, "logit_bias": {"5": 1}, "logits_processors_args": {"logit_bias": {"5": 2}}}),
    wrong(COMPLETIONS, "logits_processors_args", {"thinking_budget": 3}, "requires a server with --reasoning-parser"),
    wrong(COMPLETIONS, "thinking_token_budget", 3, "requires a server with --reasoning-parser"),
    wrong(COMPLETIONS, "thinking_token_budget", -2, "expected an integer in [-1, "),
    wrong(COMPLETIONS, "messages", [], "unknown field; it belongs to /v1/chat/completions", code="unknown_parameter"),
    wrong(COMPLETIONS, "maxtokens", 3, "unknown field; did you mean 'max_tokens'?", code="unknown_parameter"),
    wrong(CHATS, "messages", [{"role": "user", "content": "the " * 300}], "expected 1 to 199 tokens",
          code="context_length_exceeded"),
    wrong(CHATS, "prompt_token_ids", [], "expected 1 to 199 tokens"),
    Row(COMPLETIONS, 'prompt_token_ids: ["a"]', 400, "expected token ids, or a list of lists of token ids",
        "prompt_token_ids", body={"prompt_token_ids": ["a"]}),
    wrong(CHATS, "messages", None, "expected at least one message"),
    wrong(CHATS, "messages", [], "expected at least one message"),
    wrong(CHATS, "messages", [{"role": 3, "content": "x"}], "expected system, developer, user", "messages[0].role"),
    wrong(CHATS, "messages", [{"role": "user"}], "expected text", "messages[0].content"),
    wrong(CHATS, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
          "this server supports text only", "messages[0].content"),
    wrong(CHATS, "messages", [{"role": "function", "content": "x"}], "is deprecated in OpenAI's API; use tool",
          "messages[0].role"),
    wrong(CHATS, "messages", [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}],
          "allowed only for role assistant, got role user", "messages[0].tool_calls"),
    wrong(CHATS, "tools", [{"type": "retrieval"}], "expected function", "tools[0].type"),
    wrong(CHATS, "tools", [{"type": "function", "function": {"name": "a b"}}], "expected 1 to 128 of the characters",
          "tools[0].function.name"),
    wrong(CHATS, "tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
          "expected a JSON schema of type object", "tools[0].function.parameters"),
    wrong(CHATS, "tools", [TOOL, TOOL], "'f' is not unique", "tools[1].function.name"),
    wrong(CHATS, "tools", [TOOL] * 1025, "at most 1024 tools, got 1025"),
    wrong(CHATS, "messages", CHAT["messages"] * 16385, "at most 16384 messages, parts and tool calls in all"),
    wrong(CHATS, "chat_template", "{{ '\\ud800' }}", "expected valid Unicode, got the lone surrogate", "messages"),
    wrong(CHATS, "chat_template", "{% for i in range(99999) %}x{% endfor %}", "renders more than 10400 characters",
          "messages"),
    wrong(COMPLETIONS, "bad_words", ["x" * 65537], "at most 65536 characters in all strings, got 65537"),
    *(
        wrong(path, "cache_salt", salt, f"expected 1 to 128 characters, got {len(salt)}")
        for path in (COMPLETIONS, CHATS, BATCH, RESPONSES)
        for salt in ("", "x" * 129)
    ),
    Row(COMPLETIONS, "1,024 prompts with 1,025 stop token ids", 400, "got 1025 times 1024", "prompt",
        body={**COMPLETION, "prompt": ["a"] * 1024, "stop_token_ids": [5] * 1025}),
    wrong("/tokenize", "prompt", "x" * 2097153, "expected at most 2097152 characters, got 2097153",
          code="context_length_exceeded"),
    wrong("/detokenize", "tokens", [5] * 1601, "expected at most 1600 token ids, got 1601"),
    Row(CHATS, "tools, and a chat_template that shows them, with no call", 400, NO_FORMAT, "tool_choice",
        body={**CHAT, "tools": [TOOL], "chat_template": "{{ tools }}{{ messages[0].content }}"}),
    wrong(CHATS, "tool_choice", "required", "needs tools"),
    Row(CHATS, "tool_choice names another tool", 400, "'g' is not one of the tools: f", "tool_choice.function.name",
        body={**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    wrong(CHATS, "parallel_tool_calls", False, "needs tools"),
    wrong(CHATS, "reasoning_effort", "huge",
          "expected one of none, minimal, low, medium, high, xhigh, max, got 'huge'"),
    wrong(CHATS, "continue_final_message", True, "expected the last message to be the assistant's, with content"),
    wrong(CHATS, "reasoning_max_tokens", -1, "expected an integer in [0, "),
    wrong(CHATS, "response_max_tokens", 0, "expected an integer in [1, "),
    wrong(CHATS, "chat_template", "{% for %}", "cannot be compiled"),
    Row(CHATS, "disable_chat_template with tools", 400, "cannot be combined with disable_chat_template", "tools",
        body={**CHAT, "disable_chat_template": True, "tools": [TOOL], "tool_choice": "none"}),
    Row(CHATS, "guided_json and guided_regex", 400, "a request may have one constraint", "guided_regex",
        body={**CHAT, "guided_json": {}, "guided_regex": "a"}),
    wrong(CHATS, "prompt_token_ids", [99999], "expected token ids in [0, 382], got 99999"),
    wrong(CHATS, "top_logprobs", 2, "needs logprobs: true"),
    Row(CHATS, "logprobs: true, top_logprobs: 21", 400, "expected an integer in [0, 20] (--max-logprobs), got 21",
        "top_logprobs", body={**CHAT, "logprobs": True, "top_logprobs": 21}),
    wrong(CHATS, "max_completion_tokens", 0, "expected an integer in [1, "),
    wrong(CHATS, "chat_template_kwargs", {"messages": 1}, "is a field of its own"),
    wrong(CHATS, "logits_processors_args", {"thinking_budget": -1}, "expected a thinking_budget of at least 0 tokens"),
    wrong(CHATS, "thinking_token_budget", -2, "expected an integer in [-1, "),
    Row(CHATS, "thinking_token_budget differs from reasoning_max_tokens", 400, "differs from reasoning_max_tokens 4",
        "thinking_token_budget", body={**CHAT, "reasoning_max_tokens": 4, "thinking_token_budget": -1}),
    Row(CHATS, "thinking_budget differs from reasoning_max_tokens", 400, "differs from reasoning_max_tokens 4",
        "logits_processors_args",
        body={**CHAT, "reasoning_max_tokens": 4, "logits_processors_args": {"thinking_budget": 3}}),
    wrong(CHATS, "prompt", "x", "unknown field; it belongs to /v1/completions", code="unknown_parameter"),
    wrong(MESSAGES, "max_tokens", None, "is missing"),
    wrong(MESSAGES, "messages", [{"role": "tool", "content": "x"}], "expected one of user, assistant, system",
          "messages[0].role"),
    wrong(MESSAGES, "messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}],
          "image is not supported: this server reads and writes text only", "messages[0].content[0].type",
          "unsupported_parameter"),
    wrong(MESSAGES, "tools", [{"type": "web_search_20250305", "name": "web_search"}],
          "web_search_20250305 is not supported: tools do not run on this server", "tools[0].type",
          "unsupported_parameter"),
    wrong(MESSAGES, "tools", [{"name": "a b", "input_schema": {"type": "object"}}], "of the characters a-z",
          "tools[0].name"),
    wrong(MESSAGES, "tool_choice", {"type": "any"}, "needs tools"),
    wrong(MESSAGES, "thinking", {"type": "enabled"}, "is missing", "thinking.budget_tokens"),
    wrong(MESSAGES, "output_config", {"effort": "huge"}, "expected one of low, medium, high, xhigh, max, got 'huge'",
          "output_config.effort"),
    wrong(MESSAGES, "stop_sequences", [""], "expected non-empty strings"),
    wrong("/tokenize", "messages", [], "expected a text, or messages; one of both", "prompt"),
    wrong("/tokenize", "add_generation_prompt", True, "belongs to messages, not to a prompt"),
    wrong("/tokenize", "promt", "a", "unknown field; did you mean 'prompt'?", code="unknown_parameter"),
    wrong("/tokenize", "return_token_strs", "yes", "expected bool, got str"),
    wrong("/detokenize", "tokens", None, "is missing"),
    wrong("/detokenize", "tokens", [99999], "expected token ids in [0, 382], got 99999"),
    wrong("/detokenize", "tokens", ["a"], "expected int, got str"),
    Row("/v1/abort_requests", "neither req_ids nor abort_all", 400, "or abort_all: true", "req_ids", body={}),
    Row("/v1/abort_requests", "both of them", 400, "or abort_all: true", "req_ids",
        body={"req_ids": ["a"], "abort_all": True}),
    wrong("/v1/abort_requests", "req_ids", ["a"] * 4097, "at most 4096 ids, got 4097"),
    Row("/v1/abort_requests", 'request_ids: ["a"]', 400, "unknown field; did you mean 'req_ids'?", "request_ids",
        "unknown_parameter", {"request_ids": ["a"]}),
    wrong("/v1/role", "role", None, "is missing; expected one of prefill, decode, mixed, draining"),
    wrong("/v1/role", "role", "boss", "expected one of prefill, decode, mixed, draining, got 'boss'"),
    wrong("/v1/role", "role", 5, "expected str, got int"),
    Row("/v1/role", 'role: "decode" on a server without a cluster', 400,
        "this server works alone; start it with --scheduler-name splitwise or global", "role", body={"role": "decode"}),
]  # fmt: skip

BODIES: list[Row] = [
    Row(COMPLETIONS, what, 400, message, None, "invalid_json", body)
    for what, body, message in (
        ("an empty body", b"", "the body is not valid JSON"),
        ("half an object", b"{", "the body is not valid JSON"),
        ("an array", b"[1]", "the body must be a JSON object, got an array"),
        ("a string", b'"x"', "the body must be a JSON object, got a string"),
        ("null", b"null", "the body must be a JSON object, got null"),
        ("UTF-16", '{"prompt": "a"}'.encode("utf-16"), "the body is not valid JSON"),
        ("UTF-8 with a byte order mark", b'\xef\xbb\xbf{"prompt": "a"}', "the body is not valid JSON"),
        ("a key that is no UTF-8", b'{"\xff": 1}', "the body is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
        ("half a surrogate pair", b'{"prompt": "\\ud800"}', "; half of a surrogate pair is not a text"),
        ("100,000 arrays in each other", b'{"prompt": ' + b"[" * 100_000, "too many arrays and objects in each other"),
        ("NaN", b'{"prompt": "a", "temperature": NaN}', "the body is not valid JSON"),
        ("Infinity", b'{"prompt": "a", "temperature": Infinity}', "the body is not valid JSON"),
    )
] + [
    Row(COMPLETIONS, "a key given twice", 400, "prompt: given twice in one object", "prompt", "invalid_json",
        b'{"prompt": "a", "prompt": "b"}'),
    Row(COMPLETIONS, "a key given twice in an inner object", 400, "5: given twice in one object", "5", "invalid_json",
        b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}'),
    Row(COMPLETIONS, "bytes that are no UTF-8", 400, "is not valid JSON: 'utf-8' codec can't decode", "prompt",
        "invalid_json", b'{"prompt": "\xff"}'),
    Row(COMPLETIONS, "a number beyond all ranges", 400, "number out of range", "temperature", "invalid_value",
        b'{"prompt": "a", "temperature": 1e999}'),
    Row(COMPLETIONS, "65 arrays in each other", 400, "more than 64 arrays and objects in each other", "guided_json",
        body=b'{"guided_json": ' + b"[" * 65 + b"]" * 65 + b"}"),
    Row(COMPLETIONS, "31 MB of `[],`", 400, "more than 1000000 values and keys", "prompt",
        body=b'{"prompt": [' + b"[]," * 10_400_000 + b"1]}"),
    Row(COMPLETIONS, "33 MB", 413, "the body may have at most 33554432 bytes", None, "request_too_large",
        b"x" * 33_600_000),
    Row(COMPLETIONS, "10 MB of prompt", 400, "expected 1 to 199 tokens", "prompt", "context_length_exceeded",
        b'{"prompt": "' + b"the quick " * 10**6 + b'"}'),
    Row(COMPLETIONS, "gzip", 415, "content-encoding: expected none, got 'gzip'", None, "unsupported_media_type",
        b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
    Row(COMPLETIONS, "a form", 415, "content-type: expected application/json", None, "unsupported_media_type",
        b"prompt=a", headers={"Content-Type": "application/x-www-form-urlencoded"}),
    Row(COMPLETIONS, "plain text", 415, "content-type: expected application/json, got 'text/plain'", None,
        "unsupported_media_type", b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}),
    Row(COMPLETIONS, "another character set", 415, "content-type: expected application/json", None,
        "unsupported_media_type", b"{}", headers={"Content-Type": "application/json; charset=latin-1"}),
    Row(COMPLETIONS, "X-Request-Id of 97 characters", 400, "X-Request-Id: expected 1 to 96 printable ASCII",
        "X-Request-Id", body=COMPLETION, headers={"X-Request-Id": "a" * 97}),
]  # fmt: skip

ROUTES: list[Row] = [
    Row(path, f"model: {shown(name)}", 404, f"{name!r} is not served here", "model", "model_not_found",
        {**VALID[path], "model": name})
    for path in VALID
    if path not in ("/v1/abort_requests", "/v1/role")
    for name in ("gpt-4", "")
] + [
    Row("/v1/models/gpt-4", "an unknown model", 404, "'gpt-4' is not served here", "model", "model_not_found",
        method="GET"),
    Row("/v1/nothing", "an unknown route", 404, "/v1/nothing: no such route", None, "not_found"),
    Row("/health/", "a trailing slash", 404, "/health/: no such route; did you mean /health?", None, "not_found",
        method="GET"),
    Row("/v1/chat/completion", "a route misspelt", 404, "did you mean /v1/chat/completions?", None, "not_found"),
    Row(COMPLETIONS, "GET", 405, "expected POST, got GET", None, "method_not_allowed", method="GET"),
    Row(COMPLETIONS, "OPTIONS", 405, "expected POST, got OPTIONS", None, "method_not_allowed", method="OPTIONS"),
    *(
        Row(f"/v1/responses/resp_1{below}", "a response, which is not stored", 404, "responses are not stored", None,
            "not_found", method=method)
        for method, below in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))
    ),
    Row("/v1/models", "DELETE", 405, "got DELETE", None, "method_not_allowed", method="DELETE"),
    *(
        Row(path, "a route of other servers", 404, reason, None, "not_found")
        for path, reason in ABSENT_ROUTES.items()
    ),
]  # fmt: skip

CANDIDATES: list[tuple[Any, str]] = [(5, "got int"), ("x", "got str"), ([], "got array"), ({}, "got object")]


def type_rows() -> Iterator[Row]:
    """Yield, for every field, a value of a type that it does not have."""
    for path, model in MODELS.items():
        for spec in msgspec.structs.fields(model):
            value, message = next((value, got) for value, got in CANDIDATES if not _fits(value, spec.type))
            yield wrong(path, spec.name, value, message)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def refused_rows() -> Iterator[Row]:
    """Yield every field that is refused by name."""
    for path, model in MODELS.items():
        for name, (reason, _) in rules_of(model).refused.items():
            code = "thread_unsupported_request" if (path, name) == (MESSAGES, "thread") else "unsupported_parameter"
            yield wrong(path, name, {"some": "thing"}, reason, code=code)


FIELD_ROWS = [row for args in BOTH for row in both(*args)] + ONE
ROWS = [*FIELD_ROWS, *BODIES, *ROUTES, *type_rows(), *refused_rows()]
