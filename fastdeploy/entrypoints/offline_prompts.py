# SPDX-License-Identifier: Apache-2.0
"""The arguments of the offline `LLM` that have one item per prompt: prompts, conversations, priorities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import check_cache_salt
from fastdeploy.core.json_types import shorten, to_integers, to_list, to_python
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import PRIORITIES

Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "add_special_tokens", "cache_salt")
_EXPECTED = "a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`"


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """Return one prompt, or several, as a list of texts, mappings, and lists of ids that are not checked yet.

    Raises:
        InvalidRequestError: `prompts` or one of them is none of these.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = to_list("prompts", prompts, f"expected {_EXPECTED}, or a list of these")
    if items and all(isinstance(to_python(item), (int, float)) for item in items):
        return [to_integers(items)]
    return [_as_prompt(f"prompts[{i}]", item) for i, item in enumerate(items)]


def _as_prompt(field: str, prompt: Any) -> Prompt:
    if isinstance(prompt, (str, Mapping)):
        return prompt
    return to_integers(to_list(field, prompt, f"expected {_EXPECTED}"))


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the keys of a prompt that are not None, and its text or token ids as `content`.

    Raises:
        InvalidRequestError: a key is unknown or has a value of another type.
    """
    if not isinstance(prompt, Mapping):
        return {"content": prompt}
    fields = {key: value for key, value in prompt.items() if value is not None}
    if unknown := sorted(set(fields).difference(PROMPT_KEYS), key=str):
        raise InvalidRequestError("prompts", f"unknown key {unknown[0]!r}; expected {', '.join(PROMPT_KEYS)}")
    for key in ("prompt", "cache_salt"):
        if not isinstance(fields.get(key, ""), str):
            raise InvalidRequestError("prompts", f"expected a text as {key}, got {shorten(fields[key])}")
    if "cache_salt" in fields:
        check_cache_salt("prompts.cache_salt", fields["cache_salt"])
    if "prompt_token_ids" in fields:
        expected = "expected a list of token ids as prompt_token_ids"
        return {**fields, "content": to_integers(to_list("prompts", fields["prompt_token_ids"], expected))}
    if "prompt" not in fields:
        raise InvalidRequestError("prompts", f'expected "prompt" or "prompt_token_ids", got {sorted(fields)}')
    return {**fields, "content": fields["prompt"]}


def prompt_text(prompt: Prompt) -> str | None:
    """Return the text of a prompt, None if it has only token ids."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", "") or None  # type: ignore[assignment]
    return prompt if isinstance(prompt, str) else None


def as_conversations(messages: Any) -> list[Any]:
    """Return one conversation, or several, as a list of conversations, whose messages are not checked yet.

    Raises:
        InvalidRequestError: `messages` or a conversation is not a list.
    """
    expected = "expected a list of messages, or a list of such lists"
    items = to_list("messages", messages, expected)
    if items and isinstance(items[0], Mapping):
        return [items]
    return [to_list("messages", item, expected) for item in items]


def set_priorities(requests: Sequence[GenerationRequest], priority: Any) -> None:
    """Set the priorities of requests: those of a list, or one for all; None leaves them as they are.

    Raises:
        InvalidRequestError: there is neither one integer nor one per request.
    """
    if priority is None:
        return
    values = to_python(priority)
    if isinstance(values, (int, float)):
        values = [PRIORITIES.read("priority", values)] * len(requests)
    expected = f"expected an integer, or a list with one integer per prompt ({len(requests)})"
    values = to_list("priority", values, expected)
    if len(values) != len(requests):
        raise InvalidRequestError("priority", f"{expected}, got {len(values)}")
    for i, (request, value) in enumerate(zip(requests, values)):
        request.priority = PRIORITIES.read(f"priority[{i}]", value)
