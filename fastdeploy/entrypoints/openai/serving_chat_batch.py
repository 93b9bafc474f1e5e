# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions/batch: several conversations with the same parameters in one request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import add_prompt_number
from fastdeploy.detokenize.preprocess import check_num_logprobs
from fastdeploy.entrypoints.openai.choice_serving import ChoiceServing
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, GenerationGroup
from fastdeploy.entrypoints.openai.prompt import has_client_template
from fastdeploy.entrypoints.openai.protocol import BatchChatCompletionRequest, ChatCompletionRequest, ChatFields
from fastdeploy.entrypoints.openai.renaming import renamed_errors
from fastdeploy.entrypoints.openai.responses import (
    ChatCompletionChoice,
    ChatCompletionResponse,
    ChatCompletionStreamChoice,
)
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.serving_base import make_request_id
from fastdeploy.entrypoints.openai.serving_chat import ServingChat
from fastdeploy.entrypoints.openai.serving_completion import check_num_choices, check_num_ids


class ServingChatBatch(ChoiceServing):
    """A request for the next message of each of several conversations, whose choices are numbered through."""

    body: BatchChatCompletionRequest
    response_type = ChatCompletionResponse
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, server: ApiServer, body: BatchChatCompletionRequest) -> None:
        """Check the request and render the conversations.

        Raises:
            InvalidRequestError: naming the field and its range; a field of a conversation with the conversation's
                number.
        """
        super().__init__(server, body, f"chatcmpl-{make_request_id(body.request_id)}")
        num_conversations = len(body.messages or ())
        if not num_conversations:
            raise InvalidRequestError("messages", "expected a list of at least one conversation")
        check_num_choices(num_conversations * (body.n or 1))
        if has_client_template(server, body.chat_template):
            expected = "expected the name of one of the tokenizer's templates"
            raise InvalidRequestError("chat_template", f"{expected}; a batch cannot bring one, which may be slow")
        self._chats: list[ServingChat] = []
        for index in range(num_conversations):
            self._chats.append(self._chat(index))
            if index == 0:  # the other conversations have the same parameters
                check_num_ids("messages", self._chats[0].requests[0].params, num_conversations)
        self.requests = [request for chat in self._chats for request in chat.requests]
        check_num_logprobs(server.limits, self.requests, "prompt_logprobs", "top_logprobs", 1)

    def group(self) -> GenerationGroup:
        """Return the generations of the messages, whose reasoning is counted."""
        group = super().group()
        group.usage.reasoning = [counter for chat in self._chats for counter in chat.reasoning_counters()]
        return group

    def choice(self, update: ChoiceUpdate) -> ChatCompletionChoice:
        """Return the choice with its message."""
        choice = self._chats[update.prompt_index].choice(_in_its_chat(update))
        choice.index = update.index
        return choice

    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[ChatCompletionStreamChoice]:
        """Yield what is new in a message, as in the stream of its chat."""
        for choice in self._chats[update.prompt_index].chunk_choices(_in_its_chat(update)):
            choice.index = update.index
            yield choice

    def is_opening(self, choice: ChatCompletionStreamChoice) -> bool:
        """Return whether a chunk opens a message."""
        return self._chats[0].is_opening(choice)

    def _chat(self, index: int) -> ServingChat:
        """Return the chat of one conversation, with an id of its own in the engine."""
        assert self.body.messages is not None
        shared = {name: getattr(self.body, name) for name in ChatFields.__struct_fields__}
        with renamed_errors(lambda name: _with_number(name, index)):
            chat = ServingChat(self.server, ChatCompletionRequest(messages=self.body.messages[index], **shared))
        if len(self.body.messages) > 1:
            chat.requests[0].request_id = add_prompt_number(self.response_id, index)
        else:
            chat.requests[0].request_id = self.response_id
        return chat


def _in_its_chat(update: ChoiceUpdate) -> ChoiceUpdate:
    """Return an update with the number that its choice has in the chat of its conversation."""
    return replace(update, prompt_index=0, index=update.delta.index)


def _with_number(name: str, index: int) -> str:
    """Return the name of a field with the number of the conversation, if it is a part of the conversation."""
    return f"messages[{index}]{name.removeprefix('messages')}" if name.startswith("messages") else name
