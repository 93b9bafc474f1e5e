# SPDX-License-Identifier: Apache-2.0
"""The body of POST /v1/responses, and which types and keys of the objects in it are honoured or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from fastdeploy.core.sampling_params import OUTPUT_LENGTHS
from fastdeploy.detokenize.messages import MAX_TOOLS
from fastdeploy.entrypoints.openai.field_rules import (
    EXTENSIONS,
    LENGTH_BY_PROMPT,
    NOTED_EXTENSIONS,
    VERBOSITIES,
    FieldRules,
)
from fastdeploy.entrypoints.openai.object_rules import ObjectRules, TypeRules
from fastdeploy.entrypoints.openai.prompt import REASONING_EFFORTS
from fastdeploy.entrypoints.openai.protocol import GenerationFields, RequestFields
from fastdeploy.entrypoints.openai.responses_api.tool_fields import (
    ALLOWED_TOOLS,
    BACKGROUND_CALLS,
    NAMESPACE_TOOLS,
    NO_PROGRAMS,
    TOOL_CHOICES,
    TOOLS,
    TYPE,
)

LOGPROBS = "message.output_text.logprobs"
INCLUDES_WITHOUT_EFFECT = {
    "reasoning.encrypted_content": "reasoning is returned as text, and taken back as text",
    "message.input_image.image_url": "messages have no images",
    **dict.fromkeys(
        (
            *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
            *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
        ),
        "there are no hosted tools, so there are no calls of them",
    ),
}
"""Value of `include` -> why an answer has nothing of the kind."""
INCLUDES = (LOGPROBS, *INCLUDES_WITHOUT_EFFECT)

_NOT_STORED = "responses are not stored; send the whole conversation as input"
_TEXT_ONLY = "this server reads and writes text only"
_HOSTED_ITEM = "there are no hosted tools, so there are no calls of them"
_CALLER: tuple[Any, ...] = ({"type": "direct"},)
_FOUND = "equal prefixes are found without it; `cache_salt` separates them"
_ID = "items are not stored"
_SERVICE = "identifies the request in a hosted service"

BODY_RULES = FieldRules(
    without_effect={
        "user": _SERVICE,
        "safety_identifier": _SERVICE,
        "service_tier": "there is one tier; the answer says `default`",
        "prompt_cache_key": _FOUND,
        "prompt_cache_retention": "cached prefixes stay as long as there is room",
        "client_metadata": "it describes the client's session",
        **EXTENSIONS,
    },
    noted={"client_metadata": (), **NOTED_EXTENSIONS},
    object_fields=EXTENSIONS,
    refused={
        "previous_response_id": (_NOT_STORED, ()),
        "conversation": (_NOT_STORED, ()),
        "background": ("a response ends with its connection; use stream, or fastdeploy run-batch", (False,)),
        "prompt": ("prompts are not stored; send their text as instructions and input", ()),
        "context_management": ("conversations are not compacted; send a shorter input", ([],)),
        "moderation": ("moderation is not supported", ()),
        "image": (_TEXT_ONLY, ({},)),
        "access_programs": ("there are no access programs", ({}, {"cyber": "standard"})),
        "multi_agent": ("the client runs the agents", ({"enabled": False},)),
        "previous_response": (_NOT_STORED, ()),
        "previous_input_messages": (_NOT_STORED, ([],)),
        "enable_response_messages": ("the answer has items only", (False,)),
        "mm_processor_kwargs": (_TEXT_ONLY, ({},)),
        "max_completion_tokens": ("is the spelling of chats; use max_output_tokens", ()),
        "messages": ("is the spelling of chats; use input", ()),
        "response_format": ("is the spelling of chats; use text.format", ()),
        "reasoning_effort": ("is the spelling of chats; use reasoning.effort", ()),
        "logprobs": (f'is the spelling of chats; use include: ["{LOGPROBS}"]', (False,)),
    },
)


_AGENT: dict[str, tuple[str, tuple[Any, ...]]] = {"agent": ("the client runs the agents", ())}
_ITEM = {"id": _ID, "status": "what is sent counts as complete"}
_CALL_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    **_AGENT,
    "caller": (NO_PROGRAMS, _CALLER),
}

INPUT_PARTS = TypeRules(
    honoured={
        "input_text": ObjectRules(
            {"prompt_cache_breakpoint": _FOUND}, honoured={**TYPE, "text": "text"}, required=("text",)
        ),
        "output_text": ObjectRules(
            {"annotations": "the text is what the model reads", "logprobs": "the text is what the model reads"},
            honoured={**TYPE, "text": "text of the assistant"},
            required=("text",),
        ),
        "refusal": ObjectRules(honoured={**TYPE, "refusal": "text of the assistant"}, required=("refusal",)),
    },
    refused=dict.fromkeys(("input_image", "input_file", "input_audio"), _TEXT_ONLY),
)
"""The parts of the content of a message."""

OUTPUT_PARTS = TypeRules(
    honoured={"input_text": INPUT_PARTS.honoured["input_text"]},
    refused=dict.fromkeys(("input_image", "input_file"), _TEXT_ONLY),
)
"""The parts of what a function returned."""

REASONING_PARTS = TypeRules(
    honoured={"reasoning_text": ObjectRules(honoured={**TYPE, "text": "text of the reasoning"}, required=("text",))}
)
SUMMARY_PARTS = TypeRules(
    honoured={"summary_text": ObjectRules(honoured={**TYPE, "text": "text of the summary"}, required=("text",))}
)

INPUT_ITEMS = TypeRules(
    honoured={
        "message": ObjectRules(
            {**_ITEM, "phase": "templates do not read it"},
            _AGENT,
            honoured={
                **TYPE,
                "role": "`user`, `assistant`, `system` or `developer`",
                "content": "a text, or a list of parts",
            },
            required=("role", "content"),
        ),
        "function_call": ObjectRules(
            _ITEM,
            {**_CALL_REFUSED, "async": (BACKGROUND_CALLS, (False,))},
            honoured={
                **TYPE,
                "name": "name of the function",
                "namespace": "namespace of the function; its name in the prompt begins with it",
                "arguments": "JSON text",
                "call_id": "name of the call, which its output repeats",
            },
            required=("name", "arguments", "call_id"),
        ),
        "function_call_output": ObjectRules(
            _ITEM,
            _CALL_REFUSED,
            honoured={
                **TYPE,
                "call_id": "name of the call",
                "output": "a text, or a list of parts",
                "name": "name of the function, for the template",
                "namespace": "namespace of the function, for the template",
            },
            required=("call_id", "output"),
        ),
        "reasoning": ObjectRules(
            _ITEM,
            {**_AGENT, "encrypted_content": ("reasoning is returned as text; send it back as content", ("",))},
            honoured={
                **TYPE,
                "content": "parts of type `reasoning_text`, for the template",
                "summary": "parts of type `summary_text`, which take the place of a missing `content`",
            },
        ),
    },
    refused={
        "item_reference": _NOT_STORED,
        "custom_tool_call": "there are no custom tools; use functions",
        "custom_tool_call_output": "there are no custom tools; use functions",
        "compaction": "conversations are not compacted; send the items themselves",
        "compaction_trigger": "conversations are not compacted; send a shorter input",
        "configuration_update": "send the settings as fields of the body",
        "additional_tools": "send all tools in the field tools",
        **dict.fromkeys(("program", "program_output"), NO_PROGRAMS),
        **dict.fromkeys(("agent_message", "multi_agent_call", "multi_agent_call_output"), "the client runs the agents"),
        **dict.fromkeys(
            (
                *("file_search_call", "web_search_call", "computer_call", "computer_call_output"),
                *("tool_search_call", "tool_search_output", "image_generation_call", "code_interpreter_call"),
                *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
                *("apply_patch_call", "apply_patch_call_output"),
                *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
            ),
            _HOSTED_ITEM,
        ),
    },
    default="message",
)

TEXT = ObjectRules(
    {"verbosity": f"{LENGTH_BY_PROMPT}; the answer says `medium`"},
    noted={"verbosity": VERBOSITIES},
    honoured={"format": "what the text follows"},
)
TEXT_FORMATS = TypeRules(
    honoured={
        "text": ObjectRules(honoured=TYPE),
        "json_object": ObjectRules(honoured=TYPE),
        "json_schema": ObjectRules(
            honoured={
                **TYPE,
                "name": "name of the schema",
                "schema": "JSON schema, which is followed exactly",
                "strict": "the schema is followed exactly, whatever it is",
                "description": "description of the schema",
            },
            required=("name", "schema"),
        ),
    }
)
REASONING = ObjectRules(
    {
        "summary": "the reasoning itself is returned, in `content` of its item",
        "generate_summary": "the reasoning itself is returned, in `content` of its item",
    },
    {
        "context": ("the template decides which reasoning of earlier turns the prompt has", ("auto",)),
        "mode": ("there is one mode", ("standard",)),
    },
    honoured={"effort": "passed to the template; `none` also sets `enable_thinking` to false"},
)
STREAM_OPTIONS = ObjectRules({"include_obfuscation": "events are never padded"})
PROMPT_CACHE_OPTIONS = ObjectRules(
    {"mode": _FOUND, "ttl": "cached prefixes stay as long as there is room"},
    {
        "comparison_response_id": (_NOT_STORED, ()),
        "prewarm": ("send the request itself; its prefix stays cached", (False,)),
    },
)

OBJECTS: dict[str, ObjectRules | TypeRules] = {
    "Items of `input`": INPUT_ITEMS,
    "Parts of a message's `content`": INPUT_PARTS,
    "Parts of a function's `output`": OUTPUT_PARTS,
    "Parts of a reasoning item's `content`": REASONING_PARTS,
    "Parts of a reasoning item's `summary`": SUMMARY_PARTS,
    "Objects in `tools`": TOOLS,
    "Objects in a namespace's `tools`": NAMESPACE_TOOLS,
    "Objects as `tool_choice`": TOOL_CHOICES,
    "Objects in `tool_choice.tools`": ALLOWED_TOOLS,
    "`text`": TEXT,
    "`text.format`": TEXT_FORMATS,
    "`reasoning`": REASONING,
    "`stream_options`": STREAM_OPTIONS,
    "`prompt_cache_options`": PROMPT_CACHE_OPTIONS,
}
"""What the tables of docs/guide/responses-fields.md are called -> the rules that they show."""


class ResponsesRequest(RequestFields, kw_only=True):
    """Body of POST /v1/responses.

    Attributes:
        input: a text, or the items of the conversation; at most 16384 messages, parts and tool calls
        instructions: a system message before the input
        max_output_tokens: maximum number of output tokens, reasoning included; the end of the context is a limit as
            well
        max_tokens: the same; if both are given, they must be equal
        text: `format`, which the text follows
        reasoning: `effort` of the reasoning
        tools: functions that the model may call, at most 1024, and namespaces of functions; tools of other types are
            left out, and the answer does not repeat them
        tool_choice: `none`, `auto`, `required`, one function, or `allowed_tools`
        parallel_tool_calls: false allows at most one call
        max_tool_calls: returned with the answer; it limits calls of hosted tools, of which there are none
        include: `message.output_text.logprobs` adds the log-probabilities of the text's tokens; other values of
            OpenAI's reference are accepted, but answers have nothing of the kind
        top_logprobs: number of alternatives per token; needs `include`
        truncation: `disabled`; an input that does not fit is an error
        store: responses are not stored, whatever it is; the answer says `store: false`
        metadata: texts that are returned with the answer
        stream_options: options of a stream; needs `stream`
        prompt_cache_options: options of the prefix cache
        chat_template_kwargs: further variables for the chat template, such as `enable_thinking`
        stop: a string, or several, at which the text ends
        presence_penalty, frequency_penalty: penalty over the tokens of the output
        repetition_penalty: penalty over the tokens of prompt and output
        logit_bias: token id to a number that is added to its logit
        skip_special_tokens: leave special tokens out of the text (default: true)
        include_stop_str_in_output: keep the stop string in the text
        structured_outputs: a constraint on the output as in chats, instead of `text.format`
    """

    rules: ClassVar[FieldRules] = BODY_RULES
    objects: ClassVar[Mapping[str, Collection[str]]] = {
        name: GenerationFields.objects[name] for name in ("speculative", "structured_outputs")
    }
    schemas: ClassVar[dict[str, dict[str, Any]]] = {
        "input": {"minItems": 1, "items": INPUT_ITEMS.schema()},
        "tools": {"maxItems": MAX_TOOLS, "items": TOOLS.schema()},
        "tool_choice": {"properties": {"type": {"enum": list(TOOL_CHOICES.honoured)}}},
        "text": {"properties": {"format": TEXT_FORMATS.schema()}},
        "reasoning": {"properties": {"effort": {"enum": [*REASONING_EFFORTS, None]}}},
        "include": {"items": {"enum": list(INCLUDES)}},
        "truncation": {"enum": ["disabled", None]},
        "max_tokens": {"minimum": OUTPUT_LENGTHS.low},
    }

    input: str | list[Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    stream_options: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # fields of chats that vLLM has in responses, too
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None


CHAT_FIELDS = (
    *RequestFields.__struct_fields__,
    *("chat_template_kwargs", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("skip_special_tokens", "include_stop_str_in_output", "structured_outputs"),
)
"""Fields that the chat has under the same names."""
