# SPDX-License-Identifier: Apache-2.0
"""Renders the prompt of a chat request and finds where it leaves the model's reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from fastdeploy.config.server_config import OWN_TEMPLATE_FIELDS
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import check_json, shorten
from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningState
from fastdeploy.detokenize.chat_template import LOCAL_RENDERER, Conversation, Renderer
from fastdeploy.detokenize.message_shapes import content_text
from fastdeploy.detokenize.messages import MAX_JSON_LENGTH, check_messages, check_tools
from fastdeploy.detokenize.template_process import TemplateProcess
from fastdeploy.entrypoints.openai.parsers.reasoning import CallsInReasoning
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.tool_parser_choice import ToolParserChoice, choose_tool_parser
from fastdeploy.entrypoints.openai.tools_as_text import tools_as_text

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_REASONING = {"enable_thinking": False, "thinking": False}  # variables that templates read
TEMPLATE_FIELDS = ("chat_template", "chat_template_kwargs", "reasoning_effort", "continue_final_message")
NUM_TAIL_TOKENS = 16  # of a prompt of token ids, which are decoded to find a reasoning marker at the end


@dataclass(frozen=True)
class TemplateUse:
    """How the conversation of a request becomes a prompt.

    Attributes:
        template: the chat template; None if none is rendered.
        renderer: runs it.
        tool_parser: how the model writes calls.
    """

    template: str | None
    renderer: Renderer
    tool_parser: ToolParserChoice


def template_use(server: ApiServer, body: ChatCompletionRequest) -> TemplateUse:
    """Return which template the conversation of a request is rendered with.

    Raises:
        InvalidRequestError: there is none, or the one of the request cannot be compiled or exceeds a limit.
    """
    if body.prompt_token_ids is not None or body.disable_chat_template:
        return TemplateUse(None, LOCAL_RENDERER, server.tool_parser)
    templates = server.tokenizer.chat_templates
    given = body.chat_template if body.chat_template is not None else server.chat_template
    template = templates.select(given, bool(body.tools) and body.tool_choice != "none")
    is_own = not has_client_template(server, body.chat_template)
    renderer: Renderer = LOCAL_RENDERER if is_own else _template_process()
    traits = templates.traits(template, renderer)
    return TemplateUse(template, renderer, choose_tool_parser(server.config.tool_call_parser, traits))


def render_prompt(
    server: ApiServer, body: ChatCompletionRequest, max_length: int, use: TemplateUse | None = None
) -> str | list[int]:
    """Return the prompt: the given token ids, the content of the first message, or the rendered conversation.

    Args:
        max_length: maximum length of a rendered conversation, in characters.
        use: the result of `template_use`.

    Raises:
        InvalidRequestError: naming the field.
    """
    if body.prompt_token_ids is not None:
        _check_unused(body, "prompt_token_ids")
        return body.prompt_token_ids
    messages = check_messages(body.messages or [])
    use = use or template_use(server, body)
    if use.template is None:
        return _plain_prompt(body, messages)
    tools = check_tools(body.tools or []) if body.tool_choice != "none" else []
    continues = body.continue_final_message
    if continues:
        _check_continued(body, messages)
    conversation = Conversation(
        messages,
        body.add_generation_prompt if body.add_generation_prompt is not None else not continues,
        continues,
        (tools or None) if use.tool_parser.shows_tools else None,
        {**(server.config.default_chat_template_kwargs or {}), **_template_variables(body)},
        tools_as_text(use.tool_parser, tools),
        server.config.chat_template_content_format,
    )
    return server.tokenizer.chat_templates.render(conversation, use.template, use.renderer, max_length)


def has_client_template(server: ApiServer, chat_template: str | None) -> bool:
    """Return whether this field of a request is a template of its own, not the name of one of the tokenizer's.

    Such a request is handled in the thread that has the template process (`threads.run_in_template_thread`).
    """
    return chat_template is not None and chat_template not in server.tokenizer.chat_templates.templates


def reasoning_format(server: ApiServer) -> ReasoningFormat | None:
    """Return how the model marks its reasoning; None without --reasoning-parser."""
    name = server.engine_config.reasoning_parser
    return REASONING_FORMATS[name] if name else None


def reasoning_state(
    server: ApiServer,
    reasoning: ReasoningFormat | None,
    calls: CallsInReasoning | None,
    body: ChatCompletionRequest,
    prompt: str | list[int],
) -> ReasoningState:
    """Return whether the output begins inside the reasoning, after it, or undecided.

    Args:
        calls: how the output may call tools in its reasoning; None if it must not.
    """
    if reasoning is None:
        return ReasoningState.CLOSED
    if not isinstance(prompt, str):
        return reasoning.state_after(server.tokenizer.decode(prompt[-NUM_TAIL_TOKENS:], skip_special_tokens=False))
    if calls is None:
        return reasoning.state_after(prompt, body.continue_final_message)
    return reasoning.state_after(prompt, body.continue_final_message, calls.may_begin_call)


def _plain_prompt(body: ChatCompletionRequest, messages: list[dict[str, Any]]) -> str:
    _check_unused(body, "disable_chat_template")
    if body.tools:
        raise InvalidRequestError("tools", "cannot be combined with disable_chat_template")
    if len(messages) > 1:
        raise InvalidRequestError("messages", "expected one message with disable_chat_template: the prompt")
    return content_text(messages[0]["content"])


def _check_unused(body: ChatCompletionRequest, name: str) -> None:
    for unused in TEMPLATE_FIELDS:
        if getattr(body, unused):
            raise InvalidRequestError(unused, f"has no effect with {name}, which renders no template")


def _check_continued(body: ChatCompletionRequest, messages: list[dict[str, Any]]) -> None:
    if body.add_generation_prompt:
        raise InvalidRequestError("add_generation_prompt", "expected false with continue_final_message")
    last = messages[-1]
    if last["role"] != "assistant" or not content_text(last["content"]) or "tool_calls" in last:
        raise InvalidRequestError(
            "continue_final_message", "expected the last message to be the assistant's, with content"
        )


def _template_variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """Return the further variables of the template that a request gives.

    Raises:
        InvalidRequestError: a name is a field of its own, or contradicts `reasoning_effort`.
    """
    names = dict(body.chat_template_kwargs or {})
    check_json("chat_template_kwargs", names, MAX_JSON_LENGTH)
    for name in OWN_TEMPLATE_FIELDS:
        if name in names:
            raise InvalidRequestError("chat_template_kwargs", f"{name!r} is a field of its own")
    effort = body.reasoning_effort
    if effort is None:
        return names
    if effort not in REASONING_EFFORTS:
        raise InvalidRequestError(
            "reasoning_effort", f"expected one of {', '.join(REASONING_EFFORTS)}, got {shorten(effort)}"
        )
    for name, value in {"reasoning_effort": effort, **(NO_REASONING if effort == "none" else {})}.items():
        if names.setdefault(name, value) != value:
            raise InvalidRequestError("chat_template_kwargs", f"{name!r} contradicts reasoning_effort")
    return names


@cache
def _template_process() -> TemplateProcess:
    return TemplateProcess()
