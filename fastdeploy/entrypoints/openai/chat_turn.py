# SPDX-License-Identifier: Apache-2.0
"""One turn of a conversation: its prompt, the constraint on its output, and the output's parts, in every protocol."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.reasoning import ReasoningFormat, ReasoningState
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.preprocess import build_request, check_num_logprobs, max_text_length
from fastdeploy.detokenize.text_output import make_detokenizer
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate
from fastdeploy.entrypoints.openai.params import chat_params, check_budget
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser
from fastdeploy.entrypoints.openai.parsers.reasoning import CallsInReasoning, ReasoningCounter, ReasoningParser
from fastdeploy.entrypoints.openai.parsers.stream_parser import Part
from fastdeploy.entrypoints.openai.prompt import reasoning_format, reasoning_state, render_prompt, template_use
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.tool_choice import tool_use


class ChatTurn:
    """The request of a chat for the engine, and the parsers of its choices.

    Attributes:
        request: the prompt and its parameters.
        has_reasoning: the server separates the reasoning of this model.
    """

    def __init__(
        self, server: ApiServer, body: ChatCompletionRequest, response_id: str, accepts_prefill_only: bool = False
    ) -> None:
        """Check the request and render the conversation.

        Args:
            accepts_prefill_only: as of `chat_params`.

        Raises:
            InvalidRequestError: naming the field and its range.
        """
        self._tokenizer = server.tokenizer
        use = template_use(server, body)
        self._tools = tool_use(body, use.tool_parser)
        reasoning = reasoning_format(server)
        self._reasoning = reasoning and reasoning.for_tools(self._tools.markers if self._tools is not None else ())
        params = chat_params(body, server.defaults, server.param_limits, accepts_prefill_only)
        check_budget(body, params, self._reasoning)
        is_truncated = body.truncate_prompt_tokens is not None
        max_length = max_text_length(server.tokenizer, server.limits.max_model_len, is_truncated)
        prompt = render_prompt(server, body, max_length, use)
        self._add_constraint(params)
        self._calls = self._calls_in_reasoning(params)
        state = reasoning_state(server, self._reasoning, self._calls, body, prompt)
        add_special = body.add_special_tokens is True or (  # templates write the special tokens themselves
            body.disable_chat_template and body.add_special_tokens is None
        )
        field = "messages" if body.prompt_token_ids is None else "prompt_token_ids"
        request = build_request(server.tokenizer, server.limits, response_id, prompt, params, add_special, field)
        if body.truncation_side == "right" and self._reasoning is not None:  # the end may be cut off
            text = server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            state = reasoning_state(server, self._reasoning, self._calls, body, text)
        request.cache_salt = body.cache_salt or ""
        request.reasoning = state
        request.may_call_tools = self._reasoning is not None and self._reasoning.tool_call_start != ""
        self.request: GenerationRequest = request
        check_num_logprobs(server.limits, [request], "prompt_logprobs", "top_logprobs", 1)
        is_plain = self._reasoning is None and self._tools is None
        self._parsers = None if is_plain else [self._make_parser(state) for _ in range(params.n)]

    @property
    def has_reasoning(self) -> bool:
        """Return whether the server separates the reasoning of this model."""
        return self._reasoning is not None

    def parts(self, update: ChoiceUpdate) -> list[Part]:
        """Return the parts of the message that an update completes: the next ones of its choice."""
        if self._parsers is None:
            return [Part("content", update.text)] if update.text else []
        return self._parsers[update.index].push(update.text, update.delta.finish_reason is not None)

    def message(self, update: ChoiceUpdate) -> Message:
        """Return the whole message of a choice, whose only update this is."""
        message = Message()
        message.add(self.parts(update))
        return message

    def num_calls(self, index: int) -> int:
        """Return the number of tool calls of a choice so far."""
        return 0 if self._parsers is None else self._parsers[index].num_calls

    def reasoning_counters(self) -> Sequence[ReasoningCounter]:
        """Return a counter of reasoning tokens per choice; none if the server does not separate the reasoning."""
        if self._reasoning is None:
            return ()
        return [self._make_counter(self._reasoning) for _ in range(self.request.params.n)]

    def _add_constraint(self, params: SamplingParams) -> None:
        """Constrain the output to what the tools require, and keep the markers of the parsers in its text."""
        markers = self._reasoning.markers if self._reasoning is not None else ()
        if self._tools is not None:
            params.structured_outputs = self._tools.constraint(self._tokenizer, params.structured_outputs)
            markers += self._tools.markers
        params.visible_token_ids = list(self._tokenizer.find_special_ids(markers).values())

    def _make_counter(self, reasoning: ReasoningFormat) -> ReasoningCounter:
        request = self.request
        parser = ReasoningParser(reasoning, request.reasoning, self._calls)
        return ReasoningCounter(parser, make_detokenizer(self._tokenizer, request.prompt_token_ids, request.params))

    def _calls_in_reasoning(self, params: SamplingParams) -> CallsInReasoning | None:
        """Return how a call ends the reasoning; None if no tool may be called."""
        if self._tools is None:
            return None
        return CallsInReasoning(self._tools.make_parser, is_forced=params.structured_outputs is not None)

    def _make_parser(self, state: ReasoningState) -> MessageParser:
        reasoning = ReasoningParser(self._reasoning, state, self._calls) if self._reasoning is not None else None
        if self._tools is None:
            return MessageParser(reasoning, None)
        return MessageParser(reasoning, self._tools.make_parser(), self._tools.max_calls)
