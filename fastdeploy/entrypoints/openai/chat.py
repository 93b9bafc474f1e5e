# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize.preprocess import build_request
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate
from fastdeploy.entrypoints.openai.job import Job, make_request_id
from fastdeploy.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from fastdeploy.entrypoints.openai.params import chat_params
from fastdeploy.entrypoints.openai.protocol import NOT_YET, ChatCompletionRequest
from fastdeploy.entrypoints.openai.server import ApiServer

ROLES = ("system", "developer", "user", "assistant")
REFUSED_KEYS = ("tool_calls", "tool_call_id", "function_call", "audio")


class ChatJob(Job):
    """A request for the next message of a conversation."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, server: ApiServer, asked: ChatCompletionRequest) -> None:
        """Check the request and render the conversation.

        Raises:
            InvalidRequestError: naming the field and its range.
        """
        request_id = make_request_id(asked.request_id)
        super().__init__(server, asked, f"chatcmpl-{request_id}")
        self._asked = asked
        params = chat_params(asked, server.defaults, server.config.max_logprobs)
        prompt = render_prompt(server, asked)
        add_special = asked.add_special_tokens is True  # the template writes its own
        request = build_request(server.tokenizer, server.limits, self.answer_id, prompt, params, add_special)
        request.cache_salt = asked.cache_salt or ""
        self.requests = [request]

    def choice(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Return the choice with its message."""
        return {
            "index": update.index,
            "message": {"role": "assistant", "content": update.text, "refusal": None},
            **self._rest(update),
        }

    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[dict[str, Any]]:
        """Yield a choice that opens the message, then one with what is new."""
        if update.is_first:
            delta = {"role": "assistant", "content": ""}
            yield {"index": update.index, "delta": delta, "logprobs": None, "finish_reason": None}
        rest = self._rest(update)
        if update.text or rest["finish_reason"] or rest["logprobs"] or self._asked.return_token_ids:
            yield {"index": update.index, "delta": {"content": update.text} if update.text else {}, **rest}

    def _rest(self, update: ChoiceUpdate) -> dict[str, Any]:
        delta, tokenizer = update.delta, self.server.tokenizer
        made: dict[str, Any] = {"logprobs": None, "finish_reason": delta.finish_reason}
        if self._asked.logprobs:
            made["logprobs"] = chat_logprobs(tokenizer, delta.logprobs or [], self._asked.top_logprobs or 0)
        made.update(self.extensions(update, ("prompt_token_ids", "completion_token_ids")))
        if delta.prompt_logprobs is not None:
            has_texts = self._asked.include_logprobs_decode_token
            made["prompt_logprobs"] = prompt_logprobs(tokenizer, delta.prompt_logprobs, has_texts)
        return made


def render_prompt(server: ApiServer, asked: ChatCompletionRequest) -> str | list[int]:
    """Return the prompt: token ids as given, or the rendered conversation."""
    if asked.prompt_token_ids is not None:
        return asked.prompt_token_ids
    if not asked.messages:
        raise InvalidRequestError("messages", "expected at least one message")
    messages = [_message(at, message) for at, message in enumerate(asked.messages)]
    kwargs = dict(asked.chat_template_kwargs or {})
    for name in ("messages", "add_generation_prompt", "chat_template"):
        if name in kwargs:
            raise InvalidRequestError("chat_template_kwargs", f"{name!r} is a field of its own")
    return server.tokenizer.apply_chat_template(messages, asked.add_generation_prompt, server.chat_template, **kwargs)


def _message(at: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates want it, its content one text."""
    where = f"messages[{at}]"
    role = message.get("role")
    if role in ("tool", "function"):
        raise InvalidRequestError(f"{where}.role", f"tool calling {NOT_YET}")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role", f"expected one of {', '.join(ROLES)}, got {role!r}")
    for key in REFUSED_KEYS:
        if message.get(key):
            raise InvalidRequestError(f"{where}.{key}", NOT_YET)
    text = _text(f"{where}.content", message.get("content"))
    return {**message, "role": "system" if role == "developer" else role, "content": text}


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(where, "expected text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(where, f"expected parts of type text, got {kind!r}: this server reads text only")
        texts.append(part["text"])
    return "\n".join(texts)
